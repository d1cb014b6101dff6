"""From a counted request to a reservation, or to the one reason why not; and from a denial to an answer.

The order is the design's: what can never fit is refused first and for ever (413), then what cannot be in
time, and only then is anything asked of the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from extproc.domain.contract import RateLimitView, Refusal, jittered_wait_ms
from extproc.domain.demand import Demand, classify, demand_of
from extproc.domain.frozen import frozen
from extproc.domain.outcome import Reason
from extproc.domain.policy import Lane, Model, Policy, Pool, Tenant
from extproc.domain.reservation import Balance, Denied, LaneTerms, Reservation, Scope

DENIAL_REASONS: Mapping[Scope, Reason] = {
    Scope.DEADLINE: Reason.DEADLINE_INFEASIBLE,
    Scope.TENANT_TOKEN_RATE: Reason.TENANT_RATE,
    Scope.TENANT_REQUEST_RATE: Reason.TENANT_RATE,
    Scope.TENANT_INFLIGHT_TOKENS: Reason.TENANT_INFLIGHT,
    Scope.TENANT_INFLIGHT_REQUESTS: Reason.TENANT_INFLIGHT,
    Scope.LANE_SHARE: Reason.TOKEN_BUDGET_EXHAUSTED,
    Scope.LANE_PREFILL: Reason.TOKEN_BUDGET_EXHAUSTED,
    Scope.REPLICA_TOKENS: Reason.TOKEN_BUDGET_EXHAUSTED,
    Scope.PREFILL_WINDOW: Reason.TOKEN_BUDGET_EXHAUSTED,
    Scope.REQUEST_CAP: Reason.TOKEN_BUDGET_EXHAUSTED,
    Scope.QUEUE: Reason.QUEUE_FULL,
    Scope.RESIDENCE: Reason.RESIDENCE_EXPIRED,
    Scope.WITHDRAWN: Reason.DRAINING,  # nobody waits for this answer any more
}

FALLBACK_REASONS = frozenset(
    {
        Reason.TOKEN_BUDGET_EXHAUSTED,
        Reason.QUEUE_FULL,
        Reason.RESIDENCE_EXPIRED,
        Reason.DEADLINE_INFEASIBLE,
        Reason.LANE_SUSPENDED,
        Reason.NO_CAPACITY,
        Reason.BREAKER_OPEN,
    }
)
"""For want of these there may be room elsewhere. A tenant's own limits are the same everywhere, and what is too
large is never made to fit by sending it on."""

DENIAL_MESSAGES: Mapping[Scope, str] = {
    Scope.DEADLINE: "The first token cannot be there before the deadline.",
    Scope.TENANT_TOKEN_RATE: "The tenant's token rate is used up for now.",
    Scope.TENANT_REQUEST_RATE: "The tenant's request rate is used up for now.",
    Scope.TENANT_INFLIGHT_TOKENS: "The tenant's requests in flight hold all the tokens they may.",
    Scope.TENANT_INFLIGHT_REQUESTS: "The tenant has as many requests in flight as it may.",
    Scope.LANE_SHARE: "The lane holds its whole share of the pool.",
    Scope.LANE_PREFILL: "The lane's prompts take all the reading speed that the lane may have.",
    Scope.REPLICA_TOKENS: "No replica has enough unreserved tokens.",
    Scope.PREFILL_WINDOW: "The replicas are still reading the prompts they have.",
    Scope.REQUEST_CAP: "Every replica has as many requests as it may.",
    Scope.QUEUE: "As many requests wait as the lane allows.",
    Scope.RESIDENCE: "There was no room for as long as a request of this lane may wait.",
    Scope.WITHDRAWN: "The request was withdrawn while it waited.",
}


@frozen
class Plan:
    """Where a request would go, what it would hold there, and how long its first token may take from its arrival."""

    lane: Lane
    pool: Pool
    demand: Demand
    reservation: Reservation
    deadline_ms: int


@frozen
class Screened:
    """A request that is refused before the ledger is asked. `lane` is known once size has decided it.

    `plan` is where it would have gone, had the engines there been well.
    """

    refusal: Refusal
    lane: Lane | None = None
    plan: Plan | None = None


def context_refusal(model: Model, *, input_tokens: int, exact: bool) -> Refusal:
    """The prompt alone leaves no room for an answer in the model's context window."""
    counted = f"{input_tokens}" if exact else f"at least {input_tokens}"
    return Refusal(
        reason=Reason.CONTEXT_LIMIT,
        message=(
            f"The prompt has {counted} tokens; the model's context window is {model.context_tokens} tokens "
            "for prompt and answer together. Shorten or split it."
        ),
        input_tokens=input_tokens,
        maximums={"context_tokens": model.context_tokens},
    )


