"""Does it fit, and if not, what is in the way and for how long? Nothing here changes anything.

Every check is the same two things: a scope that refuses, and a conservative wait after which it may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from extproc.domain import budget
from extproc.domain.budget import PARTS, Debt
from extproc.domain.holdings import SECONDS_PER_MINUTE, Held, ReplicaBook, TenantBook
from extproc.domain.policy import Pool, Quota, Replica
from extproc.domain.queue import Ahead
from extproc.domain.reservation import Balance, Reservation, Scope

WHOLE_PERMILLE = 1000

Refused = tuple[Scope, int]
"""A scope that refuses, and a conservative wait after which it may not, in ms."""


def headroom_tokens(
    *, ceiling_tokens: int, active_tokens: int, queued_tokens: int, guard_band_permille: int
) -> int:
    """Tokens that a replica can still take: ceiling less active, less queued ahead, less the guard band.

    >>> headroom_tokens(
    ...     ceiling_tokens=96_000, active_tokens=58_000, queued_tokens=8_000, guard_band_permille=100
    ... )
    20400
    """
    return ceiling_tokens - active_tokens - queued_tokens - ceiling_tokens * guard_band_permille // 1000


@dataclass(frozen=True, slots=True)
class Fit:
    """One replica's answer to a reservation: `scope` is `None` and the wait 0 when it can take it.

    `window_ms` is set when nothing but the prefill window is in the way: that much time alone will do.
    """

    replica: Replica
    ttft_ms: int
    room_tokens: int
    backlog_tokens: int
    scope: Scope | None
    wait_ms: int
    window_ms: int | None


def fit_of(
    reservation: Reservation, pool: Pool, replica: Replica, book: ReplicaBook, *, left_ms: int, now_ms: int
) -> Fit:
    """Whether `replica` can take the reservation with the first token there in `left_ms`."""
    backlog_tokens = book.backlog_tokens(pool, now_ms)
    ttft_ms = pool.prefill_ms(backlog_tokens + reservation.input_tokens)
    room_tokens = room_of(pool, replica, book)
    refused: list[Refused] = []
    if ttft_ms > left_ms:
        refused.append((Scope.DEADLINE, ttft_ms - left_ms))
    if reservation.total_tokens > room_tokens:
        shortfall_tokens = reservation.total_tokens - room_tokens
        refused.append((Scope.REPLICA_TOKENS, book.held.wait_for_tokens_ms(shortfall_tokens)))
    # A prompt longer than the window must still be served: it waits for an idle window, not for ever.
    window_tokens = pool.prefill_tokens_per_s * pool.prefill_window_ms // 1000
    if backlog_tokens > 0 and backlog_tokens + reservation.input_tokens > window_tokens:
        excess_tokens = min(backlog_tokens, backlog_tokens + reservation.input_tokens - window_tokens)
        refused.append((Scope.PREFILL_WINDOW, pool.prefill_ms(excess_tokens)))
    if book.held.requests >= pool.request_cap:
        excess_requests = book.held.requests + 1 - pool.request_cap
        refused.append((Scope.REQUEST_CAP, book.held.wait_for_requests_ms(excess_requests)))
    if not refused:
        return Fit(replica, ttft_ms, room_tokens, backlog_tokens, None, 0, None)
    only = refused[0] if len(refused) == 1 else None
    return Fit(
        replica=replica,
        ttft_ms=ttft_ms,
        room_tokens=room_tokens,
        backlog_tokens=backlog_tokens,
        scope=refused[0][0],
        wait_ms=max(wait for _, wait in refused),
        window_ms=only[1] if only is not None and only[0] is Scope.PREFILL_WINDOW else None,
    )


def room_of(pool: Pool, replica: Replica, book: ReplicaBook) -> int:
    """Tokens that `replica` can still take; negative while its limits have shrunk below what it holds."""
    return headroom_tokens(
        ceiling_tokens=replica.ceiling_tokens,
        active_tokens=book.held.tokens,
        queued_tokens=0,
        guard_band_permille=pool.guard_band_permille,
    )


def rank(fit: Fit) -> tuple[int, int, int]:
    """Smaller is better: of replicas that can take it the one with most room; else the one that may first."""
    return fit.wait_ms, -fit.room_tokens, fit.backlog_tokens


def tenant_refusals(reservation: Reservation, tenant: TenantBook, now_ms: int) -> Iterator[Refused]:
    """The tenant's own limits that refuse. The waits of its two rates are exact."""
    quota, held = reservation.quota, tenant.held
    for scope, debt, amount, rate, burst in (
        (
            Scope.TENANT_TOKEN_RATE,
            tenant.token_debt,
            reservation.work_units,
            quota.tokens_per_minute,
            quota.burst_tokens,
        ),
        (
            Scope.TENANT_REQUEST_RATE,
            tenant.request_debt,
            1,
            quota.requests_per_minute,
            quota.requests_per_minute,
        ),
    ):
        if rate is not None and burst is not None:
            parts = debt.parts_at(rate, now_ms)
            exact_ms = budget.wait_ms(parts, amount, rate_per_minute=rate, burst=burst)
            if exact_ms > 0:
                yield scope, exact_ms
    if quota.inflight_tokens is not None:
        shortfall_tokens = held.tokens + reservation.total_tokens - quota.inflight_tokens
        if shortfall_tokens > 0:
            yield Scope.TENANT_INFLIGHT_TOKENS, held.wait_for_tokens_ms(shortfall_tokens)
    if quota.inflight_requests is not None and held.requests >= quota.inflight_requests:
        shortfall_requests = held.requests + 1 - quota.inflight_requests
        yield Scope.TENANT_INFLIGHT_REQUESTS, held.wait_for_requests_ms(shortfall_requests)


