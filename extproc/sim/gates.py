"""Who decides what may reach the engines: the policy under test, or one of the two things people do without it.

`AdmissionGate` is the domain code itself: plan, reserve, wait in line, release at the end, book what was used.
`OpenGate` lets everything through to the replica with the fewest requests, of all that serve the model: what a
good load balancer does that knows nothing of tokens. With a request limit it refuses what exceeds that number of
requests in flight.

Time is the simulation's, in milliseconds, as an argument.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

from extproc.domain.admission import FALLBACK_REASONS, Plan, Screened, denial, plan
from extproc.domain.books import Books
from extproc.domain.contract import Refusal
from extproc.domain.demand import Demand, demand_of
from extproc.domain.lease import UNDYING
from extproc.domain.outcome import Reason
from extproc.domain.policy import Lane, Model, ModelFallback, Policy, Pool, PoolFallback, Tenant
from extproc.domain.reservation import Denied, Granted, Queued
from extproc.sim.workload import Request

RECLAIMED_AT_ONCE = 8
"""As the ledger of a single worker does it, on every request."""

LIMITER_RETRY_MS = 1_000
"""What a plain request limiter says: try again in a second."""


class UnknownName(ValueError):
    """A stream names a model or a tenant that the policy does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as the policy understands it, and the lane that it belongs to by intent and size.

    The same for every run, so that runs can be compared lane by lane.
    """

    request: Request
    model: Model
    tenant: Tenant
    lane: Lane
    demand: Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """It may go to this replica now; `fallback` is the label of the policy's fallback that it took there."""

    pool: str
    replica: str
    fallback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """It may not; the contract says what that means for the caller."""

    refusal: Refusal


Verdict = Admitted | Refused
"""What a caller is told in the end."""


class Gate(Protocol):
    """May this attempt of a request go to an engine, and to which?

    `ask` answers `None` when the attempt has to wait: then its verdict is in a later `news`, or it withdraws.
    An admitted attempt is given back with `ended`, and settled with `book` when its usage is known.
    """

    def ask(self, asked: Asked, attempt_id: str, now_ms: int) -> Verdict | None:
        """Decide on an attempt, if that can be done at once."""
        ...

    def news(self, now_ms: int) -> list[tuple[str, Verdict]]:
        """The verdicts on attempts that had to wait, each once."""
        ...

    def withdraw(self, attempt_id: str, now_ms: int) -> None:
        """The caller of a waiting attempt has hung up."""
        ...

    def ended(self, attempt_id: str, now_ms: int) -> None:
        """The engine is done with an admitted attempt, however it ended."""
        ...

    def book(self, attempt_id: str, used: Demand, now_ms: int) -> None:
        """What an attempt that has ended really used is known."""
        ...

    def wake_at_ms(self) -> int | None:
        """When time alone next changes something; `None` if never."""
        ...

    def wake(self, now_ms: int) -> None:
        """Let time have its effect."""
        ...


def named(policy: Policy, request: Request) -> tuple[Model, Tenant]:
    """The request's model (the policy's first, if it names none) and tenant. Raises UnknownName."""
    model = next(iter(policy.models.values())) if request.model is None else policy.names.get(request.model)
    tenant = policy.tenants.get(request.tenant)
    for kind, found, name, known in (
        ("model", model, request.model, policy.names),
        ("tenant", tenant, request.tenant, policy.tenants),
    ):
        if found is None:
            raise UnknownName(
                f"stream {request.stream}: the policy has no {kind} {name!r}; it has {', '.join(known)}"
            )
    assert model is not None
    assert tenant is not None
    return model, tenant


def read(policy: Policy, request: Request) -> Asked:
    """What a request is, by the policy; too large for any lane, it is in the one that it declared.

    Raises UnknownName for a model or a tenant that the policy does not have.
    """
    model, tenant = named(policy, request)
    lane = _plan(policy, model, tenant, request, "").lane or request.declared_lane
    if lane is None or lane not in model.lanes:
        lane = next(iter(model.lanes))
    demand = demand_of(
        (request.input_tokens,), output_limit_tokens=request.limit_tokens, choices=1, model=model
    )
    return Asked(request=request, model=model, tenant=tenant, lane=lane, demand=demand)


