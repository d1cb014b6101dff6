"""What the engines tell, and what follows for a request: nothing more than without it, and nothing for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.admission import Plan, Screened, plan
from extproc.domain.breaker import BreakerState
from extproc.domain.load import LoadBook, PoolLoad, ReplicaLoad
from extproc.domain.outcome import Reason
from extproc.domain.policy import (
    BreakerPolicy,
    Lane,
    OverloadPolicy,
    Policy,
    PoolFallback,
    ProbePolicy,
    Replica,
)
from extproc.domain.signals import EngineSignal, ProbeResult
from tests.builders import a_model, a_policy, a_pool, a_tenant

REPLICAS = tuple(
    Replica(name=name, ceiling_tokens=96_000, address=f"{name}.example:8000") for name in ("a", "b", "c")
)
POOL = a_pool(
    replicas=REPLICAS,
    probe=ProbePolicy(interval_ms=1_000, stale_ms=5_000),
    overload=OverloadPolicy(waiting_requests=10, enter_ms=3_000, leave_ms=5_000),
    breaker=BreakerPolicy(failures=2, open_ms=4_000, trial_requests=1),
)
POLICY = a_policy(pools=(POOL,))


def a_plan(lane: Lane = Lane.INTERACTIVE, policy: Policy = POLICY) -> Plan:
    planned = plan(
        (10,),
        output_limit_tokens=10,
        choices=1,
        policy=policy,
        model=policy.models["tiny"],
        tenant=a_tenant(),
        declared_lane=lane,
        declared_deadline_ms=None,
        elapsed_ms=0,
        lease_id="lease-1",
        spread=0,
    )
    assert isinstance(planned, Plan)
    return planned


def names(book: LoadBook, now_ms: int, lane: Lane = Lane.INTERACTIVE) -> str:
    """The replicas that a request may go to; empty if it is refused."""
    found = book.screen(a_plan(lane), spread=0, now_ms=now_ms)
    return "" if isinstance(found, Screened) else "".join(one.name for one in found.reservation.pool.replicas)


def tell(book: LoadBook, replica: str, now_ms: int, waiting: int | None = None) -> None:
    """A good reading of an engine in which so many wait."""
    signal = EngineSignal(waiting_requests=waiting, running_requests=4, kv_used_permille=None, at_ms=now_ms)
    book.probed("chat", replica, ProbeResult.OK, signal, now_ms)


def overload(book: LoadBook, *, until_ms: int) -> None:
    """All engines tell that twenty wait, every second."""
    for now_ms in range(0, until_ms + 1, 1_000):
        for replica in "abc":
            tell(book, replica, now_ms, waiting=20)
        book.tick(now_ms)


def fail(book: LoadBook, replica: str, now_ms: int) -> None:
    """The two failures in a row that open a breaker."""
    for _ in range(2):
        book.ended("chat", replica, failed=True, now_ms=now_ms)


def pools_of(book: LoadBook, now_ms: int) -> list[PoolLoad]:
    return [one for one in book.states(now_ms) if isinstance(one, PoolLoad)]


def engines_of(book: LoadBook, now_ms: int) -> list[ReplicaLoad]:
    return [one for one in book.states(now_ms) if isinstance(one, ReplicaLoad)]


def refusal_of(book: LoadBook, now_ms: int, lane: Lane = Lane.INTERACTIVE) -> Screened:
    found = book.screen(a_plan(lane), spread=0, now_ms=now_ms)
    assert isinstance(found, Screened)
    return found


def test_where_all_is_well_the_plan_is_the_plan() -> None:
    """Not a copy: others know a pool by its identity."""
    book, planned = LoadBook(POLICY), a_plan()
    assert book.screen(planned, spread=0, now_ms=0) is planned
    tell(book, "a", 0, waiting=9)
    assert book.screen(planned, spread=0, now_ms=0) is planned


def test_a_broken_replica_is_left_out_and_the_others_go_on() -> None:
    """The same pool value for the same replicas; when it is back, the policy's own."""
    book = LoadBook(POLICY)
    fail(book, "b", 0)
    assert names(book, 0) == "ac"
    first, second = (book.screen(a_plan(), spread=0, now_ms=0) for _ in range(2))
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.reservation.pool is second.reservation.pool
    assert first.pool is POOL
    assert names(book, 4_000) == "abc"
    assert book.granted("chat", "b", 4_000)
    assert names(book, 4_001) == "ac", "one trial"
    book.ended("chat", "b", failed=False, now_ms=4_500)
    assert names(book, 4_501) == "abc"


def test_a_pool_without_replicas_is_refused_with_the_time_to_the_first_trial() -> None:
    """503, and honest about when."""
    book = LoadBook(POLICY)
    for at_ms, replica in enumerate("abc"):
        fail(book, replica, at_ms * 1_000)
    screened = refusal_of(book, 3_000)
    assert screened.refusal.reason is Reason.BREAKER_OPEN
    assert screened.refusal.retry_after_ms == 1_000
    assert screened.plan is not None
    assert screened.plan.pool is POOL
    assert names(book, 4_000) == "a"