RATES = frozenset((Scope.TENANT_TOKEN_RATE, Scope.TENANT_REQUEST_RATE))
"""Scopes whose wait is exact, and over when it is over."""


def lane_refusals(
    reservation: Reservation,
    pool: Pool,
    held: Held,
    prefill: Debt,
    backlogs_tokens: Sequence[int],
    *,
    now_ms: int,
) -> Iterator[Refused]:
    """The lane's limits in this pool that refuse: its share of tokens, and what it may take of prefill.

    `backlogs_tokens` is what each replica has not read yet. The two limits on prefill are one scope, and its
    wait is exact as long as nobody else is granted anything:

    - Its share has the same shape as a replica's window, for the whole pool: what the lane has been granted and
      its share of the reading speed has not read yet, and a prompt larger than all of it waits for an idle window.
    - Its spare replicas are trunk reservation, as telephone networks keep lines free for calls that may not be
      turned away: the lane takes an idle replica only while more than that many are idle, whoever keeps the
      others busy. So it takes all that the higher lanes leave, and they find an idle replica.
    """
    shortfall_tokens = held.tokens + reservation.total_tokens - reservation.lane_limit_tokens
    if shortfall_tokens > 0:
        yield Scope.LANE_SHARE, held.wait_for_tokens_ms(shortfall_tokens)
    wait_ms = 0
    share_permille = reservation.lane_terms.prefill_share_permille
    if share_permille < WHOLE_PERMILLE:
        rate = lane_prefill_per_minute(pool, share_permille)
        parts = prefill.parts_at(rate, now_ms)
        window_parts = rate * pool.prefill_window_ms  # a rate per minute is a rate in parts per ms
        excess_parts = min(parts, parts + reservation.input_tokens * PARTS - window_parts)
        wait_ms = max(0, -(-excess_parts // rate))
    spare = min(reservation.lane_terms.spare_replicas, len(backlogs_tokens) - 1)
    if spare > 0:
        wait_ms = max(wait_ms, pool.prefill_ms(sorted(backlogs_tokens)[spare]))
    if wait_ms > 0:
        yield Scope.LANE_PREFILL, wait_ms


def lane_prefill_per_minute(pool: Pool, share_permille: int) -> int:
    """How many prompt tokens a lane with this share may have read in a minute, by all replicas; at least 1."""
    per_minute = pool.prefill_tokens_per_s * SECONDS_PER_MINUTE * len(pool.replicas)
    return max(1, per_minute * share_permille // WHOLE_PERMILLE)


@dataclass(slots=True)
class PoolState:
    """All replicas of a pool taken together."""

    room_tokens: int = 0
    room_requests: int = 0
    backlog_tokens: int = 0
    held: Held = field(default_factory=Held)


def pool_state(pool: Pool, books: Mapping[tuple[str, str], ReplicaBook], now_ms: int) -> PoolState:
    """What the pool holds and what it has left. A replica that holds too much does not use up others' room."""
    state = PoolState()
    for replica in pool.replicas:
        book = books.get((pool.name, replica.name)) or ReplicaBook()
        state.room_tokens += max(0, room_of(pool, replica, book))
        state.room_requests += max(0, pool.request_cap - book.held.requests)
        state.backlog_tokens += book.backlog_tokens(pool, now_ms)
        state.held.tokens += book.held.tokens
        state.held.requests += book.held.requests
        state.held.request_ms += book.held.request_ms
        state.held.token_ms += book.held.token_ms
    return state


def drain_ms(reservation: Reservation, pool: Pool, state: PoolState, ahead: Ahead) -> int:
    """How long until it is this request's turn, by a conservative estimate, with `ahead` before it.

    What waits ahead must be read, after what has been granted and is not read yet; and if its tokens and the
    request's own do not fit, or the number of requests does not, as much must leave first (Little's law).
    The two are added up, although they overlap. Tokens leave at the speed of those that are held now. Requests
    leave at the speed of as many as the pool may have: a line that is longer than that has filled it before.
    """
    speed = pool.prefill_tokens_per_s * len(pool.replicas)
    reading_ms = -(-(state.backlog_tokens + ahead.input_tokens) * 1000 // speed)
    leaving_ms = 0
    shortfall_tokens = ahead.tokens + reservation.total_tokens - state.room_tokens
    if shortfall_tokens > 0:
        leaving_ms = state.held.wait_for_tokens_ms(shortfall_tokens)
    shortfall_requests = ahead.requests + 1 - state.room_requests
    if shortfall_requests > 0 and state.held.requests > 0:
        mean_ms = -(-state.held.request_ms // state.held.requests)
        most_requests = state.held.requests + state.room_requests
        leaving_ms = max(leaving_ms, -(-shortfall_requests * mean_ms // most_requests))
    return reading_ms + leaving_ms


def leaves_room(reservation: Reservation, pool: Pool, state: PoolState, ahead: Ahead) -> bool:
    """Whether a request that will not wait leaves the room that those who wait ahead of it wait for."""
    window_tokens = pool.prefill_tokens_per_s * pool.prefill_window_ms // 1000 * len(pool.replicas)
    unread_tokens = state.backlog_tokens + ahead.input_tokens
    return (
        reservation.total_tokens <= state.room_tokens - ahead.tokens
        and ahead.requests < state.room_requests
        and (ahead.input_tokens == 0 or unread_tokens + reservation.input_tokens <= window_tokens)
    )


def balance_of(tenant: TenantBook, quota: Quota, now_ms: int) -> Balance:
    """What the tenant's rates still allow."""
    tokens_remaining = tokens_reset_ms = requests_remaining = requests_reset_ms = None
    if quota.tokens_per_minute is not None and quota.burst_tokens is not None:
        parts = tenant.token_debt.parts_at(quota.tokens_per_minute, now_ms)
        tokens_remaining = budget.remaining(parts, quota.burst_tokens)
        tokens_reset_ms = budget.reset_ms(parts, quota.tokens_per_minute)
    if quota.requests_per_minute is not None:
        parts = tenant.request_debt.parts_at(quota.requests_per_minute, now_ms)
        requests_remaining = budget.remaining(parts, quota.requests_per_minute)
        requests_reset_ms = budget.reset_ms(parts, quota.requests_per_minute)
    return Balance(
        tokens_remaining=tokens_remaining,
        tokens_reset_ms=tokens_reset_ms,
        requests_remaining=requests_remaining,
        requests_reset_ms=requests_reset_ms,
    )
