"""What is known of the engines themselves, and what follows from it for the next request.

Engines tell their load when they are asked (`probed`), and Envoy's records tell how their answers ended (`ended`).
From the two follow each replica's breaker and each pool's suspended lanes. `screen` is the one question that a
request asks: in a pool where all is well it costs one look into an empty mapping.

Nothing here is needed to admit a request: without signals the service decides by its own books. What is known can
only take away, and only for as long as it is known. Each worker knows what it has seen itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from extproc.domain.admission import Plan, Screened
from extproc.domain.breaker import Breaker, BreakerState
from extproc.domain.contract import Refusal, jittered_wait_ms
from extproc.domain.outcome import Reason
from extproc.domain.overload import Overload, suspendable
from extproc.domain.policy import LANES_DOWNWARDS, Lane, Policy, Pool, Replica
from extproc.domain.signals import EngineSignal, ProbeResult, pressure_permille


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What is known of one replica now.

    `signal` is the last reading that is still fresh. `is_stale`: it is probed, and there is none. `age_ms` is the
    age of the last good reading, fresh or not; `None` if there never was one. `probes` counts probes by result.
    """

    pool: str
    replica: str
    is_probed: bool
    signal: EngineSignal | None
    age_ms: int | None
    breaker: BreakerState
    breaker_wait_ms: int
    breaker_opened_total: int
    probes: Mapping[ProbeResult, int]

    @property
    def is_stale(self) -> bool:
        """Whether its load is unknown although somebody asks."""
        return self.is_probed and self.signal is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """What follows for one pool now. `pressure_permille` is `None` where it is unknown, or nobody asks.

    `lanes` are those that can be suspended, and whether they are.
    """

    pool: str
    pressure_permille: int | None
    lanes: Mapping[Lane, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something is not as it was when changes were last asked for. `lane` or `replica` is what it is about."""

    what: str
    pool: str
    replica: str | None = None
    lane: Lane | None = None
    is_trouble: bool = False


@dataclass(slots=True)
class _Replica:
    replica: Replica
    breaker: Breaker
    signal: EngineSignal | None = None
    probes: dict[ProbeResult, int] = field(default_factory=dict)
    told_breaker: BreakerState = BreakerState.CLOSED
    told_stale: bool | None = None  # not before the first probe has ended


@dataclass(slots=True)
class _Pool:
    pool: Pool
    replicas: dict[str, _Replica]
    overload: Overload | None
    pressure_permille: int | None = None
    told_suspended: tuple[Lane, ...] = ()
    # The pool with the replicas that may be used, kept while they are the same: others know it by identity.
    usable: Pool | None = None


class LoadBook:
    """One worker's knowledge of all engines of a policy."""

    def __init__(self, policy: Policy) -> None:
        self._pools: dict[str, _Pool] = {}
        self._troubled: dict[str, _Pool] = {}
        self.policy_changed(policy)

    def policy_changed(self, policy: Policy) -> None:
        """From now on the engines are this policy's. What is known of those that stay is kept, its rules are new."""
        before, self._pools = self._pools, {}
        for pool in policy.pools.values():
            old = before.get(pool.name)
            lanes = suspendable(policy.lanes_reaching(pool.name))
            overload = None if pool.overload is None else Overload(rules=pool.overload, lanes=lanes)
            if old is not None and old.overload is not None and overload is not None:
                overload.level = min(old.overload.level, len(lanes))
            self._pools[pool.name] = _Pool(
                pool=pool,
                replicas={replica.name: _kept(replica, pool, old) for replica in pool.replicas},
                overload=overload,
                told_suspended=() if old is None else old.told_suspended,
            )
        self._troubled = {name: book for name, book in self._pools.items() if name in self._troubled}

    # What happens.

    def probed(
        self, pool: str, replica: str, result: ProbeResult, signal: EngineSignal | None, now_ms: int
    ) -> None:
        """A probe of a replica has ended. A replica or pool that is not in the policy any more is nobody's."""
        found = self._find(pool, replica)
        if found is None:
            return
        book, one = found
        one.probes[result] = one.probes.get(result, 0) + 1
        if signal is not None:
            one.signal = signal
        if one.told_stale is None:
            one.told_stale = False
        one.breaker.probed(reached=result is not ProbeResult.REFUSED, now_ms=now_ms)
        self._mark(book, one, now_ms)

    def ended(self, pool: str, replica: str, *, failed: bool, now_ms: int) -> None:
        """An answer of a replica's has ended well, or failed by the engine's fault."""
        found = self._find(pool, replica)
        if found is not None:
            book, one = found
            one.breaker.ended(failed=failed, now_ms=now_ms)
            self._mark(book, one, now_ms)

    def granted(self, pool: str, replica: str, now_ms: int) -> bool:
        """A request goes to a replica. False if it should not: its breaker has opened since it was asked for."""
        book = self._troubled.get(pool)
        if book is None or replica not in book.replicas:
            return True
        breaker = book.replicas[replica].breaker
        breaker.granted(now_ms)
        return breaker.state(now_ms) is not BreakerState.OPEN

    def tick(self, now_ms: int) -> None:
        """Time has passed: pressure is looked at, readings grow old. To be called about every second."""
        for book in self._pools.values():
            if book.overload is not None:
                fresh = (_fresh(book.pool, one, now_ms) for one in book.replicas.values())
                told = [signal for signal in fresh if signal is not None]
                book.pressure_permille = pressure_permille(told, book.overload.rules)
                book.overload.observe(book.pressure_permille, now_ms)
            is_troubled = (book.overload is not None and book.overload.level > 0) or any(
                one.breaker.state(now_ms) is not BreakerState.CLOSED for one in book.replicas.values()
            )
            if is_troubled:
                self._troubled[book.pool.name] = book
            else:
                self._troubled.pop(book.pool.name, None)

    # What follows.

    def screen(self, planned: Plan, *, spread: int, now_ms: int) -> Plan | Screened:
        """The plan with the replicas that may be used, or why its pool takes nothing of its lane now."""
        book = self._troubled.get(planned.pool.name)
        if book is None:
            return planned
        usable = self._usable(book, planned.pool, now_ms)
        if usable is None:
            wait_ms = min(one.breaker.wait_ms(now_ms) for one in book.replicas.values())
            return _refused(planned, Reason.BREAKER_OPEN, BREAKER_MESSAGE, wait_ms, spread)
        if book.overload is not None and planned.lane in book.overload.suspended:
            wait_ms = book.overload.wait_ms(planned.lane, now_ms)
            return _refused(planned, Reason.LANE_SUSPENDED, SUSPENDED_MESSAGE, wait_ms, spread)
        if usable is planned.pool:
            return planned
        return replace(planned, reservation=replace(planned.reservation, pool=usable))

    def wait_ms(self, pool: str, now_ms: int) -> int:
        """How long until a replica of the pool may get a request; 0 if one may now."""
        book = self._pools.get(pool)
        if book is None:
            return 0
        return min((one.breaker.wait_ms(now_ms) for one in book.replicas.values()), default=0)

    def states(self, now_ms: int) -> Iterator[PoolLoad | ReplicaLoad]:
        """Everything that is known, for those who watch: each pool, and after it its replicas. Made as it is read."""
        for book in self._pools.values():
            yield PoolLoad(
                pool=book.pool.name,
                pressure_permille=book.pressure_permille,
                lanes={} if book.overload is None else book.overload.states(),
            )
            for one in book.replicas.values():
                yield _load_of(book.pool, one, now_ms)

    def changes(self, now_ms: int) -> list[Change]:
        """What is not as it was when this was last asked, for the log."""
        changes: list[Change] = []
        for book in self._pools.values():
            name = book.pool.name
            for one in book.replicas.values():
                state = one.breaker.state(now_ms)
                if state is not one.told_breaker:
                    one.told_breaker = state
                    changes.append(
                        Change(
                            what=f"breaker {state.replace('_', ' ')}",
                            pool=name,
                            replica=one.replica.name,
                            is_trouble=state is BreakerState.OPEN,
                        )
                    )
                stale = one.replica.address is not None and _fresh(book.pool, one, now_ms) is None
                if one.told_stale is not None and stale is not one.told_stale:
                    one.told_stale = stale
                    what = "engine signal stale" if stale else "engine signal back"
                    changes.append(Change(what=what, pool=name, replica=one.replica.name, is_trouble=stale))
            suspended = () if book.overload is None else book.overload.suspended
            for lane in LANES_DOWNWARDS:
                if (lane in suspended) is not (lane in book.told_suspended):
                    what = "lane suspended" if lane in suspended else "lane resumed"
                    changes.append(Change(what=what, pool=name, lane=lane, is_trouble=lane in suspended))
            book.told_suspended = suspended
        return changes

    def _find(self, pool: str, replica: str) -> tuple[_Pool, _Replica] | None:
        book = self._pools.get(pool)
        one = None if book is None else book.replicas.get(replica)
        return None if book is None or one is None else (book, one)

    def _mark(self, book: _Pool, one: _Replica, now_ms: int) -> None:
        """A pool with a replica that is not well is looked at closely, at least until the next tick."""
        if one.breaker.state(now_ms) is not BreakerState.CLOSED:
            self._troubled[book.pool.name] = book

    def _usable(self, book: _Pool, pool: Pool, now_ms: int) -> Pool | None:
        """`pool` without the replicas that get nothing now; `None` if that is all of them."""
        shut = {name for name, one in book.replicas.items() if not one.breaker.admits(now_ms)}
        if not shut:
            return pool
        replicas = tuple(replica for replica in pool.replicas if replica.name not in shut)
        if not replicas:
            return None
        usable = replace(pool, replicas=replicas)
        if usable != book.usable:
            book.usable = usable
        return book.usable


BREAKER_MESSAGE = "The engines of this pool do not answer; they are tried again in a moment."
SUSPENDED_MESSAGE = (
    "The engines have more to do than they can; this lane is suspended until they have caught up."
)


def _refused(planned: Plan, reason: Reason, message: str, wait_ms: int, spread: int) -> Screened:
    refusal = Refusal(
        reason=reason,
        message=message,
        retry_after_ms=jittered_wait_ms(wait_ms, spread=spread),
        input_tokens=planned.demand.input_tokens,
        output_tokens=planned.demand.output_tokens,
    )
    return Screened(refusal=refusal, lane=planned.lane, plan=planned)


def _kept(replica: Replica, pool: Pool, old: _Pool | None) -> _Replica:
    """What is known of a replica under new rules: all of it, if it is the same engine."""
    known = None if old is None else old.replicas.get(replica.name)
    if known is None or known.replica.address != replica.address:
        return _Replica(replica=replica, breaker=Breaker(rules=pool.breaker))
    known.replica = replica
    known.breaker.rules = pool.breaker
    return known


def _fresh(pool: Pool, one: _Replica, now_ms: int) -> EngineSignal | None:
    signal = one.signal
    if signal is None or not signal.is_fresh(stale_ms=pool.probe.stale_ms, now_ms=now_ms):
        return None
    return signal


def _load_of(pool: Pool, one: _Replica, now_ms: int) -> ReplicaLoad:
    return ReplicaLoad(
        pool=pool.name,
        replica=one.replica.name,
        is_probed=one.replica.address is not None,
        signal=_fresh(pool, one, now_ms),
        age_ms=None if one.signal is None else now_ms - one.signal.at_ms,
        breaker=one.breaker.state(now_ms),
        breaker_wait_ms=one.breaker.wait_ms(now_ms),
        breaker_opened_total=one.breaker.opened_total,
        probes=dict(one.probes),
    )
