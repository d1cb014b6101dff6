"""A replica's breaker: what opens it, what a replica gets meanwhile, and that it neither flaps nor stays shut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.breaker import Breaker, BreakerState
from extproc.domain.policy import BreakerPolicy

RULES = BreakerPolicy(
    failures=3, error_permille=500, least_requests=10, window_ms=10_000, open_ms=1_000, trial_requests=2
)


def a_breaker() -> Breaker:
    return Breaker(rules=RULES)


def opened(now_ms: int = 0) -> Breaker:
    """A breaker that three failures have opened."""
    breaker = a_breaker()
    for _ in range(3):
        breaker.ended(failed=True, now_ms=now_ms)
    assert breaker.state(now_ms) is BreakerState.OPEN
    return breaker


def test_failures_in_a_row_open_it() -> None:
    """Three in a row do; with a good answer in between they do not."""
    breaker = a_breaker()
    for failed in (True, True, False, True, True):
        breaker.ended(failed=failed, now_ms=0)
        assert breaker.state(0) is BreakerState.CLOSED
    breaker.ended(failed=True, now_ms=0)
    assert breaker.state(0) is BreakerState.OPEN
    assert (breaker.admits(999), breaker.wait_ms(400), breaker.opened_total) == (False, 600, 1)


def test_probes_that_find_nobody_open_it_and_keep_it_open() -> None:
    """Nobody is sent to a dead engine to find out, as long as somebody asks."""
    breaker = a_breaker()
    for at_ms in (0, 500):
        breaker.probed(reached=False, now_ms=at_ms)
    breaker.probed(reached=True, now_ms=700)
    for at_ms in (1_000, 1_500):
        breaker.probed(reached=False, now_ms=at_ms)
        assert breaker.state(at_ms) is BreakerState.CLOSED
    for at_ms in range(2_000, 60_000, 500):
        breaker.probed(reached=False, now_ms=at_ms)
        assert breaker.state(at_ms + 499) is BreakerState.OPEN
    assert breaker.opened_total == 1
    breaker.probed(reached=True, now_ms=60_000)
    assert breaker.state(60_499) is BreakerState.OPEN
    assert breaker.state(60_500) is BreakerState.HALF_OPEN


def test_a_share_of_failures_opens_it_once_there_are_enough_answers() -> None:
    """Half of ten within the window, never three in a row."""
    breaker = a_breaker()
    outcomes = [True, True, False, True, False, True, False, False, False, True]
    for failed in outcomes:
        assert breaker.state(0) is BreakerState.CLOSED
        breaker.ended(failed=failed, now_ms=0)
    assert breaker.state(0) is BreakerState.OPEN


def test_old_failures_are_forgotten() -> None:
    """What is more than a window ago is no evidence."""
    breaker = a_breaker()
    for failed in (True, True, False, True, False, True, False, False):
        breaker.ended(failed=failed, now_ms=0)
    for failed in (False, True, False, True, False, False):
        breaker.ended(failed=failed, now_ms=15_000)
    assert breaker.state(15_000) is BreakerState.CLOSED


def test_half_open_lets_a_few_through_and_one_good_answer_closes_it() -> None:
    """Two trials, then nothing until one has ended or the time is over."""
    breaker = opened()
    assert breaker.state(1_000) is BreakerState.HALF_OPEN
    for _ in range(2):
        assert breaker.admits(1_100)
        breaker.granted(1_100)
    assert (breaker.admits(1_100), breaker.wait_ms(1_100)) == (False, 900)
    breaker.ended(failed=False, now_ms=1_200)
    assert (breaker.state(1_200), breaker.admits(1_200)) == (BreakerState.CLOSED, True)


def test_half_open_and_one_failure_opens_it_anew() -> None:
    """By an answer, or by a probe that finds nobody."""
    for event in ("failed", "nobody"):
        breaker = opened()
        happen(breaker, event, 1_200)
        assert (breaker.state(2_199), breaker.state(2_200)) == (BreakerState.OPEN, BreakerState.HALF_OPEN)
        assert breaker.opened_total == 2


def test_news_from_before_does_not_prolong_it() -> None:
    """While it is open, answers that end were begun before."""
    breaker = opened()
    for _ in range(4):
        breaker.ended(failed=True, now_ms=900)
    breaker.ended(failed=False, now_ms=950)
    assert (breaker.state(999), breaker.state(1_000)) == (BreakerState.OPEN, BreakerState.HALF_OPEN)


def test_it_closes_by_itself_when_nobody_comes_to_try() -> None:
    """A replica without traffic is not shut for ever."""
    assert opened().state(2_000) is BreakerState.CLOSED


events = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=2_500),
        st.sampled_from(["ended well", "failed", "reached", "nobody", "granted", "asked"]),
    ),
    max_size=80,
)


def happen(breaker: Breaker, event: str, now_ms: int) -> None:
    match event:
        case "ended well" | "failed":
            breaker.ended(failed=event == "failed", now_ms=now_ms)
        case "reached" | "nobody":
            breaker.probed(reached=event == "reached", now_ms=now_ms)
        case "granted" if breaker.admits(now_ms):
            breaker.granted(now_ms)
        case _:
            breaker.state(now_ms)


@given(events)
def test_laws(history: list[tuple[int, str]]) -> None:
    """In any history: it opens on a failure only, for `open_ms` at least; trials are bounded; it always leaves."""
    breaker, now_ms, last_failure_ms = a_breaker(), 0, 0
    opened_at_ms: int | None = None
    trials = 0
    for wait_ms, event in history:
        now_ms += wait_ms
        before, total = breaker.state(now_ms), breaker.opened_total
        admitted = breaker.admits(now_ms)
        assert admitted is (breaker.wait_ms(now_ms) == 0)
        happen(breaker, event, now_ms)
        after = breaker.state(now_ms)
        if event in ("failed", "nobody"):
            last_failure_ms = now_ms
        if breaker.opened_total > total:
            assert event in ("failed", "nobody")
            assert before is not BreakerState.OPEN
            assert opened_at_ms is None or now_ms - opened_at_ms >= RULES.open_ms
            opened_at_ms = now_ms
        elif before is BreakerState.OPEN:
            assert after is BreakerState.OPEN, "only time ends it"
        trials = trials + (event == "granted" and admitted) if after is BreakerState.HALF_OPEN else 0
        assert trials <= RULES.trial_requests
    end_ms = max(now_ms, last_failure_ms + 2 * RULES.open_ms)
    assert breaker.state(end_ms) is BreakerState.CLOSED
    assert breaker.admits(end_ms)


@given(st.lists(st.tuples(st.integers(0, 500), st.sampled_from(["ended well", "reached"])), max_size=60))
def test_a_healthy_replica_never_opens_it(history: list[tuple[int, str]]) -> None:
    """Good answers and probes that are answered, whatever they are told, are no evidence."""
    breaker, now_ms = a_breaker(), 0
    for wait_ms, event in history:
        now_ms += wait_ms
        happen(breaker, event, now_ms)
        assert breaker.admits(now_ms)