def test_a_suspended_lane_is_refused_and_interactive_goes_on() -> None:
    """429, and honest about when."""
    book = LoadBook(POLICY)
    overload(book, until_ms=3_000)
    screened = refusal_of(book, 3_000, Lane.BULK)
    assert screened.refusal.reason is Reason.LANE_SUSPENDED
    assert screened.refusal.retry_after_ms == 5_000
    assert (screened.lane, names(book, 3_000)) == (Lane.BULK, "abc")
    for now_ms in range(4_000, 10_000, 1_000):
        for replica in "abc":
            tell(book, replica, now_ms, waiting=0)
        book.tick(now_ms)
    assert names(book, 10_000, Lane.BULK) == "abc"


def test_one_busy_replica_is_no_busy_pool_and_silence_is_not_idleness() -> None:
    """The mean of those that tell; one that tells nothing changes nothing."""
    book = LoadBook(POLICY)
    for now_ms in range(0, 10_000, 1_000):
        tell(book, "a", now_ms, waiting=18)
        tell(book, "b", now_ms, waiting=0)
        tell(book, "c", now_ms)
        book.tick(now_ms)
    assert names(book, 10_000, Lane.BULK) == "abc"
    for now_ms in range(10_000, 20_000, 1_000):
        tell(book, "a", now_ms, waiting=18)
        tell(book, "b", now_ms)
        book.tick(now_ms)
    assert refusal_of(book, 20_000, Lane.BULK).refusal.reason is Reason.LANE_SUSPENDED


@pytest.mark.parametrize("result", [ProbeResult.TIMEOUT, ProbeResult.ERROR, ProbeResult.MISS])
@pytest.mark.parametrize("replicas", [REPLICAS[:1], REPLICAS])
def test_an_engine_that_tells_nothing_serves_on(result: ProbeResult, replicas: tuple[Replica, ...]) -> None:
    """Hanging, failing or unknown metrics make a signal stale and nothing else, in a pool of one and of three."""
    pool = replace(POOL, replicas=replicas)
    book = LoadBook(a_policy(pools=(pool,)))
    for now_ms in range(0, 60_000, 1_000):
        for replica in replicas:
            book.probed("chat", replica.name, result, None, now_ms)
        book.tick(now_ms)
    engines = engines_of(book, 60_000)
    assert all(one.is_stale and one.age_ms is None for one in engines)
    assert {one.breaker for one in engines} == {BreakerState.CLOSED}
    planned = a_plan(Lane.BULK, a_policy(pools=(pool,)))
    assert book.screen(planned, spread=0, now_ms=60_000) is planned


def test_signals_that_grow_old_end_a_suspension() -> None:
    """Stale after five seconds, calm for five more."""
    book = LoadBook(POLICY)
    overload(book, until_ms=3_000)
    for now_ms in range(4_000, 14_000, 1_000):
        assert names(book, now_ms, Lane.BULK) == ""
        book.tick(now_ms)
    book.tick(14_000)
    assert names(book, 14_000, Lane.BULK) == "abc"
    (state,) = pools_of(book, 14_000)
    assert (state.pressure_permille, state.lanes) == (None, {Lane.BULK: False})
    assert [(one.signal, one.is_stale, one.age_ms) for one in engines_of(book, 14_000)] == [
        (None, True, 11_000)
    ] * 3


def test_a_replica_that_nobody_asks_is_not_stale() -> None:
    """Without an address there is nothing to be missed."""
    book = LoadBook(a_policy())
    assert [(one.is_probed, one.is_stale) for one in engines_of(book, 0)] == [(False, False)]


def test_a_grant_of_a_replica_that_has_gone_meanwhile_is_told_so() -> None:
    """Who waited for it must not be sent there."""
    book = LoadBook(POLICY)
    assert book.granted("chat", "a", 0)
    fail(book, "a", 1_000)
    assert not book.granted("chat", "a", 1_500)
    assert book.granted("chat", "b", 1_500)
    assert book.wait_ms("chat", 1_500) == 0
    for replica in "bc":
        fail(book, replica, 1_500)
    assert book.wait_ms("chat", 2_000) == 3_000