class AdmissionGate:
    """The policy, by the same code that the service runs.

    What finds no room goes where the policy's fallbacks say, once, without waiting there; a redirect to another
    region is a refusal here. Another model reads and writes as many tokens as the first.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.books = Books()
        self._waiting: dict[str, tuple[Plan, Tenant, Request]] = {}
        self._models: dict[str, Model] = {}  # of attempts that the ledger was asked about

    def ask(self, asked: Asked, attempt_id: str, now_ms: int) -> Verdict | None:
        """See `Gate.ask`."""
        # By this gate's policy, which need not be the one that lanes are reported by.
        model, tenant = named(self.policy, asked.request)
        planned = _plan(self.policy, model, tenant, asked.request, attempt_id)
        if isinstance(planned, Screened):
            return self._elsewhere(planned.refusal, attempt_id, model, tenant, asked.request, now_ms=now_ms)
        self._models[attempt_id] = model
        self.books.reclaim(now_ms, most=RECLAIMED_AT_ONCE)
        self.books.sweep(now_ms, most=1)
        answer = self.books.reserve(planned.reservation, now_ms)
        if isinstance(answer, Queued):
            self._waiting[attempt_id] = (planned, tenant, asked.request)
            return None
        return self._verdict(answer, planned, tenant, asked.request, now_ms)

    def news(self, now_ms: int) -> list[tuple[str, Verdict]]:
        """See `Gate.news`."""
        if not self._waiting:
            return []
        return [
            (attempt_id, self._verdict(answer, *self._waiting.pop(attempt_id), now_ms))
            for attempt_id, answer in self.books.take_news(UNDYING, now_ms)
        ]

    def withdraw(self, attempt_id: str, now_ms: int) -> None:
        """See `Gate.withdraw`."""
        del self._waiting[attempt_id], self._models[attempt_id]
        self.books.withdraw(attempt_id, now_ms)

    def ended(self, attempt_id: str, now_ms: int) -> None:
        """See `Gate.ended`."""
        self.books.release(attempt_id, now_ms)

    def book(self, attempt_id: str, used: Demand, now_ms: int) -> None:
        """See `Gate.book`."""
        model = self._models.pop(attempt_id)
        self.books.book(attempt_id, used.work_units(model, self.policy.limits), now_ms)

    def wake_at_ms(self) -> int | None:
        """See `Gate.wake_at_ms`."""
        return self.books.wake_at_ms() if self._waiting else None

    def wake(self, now_ms: int) -> None:
        """See `Gate.wake`."""
        self.books.wake(now_ms)

    def _verdict(
        self, answer: Granted | Denied, planned: Plan, tenant: Tenant, request: Request, now_ms: int
    ) -> Verdict:
        if isinstance(answer, Granted):
            return Admitted(pool=planned.pool.name, replica=answer.replica)
        attempt_id = planned.reservation.lease_id
        model = self._models.pop(attempt_id)
        refusal = denial(answer, plan=planned, tenant=tenant, spread=request.spread)
        return self._elsewhere(refusal, attempt_id, model, tenant, request, now_ms=now_ms)

    def _elsewhere(
        self,
        refusal: Refusal,
        attempt_id: str,
        model: Model,
        tenant: Tenant,
        request: Request,
        *,
        now_ms: int,
    ) -> Verdict:
        """The first of the model's fallbacks that has room; else what was said first."""
        if refusal.reason in FALLBACK_REASONS:
            for fallback in model.fallbacks:
                pool: Pool | None = None
                other = model
                if isinstance(fallback, PoolFallback):
                    pool = self.policy.pools[fallback.pool]
                elif isinstance(fallback, ModelFallback):
                    other = self.policy.models[fallback.model]
                else:
                    continue
                planned = _plan(self.policy, other, tenant, request, attempt_id, pool=pool)
                if isinstance(planned, Screened):
                    continue
                answer = self.books.reserve(replace(planned.reservation, hold_ms=0), now_ms)
                if isinstance(answer, Granted):
                    self._models[attempt_id] = other
                    return Admitted(pool=planned.pool.name, replica=answer.replica, fallback=fallback.label)
        return Refused(refusal=refusal)


class OpenGate:
    """A load balancer by fewest requests; with `request_limit`, no more than that many in flight at once."""

    def __init__(self, policy: Policy, *, request_limit: int | None = None) -> None:
        self._request_limit = request_limit
        self._serving: dict[str, list[tuple[str, str]]] = {
            model.name: [
                (pool, replica.name)
                for pool in sorted(set(model.lanes.values()))
                for replica in policy.pools[pool].replicas
            ]
            for model in policy.models.values()
        }
        self._inflight: Counter[tuple[str, str]] = Counter()
        self._where: dict[str, tuple[str, str]] = {}

    def ask(self, asked: Asked, attempt_id: str, now_ms: int) -> Verdict | None:  # noqa: ARG002 - the port's
        """See `Gate.ask`."""
        limit = self._request_limit
        if limit is not None and len(self._where) >= limit:
            return Refused(
                refusal=Refusal(
                    reason=Reason.NO_CAPACITY,
                    message=f"There are {limit} requests in flight.",
                    retry_after_ms=LIMITER_RETRY_MS,
                )
            )
        key = min(self._serving[asked.model.name], key=lambda one: (self._inflight[one], one))
        self._where[attempt_id] = key
        self._inflight[key] += 1
        return Admitted(pool=key[0], replica=key[1])

    def news(self, now_ms: int) -> list[tuple[str, Verdict]]:  # noqa: ARG002 - the port's
        """Nobody waits."""
        return []

    def withdraw(self, attempt_id: str, now_ms: int) -> None:
        """Nobody waits."""

    def ended(self, attempt_id: str, now_ms: int) -> None:  # noqa: ARG002 - the port's
        """See `Gate.ended`."""
        self._inflight[self._where.pop(attempt_id)] -= 1

    def book(self, attempt_id: str, used: Demand, now_ms: int) -> None:
        """Nothing is charged."""

    def wake_at_ms(self) -> int | None:
        """Nothing changes by itself."""
        return None

    def wake(self, now_ms: int) -> None:
        """Nothing changes by itself."""


def _plan(
    policy: Policy,
    model: Model,
    tenant: Tenant,
    request: Request,
    attempt_id: str,
    *,
    pool: Pool | None = None,
) -> Plan | Screened:
    return plan(
        (request.input_tokens,),
        output_limit_tokens=request.limit_tokens,
        choices=1,
        policy=policy,
        model=model,
        tenant=tenant,
        declared_lane=request.declared_lane,
        declared_deadline_ms=None if request.timeout_us is None else request.timeout_us // 1000,
        elapsed_ms=0,
        lease_id=attempt_id,
        spread=request.spread,
        pool=pool,
    )