def plan(
    per_sequence_tokens: tuple[int, ...],
    *,
    output_limit_tokens: int | None,
    choices: int,
    policy: Policy,
    model: Model,
    tenant: Tenant,
    declared_lane: Lane | None,
    declared_deadline_ms: int | None,
    elapsed_ms: int,
    lease_id: str,
    spread: int,
    pool: Pool | None = None,
) -> Plan | Screened:
    """Decide everything about a counted request that needs no shared state.

    `pool` is where it would go instead of to the pool that serves its lane.
    `elapsed_ms` is how much of the deadline has gone since the request arrived; `spread` differs between
    requests and spreads waits (see `jittered_wait_ms`).
    """
    demand = demand_of(
        per_sequence_tokens, output_limit_tokens=output_limit_tokens, choices=choices, model=model
    )
    smallest_answer_tokens = 0 if output_limit_tokens == 0 else 1
    if demand.longest_sequence_tokens + smallest_answer_tokens > model.context_tokens:
        refusal = context_refusal(model, input_tokens=demand.longest_sequence_tokens, exact=True)
        return Screened(refusal=refusal)

    lane = classify(demand, policy=policy, model=model, tenant=tenant, declared=declared_lane)
    if lane is None:
        return Screened(refusal=_lane_refusal(demand, policy, model, tenant))
    lane_policy = policy.lanes[lane]
    pool = policy.pools[model.lanes[lane]] if pool is None else pool
    work_units = demand.work_units(model, policy.limits)
    lane_limit_tokens = pool.lane_limit_tokens(lane_policy.share_permille)

    never = _never_fits(demand, work_units, tenant, pool, lane_limit_tokens)
    if never is not None:
        return Screened(refusal=never, lane=lane)

    deadline_ms = lane_policy.deadline_ms
    if declared_deadline_ms is not None:
        deadline_ms = min(deadline_ms, declared_deadline_ms)
    left_ms = deadline_ms - elapsed_ms
    own_prefill_ms = pool.prefill_ms(demand.input_tokens)
    if own_prefill_ms > left_ms:
        # Not even an idle replica could do it, so the same deadline will fail again: say do not retry.
        refusal = Refusal(
            reason=Reason.DEADLINE_INFEASIBLE,
            message=(
                f"Reading the prompt alone takes about {own_prefill_ms} ms and {max(left_ms, 0)} ms are left "
                "of the deadline. Allow more time or send a shorter prompt."
            ),
            retry_after_ms=jittered_wait_ms(1000, spread=spread),
            retry_helps=False,
            input_tokens=demand.input_tokens,
            output_tokens=demand.output_tokens,
            maximums={"deadline_ms": deadline_ms},
        )
        return Screened(refusal=refusal, lane=lane)

    reservation = Reservation(
        lease_id=lease_id,
        tenant=tenant.id,
        quota=tenant.tier.quota,
        lane=lane,
        lane_limit_tokens=lane_limit_tokens,
        pool=pool,
        input_tokens=demand.input_tokens,
        output_tokens=demand.output_tokens,
        work_units=work_units,
        deadline_in_ms=left_ms,
        residence_ms=pool.residence_ms(demand.input_tokens, demand.output_tokens),
        policy_version=policy.version,
        hold_ms=lane_policy.residence_ms,
        weight=tenant.tier.weight,
        lane_terms=LaneTerms(
            queue_requests=lane_policy.queue_requests,
            queue_tokens=lane_policy.queue_tokens,
            floor_permille=lane_policy.floor_permille,
            prefill_share_permille=policy.prefill_share_permille(lane, pool.name),
            spare_replicas=policy.spare_replicas(lane, pool.name),
        ),
    )
    return Plan(lane=lane, pool=pool, demand=demand, reservation=reservation, deadline_ms=deadline_ms)


def denial(denied: Denied, *, plan: Plan, tenant: Tenant, spread: int) -> Refusal:
    """What the caller is told when a scope of its reservation has no room."""
    message = DENIAL_MESSAGES[denied.scope]
    if denied.waited_ms > 0 and denied.behind is not None:
        message = f"{message} It has waited {denied.waited_ms} ms: {DENIAL_MESSAGES[denied.behind]}"
    return Refusal(
        reason=DENIAL_REASONS[denied.scope],
        message=message,
        retry_after_ms=jittered_wait_ms(denied.wait_ms, spread=spread),
        input_tokens=plan.demand.input_tokens,
        output_tokens=plan.demand.output_tokens,
        maximums={
            name: most for name, most in _MAXIMUMS[denied.scope](plan.reservation).items() if most is not None
        },
        waited_ms=denied.waited_ms or None,
        ahead_requests=denied.ahead_requests,
        rate_limit=rate_limit_view(denied.balance, tenant),
    )


def rate_limit_view(balance: Balance, tenant: Tenant) -> RateLimitView:
    """The tenant's rates as clients see them."""
    quota = tenant.tier.quota
    return RateLimitView(
        limit_tokens=quota.tokens_per_minute,
        remaining_tokens=balance.tokens_remaining,
        reset_tokens_ms=balance.tokens_reset_ms,
        limit_requests=quota.requests_per_minute,
        remaining_requests=balance.requests_remaining,
        reset_requests_ms=balance.requests_reset_ms,
    )