def test_changes_are_told_once() -> None:
    """For the log: breakers, lanes and signals, each when it turns."""
    book = LoadBook(POLICY)
    assert book.changes(0) == []
    overload(book, until_ms=3_000)
    fail(book, "c", 3_000)
    told = [(one.what, one.replica, one.lane, one.is_trouble) for one in book.changes(3_000)]
    assert told == [
        ("breaker open", "c", None, True),
        ("lane suspended", None, Lane.BULK, True),
    ]
    assert book.changes(3_001) == []
    for now_ms in range(4_000, 20_000, 1_000):
        book.tick(now_ms)
    told = [(one.what, one.replica, one.lane, one.is_trouble) for one in book.changes(20_000)]
    assert told == [
        *((("engine signal stale", name, None, True)) for name in "ab"),
        ("breaker closed", "c", None, False),
        ("engine signal stale", "c", None, True),
        ("lane resumed", None, Lane.BULK, False),
    ]
    tell(book, "a", 21_000)
    assert [(one.what, one.replica) for one in book.changes(21_000)] == [("engine signal back", "a")]


def test_a_new_policy_keeps_what_is_known_of_engines_that_stay() -> None:
    """The same address is the same engine; its rules are the new ones. What is gone is nobody's."""
    book = LoadBook(POLICY)
    overload(book, until_ms=3_000)
    fail(book, "a", 3_000)
    fail(book, "b", 3_000)
    moved = replace(REPLICAS[1], address="elsewhere.example:8000")
    pool = replace(POOL, replicas=(REPLICAS[0], moved), breaker=replace(POOL.breaker, open_ms=60_000))
    book.policy_changed(a_policy(pools=(pool,)))
    (state,) = pools_of(book, 3_000)
    engines = engines_of(book, 3_000)
    assert [one.breaker for one in engines] == [BreakerState.OPEN, BreakerState.CLOSED]
    assert [one.signal is None for one in engines] == [False, True]
    assert state.lanes == {Lane.BULK: True}
    book.probed("chat", "c", ProbeResult.OK, None, 3_000)
    book.ended("gone", "a", failed=True, now_ms=3_000)
    # An exchange that began under the old policy: its own pool, less what is shut.
    assert names(book, 3_000) == "bc"


def test_lanes_that_come_by_a_fallback_can_be_suspended_too() -> None:
    """Who comes because there is no room elsewhere is the first to be sent away."""
    spare = replace(POOL, name="spare", cluster="spare")
    model = a_model(fallbacks=(PoolFallback(pool="spare"),))
    book = LoadBook(a_policy(models=(model,), pools=(a_pool(), spare)))
    signal = EngineSignal(waiting_requests=20, running_requests=1, kv_used_permille=None, at_ms=0)
    for now_ms in range(0, 4_000, 1_000):
        book.probed("spare", "a", ProbeResult.OK, replace(signal, at_ms=now_ms), now_ms)
        book.tick(now_ms)
    assert {state.pool: state.lanes for state in pools_of(book, 4_000)} == {
        "chat": {},
        "spare": {Lane.BULK: True},
    }


happenings = st.lists(
    st.tuples(
        st.integers(0, 3_000),
        st.sampled_from("abc"),
        st.sampled_from(["well", "failed", "granted", "tick", *ProbeResult]),
        st.one_of(st.none(), st.integers(0, 60)),
    ),
    max_size=80,
)


@given(happenings)
def test_signals_only_take_away_and_give_back(history: list[tuple[int, str, str, int | None]]) -> None:
    """In any history a plan is refused for one of two reasons or is the plan with some of its replicas; later,
    when nothing more is heard, everything is as if nothing had ever been known.
    """
    book, now_ms = LoadBook(POLICY), 0
    for wait_ms, replica, what, waiting in history:
        now_ms += wait_ms
        if what == "granted":
            book.granted("chat", replica, now_ms)
        elif what in ("well", "failed"):
            book.ended("chat", replica, failed=what == "failed", now_ms=now_ms)
        elif what == "tick":
            book.tick(now_ms)
        elif what == ProbeResult.OK:
            tell(book, replica, now_ms, waiting)
        else:
            book.probed("chat", replica, ProbeResult(what), None, now_ms)
        for lane in (Lane.INTERACTIVE, Lane.BULK):
            planned = a_plan(lane)
            found = book.screen(planned, spread=0, now_ms=now_ms)
            if isinstance(found, Screened):
                assert found.refusal.reason in (Reason.BREAKER_OPEN, Reason.LANE_SUSPENDED)
                assert found.refusal.reason is Reason.BREAKER_OPEN or lane is Lane.BULK
                assert found.refusal.retry_after_ms is not None
                assert found.refusal.retry_after_ms <= 2 * 4_000 + 5_000
            else:
                assert set(found.reservation.pool.replicas) <= set(REPLICAS)
                pool = found.reservation.pool
                assert replace(found.reservation, pool=planned.reservation.pool) == planned.reservation
                assert replace(pool, replicas=REPLICAS) == POOL
    for later_ms in range(now_ms, now_ms + 16_000, 1_000):
        book.tick(later_ms)
    for lane in (Lane.INTERACTIVE, Lane.BULK):
        planned = a_plan(lane)
        assert book.screen(planned, spread=0, now_ms=now_ms + 15_000) is planned
