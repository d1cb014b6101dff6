"""A rate kept as debt: exact, bounded, and never refilled twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.domain import budget
from extproc.domain.budget import CLOCK_STEP_MS, LARGEST_AMOUNT, PARTS, Debt

EXACT_IN_LUA = 2**53

rates = st.integers(1, 5_000)
amounts = st.integers(0, 2_000)
times = st.integers(0, 100_000)


def test_a_minute_of_one_bucket() -> None:
    """A bucket refills by its rate, holds its burst, and says to the millisecond when more fits."""
    debt = Debt()
    # rate 60 per minute = 1 per second, burst 10
    story = [
        # now, ask, wait, remaining after
        (0, 10, 0, 0),  # the whole burst at once
        (0, 1, 1_000, 0),
        (999, 1, 1, 0),
        (1_000, 1, 0, 0),  # exactly then
        (5_500, 4, 0, 0),  # four and a half seconds later four fit, and a half stays
        (5_500, 1, 500, 0),
        (60_000, 0, 0, 10),  # never more than the burst
        (60_000, 11, 1_000, 10),  # what can never fit is the caller's to refuse
    ]
    for now_ms, ask, expected_wait_ms, remaining in story:
        debt.decay(60, now_ms)
        wait_ms = budget.wait_ms(debt.parts, ask, rate_per_minute=60, burst=10)
        assert (now_ms, wait_ms) == (now_ms, expected_wait_ms)
        if wait_ms == 0:
            debt.charge(ask, now_ms)
        assert budget.remaining(debt.parts, 10) == remaining


@given(rate=rates, burst=st.integers(1, 2_000), owed=st.integers(0, 200_000_000), data=st.data())
def test_waits_are_exact(rate: int, burst: int, owed: int, data: st.DataObject) -> None:
    """After the wait the amount fits, and one millisecond earlier it does not."""
    amount = data.draw(st.integers(1, burst))
    wait_ms = budget.wait_ms(owed, amount, rate_per_minute=rate, burst=burst)
    debt = Debt(parts=owed, at_ms=1_000)
    later = debt.parts_at(rate, 1_000 + wait_ms)
    assert budget.wait_ms(later, amount, rate_per_minute=rate, burst=burst) == 0
    if wait_ms > 0:
        earlier = debt.parts_at(rate, 1_000 + wait_ms - 1)
        assert budget.wait_ms(earlier, amount, rate_per_minute=rate, burst=burst) == 1


@given(rate=rates, amount=amounts, steps=st.lists(st.integers(0, 9_000), max_size=20))
def test_looking_often_refills_no_more_than_looking_once(rate: int, amount: int, steps: list[int]) -> None:
    """Decay loses and gains nothing by being computed in small steps."""
    often, once = Debt(), Debt()
    often.charge(amount, 0)
    once.charge(amount, 0)
    now_ms = 0
    for step in steps:
        now_ms += step
        often.decay(rate, now_ms)
    once.decay(rate, now_ms)
    assert often.parts == once.parts


@given(rate=rates, amount=amounts, back_ms=st.integers(0, CLOCK_STEP_MS), after_ms=st.integers(0, 60_000))
def test_a_clock_that_goes_back_refills_nothing_twice(
    rate: int, amount: int, back_ms: int, after_ms: int
) -> None:
    """Time that has been refilled once is not refilled again when a failover sets the clock back."""
    debt, steady = Debt(), Debt()
    for one in (debt, steady):
        one.decay(rate, 100_000)
        one.charge(amount, 100_000)
    debt.decay(rate, 100_000 - back_ms)
    debt.decay(rate, 100_000 + after_ms)
    steady.decay(rate, 100_000 + after_ms)
    assert debt.parts == steady.parts


def test_a_clock_that_was_set_back_by_hours_is_believed() -> None:
    """A bucket does not stand still for hours because a server's clock was repaired."""
    debt = Debt()
    debt.decay(60, 10_000_000)
    debt.charge(10, 10_000_000)
    debt.decay(60, 5_000)
    debt.decay(60, 9_000)
    assert debt.parts == 6 * PARTS


def test_a_refund_is_what_time_has_not_given_back() -> None:
    """A charge that time has paid cannot be refunded, so holding and cancelling does not double a burst."""
    debt = Debt()
    debt.decay(60, 0)
    level = debt.charge(100, 0)
    debt.decay(60, 98_000)  # 2 of the 100 are left
    debt.charge(98, 98_000)
    debt.refund(100, charged=100, level_parts=level, charged_at_ms=0)
    assert debt.parts == 98 * PARTS


def test_a_refund_for_a_charge_before_an_idle_moment_is_void() -> None:
    """Once the bucket was full, nothing older than that can be given back."""
    debt = Debt()
    debt.decay(60, 0)
    level = debt.charge(5, 0)
    debt.decay(60, 5_000)
    debt.charge(7, 5_000)
    debt.refund(5, charged=5, level_parts=level, charged_at_ms=0)
    assert debt.parts == 7 * PARTS


def test_a_charge_that_refunds_helped_to_pay_cannot_be_refunded() -> None:
    """A bucket that was full in between owes nothing of what was charged before, whoever paid it."""
    debt = Debt()
    debt.decay(60, 0)
    debt.charge(50, 0)
    level = debt.charge(50, 0)
    debt.refund(50, charged=50, level_parts=50 * PARTS, charged_at_ms=0)
    debt.decay(60, 50_000)
    debt.charge(10, 50_000)
    debt.refund(50, charged=50, level_parts=level, charged_at_ms=0)
    assert debt.parts == 10 * PARTS


@given(
    rate=rates,
    story=st.lists(
        st.tuples(st.integers(0, 5_000), st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=12
    ),
    gap_ms=st.integers(0, 20_000),
)
def test_one_refund_never_gives_more_than_a_smaller_charge_would_have(
    rate: int, story: list[tuple[int, int, int]], gap_ms: int
) -> None:
    """A refunded bucket owes at least what it would owe had the first charge been what was really used."""
    (first_wait, charged, unused), *rest = story
    unused = min(unused, charged)
    real, ideal = Debt(), Debt()
    now_ms = first_wait
    for debt, amount in ((real, charged), (ideal, charged - unused)):
        debt.decay(rate, now_ms)
        debt.charge(amount, now_ms)
    level, at_ms = real.parts, now_ms
    for wait, amount, _ in rest:
        now_ms += wait
        for debt in (real, ideal):
            debt.decay(rate, now_ms)
            debt.charge(amount, now_ms)
    now_ms += gap_ms
    real.decay(rate, now_ms)
    ideal.decay(rate, now_ms)
    before = real.parts
    real.refund(unused, charged=charged, level_parts=level, charged_at_ms=at_ms)
    assert ideal.parts <= real.parts <= before


def test_the_largest_amounts_stay_exact_in_lua() -> None:
    """Twice the largest burst, owed at once, is an integer that a double holds exactly."""
    debt = Debt()
    debt.charge(LARGEST_AMOUNT, 0)
    debt.charge(LARGEST_AMOUNT, 0)
    assert debt.parts + LARGEST_AMOUNT * PARTS < EXACT_IN_LUA