def _lane_refusal(demand: Demand, policy: Policy, model: Model, tenant: Tenant) -> Refusal:
    """No lane takes a request of this size: name the largest that would have been accepted."""
    open_lanes = [policy.lanes[lane] for lane in Lane if lane in model.lanes and lane in tenant.tier.lanes]
    maximums = {
        "input_tokens": max((lane.max_input_tokens for lane in open_lanes), default=0),
        "output_tokens": max((lane.max_output_tokens for lane in open_lanes), default=0),
    }
    return Refusal(
        reason=Reason.LANE_LIMIT,
        message=(
            f"{demand.input_tokens} input and up to {demand.output_tokens} output tokens fit no lane of this "
            f"model for this tenant: at most {maximums['input_tokens']} and {maximums['output_tokens']}."
        ),
        input_tokens=demand.input_tokens,
        output_tokens=demand.output_tokens,
        maximums=maximums,
    )


def _never_fits(
    demand: Demand, work_units: int, tenant: Tenant, pool: Pool, lane_limit_tokens: int
) -> Refusal | None:
    """A request that no amount of waiting would admit: bigger than a quota or a pool can ever hold."""
    quota, total_tokens = tenant.tier.quota, demand.total_tokens
    if (
        (quota.burst_tokens is None or work_units <= quota.burst_tokens)
        and (quota.inflight_tokens is None or total_tokens <= quota.inflight_tokens)
        and total_tokens <= lane_limit_tokens
        and total_tokens <= pool.largest_usable_tokens
    ):
        return None
    for reason, asked, most, name, owner in (
        (Reason.EXCEEDS_QUOTA, work_units, quota.burst_tokens, "burst_tokens", "the tenant's rate"),
        (
            Reason.EXCEEDS_QUOTA,
            total_tokens,
            quota.inflight_tokens,
            "inflight_tokens",
            "the tenant's requests in flight",
        ),
        (Reason.EXCEEDS_CAPACITY, total_tokens, lane_limit_tokens, "lane_tokens", "the lane"),
        (
            Reason.EXCEEDS_CAPACITY,
            total_tokens,
            pool.largest_usable_tokens,
            "replica_tokens",
            "a replica",
        ),
    ):
        if most is not None and asked > most:
            return Refusal(
                reason=reason,
                message=(
                    f"The request needs {asked} tokens and {owner} can never hold more than {most}. "
                    "Shorten it or lower its output limit."
                ),
                input_tokens=demand.input_tokens,
                output_tokens=demand.output_tokens,
                maximums={name: most},
            )
    return None


def _prefill_window_tokens(pool: Pool) -> int:
    return pool.prefill_tokens_per_s * pool.prefill_window_ms // 1000


def _lane_prefill_tokens(reservation: Reservation) -> int:
    pool, share_permille = reservation.pool, reservation.lane_terms.prefill_share_permille
    return _prefill_window_tokens(pool) * len(pool.replicas) * share_permille // 1000


_MAXIMUMS: Mapping[Scope, Callable[[Reservation], dict[str, int | None]]] = {
    Scope.DEADLINE: lambda asked: {"deadline_ms": asked.deadline_in_ms},
    Scope.TENANT_TOKEN_RATE: lambda asked: {"tokens_per_minute": asked.quota.tokens_per_minute},
    Scope.TENANT_REQUEST_RATE: lambda asked: {"requests_per_minute": asked.quota.requests_per_minute},
    Scope.TENANT_INFLIGHT_TOKENS: lambda asked: {"inflight_tokens": asked.quota.inflight_tokens},
    Scope.TENANT_INFLIGHT_REQUESTS: lambda asked: {"inflight_requests": asked.quota.inflight_requests},
    Scope.LANE_SHARE: lambda asked: {"lane_tokens": asked.lane_limit_tokens},
    Scope.LANE_PREFILL: lambda asked: {"lane_prefill_tokens": _lane_prefill_tokens(asked)},
    Scope.REPLICA_TOKENS: lambda asked: {"replica_tokens": asked.pool.largest_usable_tokens},
    Scope.PREFILL_WINDOW: lambda asked: {"prefill_window_tokens": _prefill_window_tokens(asked.pool)},
    Scope.REQUEST_CAP: lambda asked: {"request_cap": asked.pool.request_cap},
    Scope.QUEUE: lambda asked: {
        "queue_requests": asked.lane_terms.queue_requests,
        "queue_tokens": asked.lane_terms.queue_tokens,
    },
    Scope.RESIDENCE: lambda asked: {"residence_ms": asked.hold_ms},
    Scope.WITHDRAWN: lambda _asked: {},
}
"""The limits behind each scope, by the names that callers are told."""
