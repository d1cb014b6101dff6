"""Overload control: which lanes are suspended under which pressure, and that they come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.overload import Overload, suspendable
from extproc.domain.policy import Lane, OverloadPolicy
from extproc.domain.signals import EngineSignal, pressure_permille

RULES = OverloadPolicy(waiting_requests=10, leave_permille=700, enter_ms=3_000, leave_ms=5_000)
LANES = (Lane.OVERFLOW, Lane.BULK)


def a_signal(
    waiting: int | None = None, kv: int | None = None, *, running: int | None = None, at_ms: int = 0
) -> EngineSignal:
    return EngineSignal(waiting_requests=waiting, running_requests=running, kv_used_permille=kv, at_ms=at_ms)


def play(overload: Overload, pressure: int | None, *, since_ms: int, until_ms: int) -> None:
    """The same pressure, seen once a second."""
    for now_ms in range(since_ms, until_ms + 1, 1_000):
        overload.observe(pressure, now_ms)


def test_lanes_are_suspended_from_the_lowest_up_and_come_back_from_the_highest_down() -> None:
    """Three seconds of pressure for each lane; five seconds of calm for each to come back."""
    overload = Overload(rules=RULES, lanes=LANES)
    play(overload, 1_000, since_ms=0, until_ms=2_000)
    assert list(overload.suspended) == []
    play(overload, 1_500, since_ms=3_000, until_ms=5_000)
    assert list(overload.suspended) == [Lane.OVERFLOW]
    play(overload, 1_500, since_ms=6_000, until_ms=60_000)
    assert list(overload.suspended) == [Lane.OVERFLOW, Lane.BULK]
    assert overload.wait_ms(Lane.BULK, 60_000) == 5_000
    assert overload.wait_ms(Lane.OVERFLOW, 60_000) == 10_000
    play(overload, 699, since_ms=61_000, until_ms=65_000)
    assert list(overload.suspended) == [Lane.OVERFLOW, Lane.BULK]
    assert overload.wait_ms(Lane.BULK, 65_000) == 1_000
    overload.observe(0, 66_000)
    assert list(overload.suspended) == [Lane.OVERFLOW]
    assert (overload.wait_ms(Lane.BULK, 66_000), overload.wait_ms(Lane.OVERFLOW, 66_000)) == (0, 5_000)
    play(overload, 0, since_ms=67_000, until_ms=71_000)
    assert list(overload.suspended) == []


def test_in_between_everything_stays_as_it_is() -> None:
    """Not hot enough to suspend, not calm enough to go on, for as long as it lasts."""
    overload = Overload(rules=RULES, lanes=LANES)
    play(overload, 900, since_ms=0, until_ms=100_000)
    assert list(overload.suspended) == []
    play(overload, 1_000, since_ms=100_000, until_ms=103_000)
    play(overload, 900, since_ms=104_000, until_ms=200_000)
    assert list(overload.suspended) == [Lane.OVERFLOW]


def test_a_wait_begins_anew_when_it_is_interrupted() -> None:
    """Pressure must last."""
    overload = Overload(rules=RULES, lanes=LANES)
    for start_ms in range(0, 40_000, 4_000):
        play(overload, 1_000, since_ms=start_ms, until_ms=start_ms + 2_000)
        overload.observe(800, start_ms + 3_000)
    assert list(overload.suspended) == []


def test_unknown_suspends_nobody_and_ends_a_suspension() -> None:
    """A signal that is gone is neither full nor idle, but what it took it gives back."""
    overload = Overload(rules=RULES, lanes=LANES)
    play(overload, None, since_ms=0, until_ms=60_000)
    assert list(overload.suspended) == []
    play(overload, 2_000, since_ms=61_000, until_ms=70_000)
    assert list(overload.suspended) == list(LANES)
    play(overload, None, since_ms=71_000, until_ms=81_000)
    assert list(overload.suspended) == []


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        (frozenset(Lane), (Lane.OVERFLOW, Lane.BULK)),
        (frozenset({Lane.INTERACTIVE}), ()),
        (frozenset({Lane.BULK}), (Lane.BULK,)),
    ],
)
def test_interactive_is_never_suspended(lanes: frozenset[Lane], expected: tuple[Lane, ...]) -> None:
    assert suspendable(lanes) == expected


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ([], None),
        ([a_signal()], None),
        ([a_signal(running=9)], None),
        ([a_signal(10)], 1_000),
        ([a_signal(0, 950)], 1_000),
        ([a_signal(20, 475)], 2_000),
        ([a_signal(0), a_signal(30), a_signal()], 1_500),
        ([a_signal(0)], 0),
    ],
)
def test_pressure_is_the_nearest_threshold_by_the_mean_of_those_that_tell(
    signals: list[EngineSignal], expected: int | None
) -> None:
    """Who tells nothing does not count as idle."""
    rules = OverloadPolicy(waiting_requests=10, kv_used_permille=950)
    assert pressure_permille(signals, rules) == expected


@pytest.mark.parametrize(("age_ms", "fresh"), [(0, True), (5_000, True), (5_001, False)])
def test_a_reading_is_believed_for_a_while(age_ms: int, fresh: bool) -> None:
    assert a_signal(1, at_ms=1_000).is_fresh(stale_ms=5_000, now_ms=1_000 + age_ms) is fresh


pressures = st.one_of(st.none(), st.integers(0, 3_000))


@given(st.lists(st.tuples(st.integers(0, 4_000), pressures), max_size=120))
def test_laws(history: list[tuple[int, int | None]]) -> None:
    """In any history: one step at a time, never sooner than the wait; up only under pressure; it always leaves."""
    overload, now_ms = Overload(rules=RULES, lanes=LANES), 0
    changed_at_ms: int | None = None
    for wait_ms, pressure in history:
        now_ms += wait_ms
        before = overload.level
        overload.observe(pressure, now_ms)
        assert abs(overload.level - before) <= 1
        if overload.level > before:
            assert pressure is not None
            assert pressure >= 1_000
        if overload.level < before:
            assert pressure is None or pressure < RULES.leave_permille
        if overload.level != before:
            if changed_at_ms is not None:
                assert now_ms - changed_at_ms >= min(RULES.enter_ms, RULES.leave_ms)
            changed_at_ms = now_ms
        for lane in Lane:
            assert (overload.wait_ms(lane, now_ms) > 0) is (lane in overload.suspended)
    play(overload, 0, since_ms=now_ms, until_ms=now_ms + len(LANES) * RULES.leave_ms)
    assert overload.level == 0


@given(st.lists(st.tuples(st.integers(0, 4_000), st.one_of(st.none(), st.integers(0, 999))), max_size=60))
def test_without_pressure_nothing_is_ever_suspended(history: list[tuple[int, int | None]]) -> None:
    overload, now_ms = Overload(rules=RULES, lanes=LANES), 0
    for wait_ms, pressure in history:
        now_ms += wait_ms
        overload.observe(pressure, now_ms)
        assert overload.level == 0
