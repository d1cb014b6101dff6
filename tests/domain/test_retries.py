"""Callers that come back: who is let in, who has to wait longer, and how little is remembered of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.policy import RetryPolicy
from extproc.domain.retries import HASHED_BYTES, Penalty, RetryBook, Wrong, is_marked

RULES = RetryPolicy(window_ms=60_000, early_most=3, penalty_ms=10_000, budget_permille=500, budget_burst=2)
CALLER, OTHER = 1, 2


def a_book(most: int = 100) -> RetryBook:
    """An empty one."""
    return RetryBook(b"secret", most=most)


def arrive(
    book: RetryBook, now_ms: int, *, caller: int = CALLER, named: int | None = None, marked: bool = True
) -> Penalty | None:
    """A request of acme's comes."""
    return book.arrived(tenant="acme", caller=caller, named=named, marked=marked, rules=RULES, now_ms=now_ms)


def refuse(
    book: RetryBook, now_ms: int, wait_ms: int = 1_000, *, named: int | None = None, body: int | None = None
) -> None:
    """A request of the caller's is told to come back later."""
    book.refused(caller=CALLER, named=named, body=body, wait_ms=wait_ms, rules=RULES, now_ms=now_ms)


@pytest.mark.parametrize(
    ("headers", "marked"),
    [
        ({}, False),
        ({"x-stainless-retry-count": "0"}, False),
        ({"x-stainless-retry-count": "1"}, True),
        ({"x-envoy-attempt-count": "1"}, False),
        ({"x-envoy-attempt-count": "2"}, True),
        ({"x-stainless-retry-count": "-1"}, False),
        ({"x-stainless-retry-count": "²"}, False),
        ({"x-stainless-retry-count": "9" * 5_000}, True),
    ],
)
def test_marks_count_attempts_from_their_own_first(headers: dict[str, str], marked: bool) -> None:
    """Official SDKs count retries from 0 and Envoy counts attempts from 1; anything else says nothing."""
    assert is_marked(headers) is marked


def test_who_waits_as_told_is_never_penalized() -> None:
    """However often it is refused and returns in time, it is asked for nothing."""
    book, now_ms = a_book(), 0
    for _ in range(50):
        refuse(book, now_ms)
        now_ms += 1_000
        assert arrive(book, now_ms) is None


def test_who_returns_early_too_often_stays_away_until_it_has_waited_once() -> None:
    """Three times is let through, the fourth is not, and every attempt during the penalty begins it anew."""
    book = a_book()
    refuse(book, 0, 100_000, named=7)
    for now_ms in (100, 200, 300):
        assert arrive(book, now_ms, named=7, marked=False) is None
    late = Penalty(wrong=Wrong.EARLY, wait_ms=10_000)
    assert arrive(book, 400, named=7, marked=False) == late
    assert arrive(book, 10_300, named=7, marked=False) == late
    assert arrive(book, 20_299, named=7, marked=False) == late
    assert arrive(book, 30_299, named=7, marked=False) is None


def test_one_return_in_time_makes_good_for_the_early_ones() -> None:
    """Patience is rewarded at once."""
    book = a_book()
    refuse(book, 0, 1_000, named=7)
    for now_ms in (100, 200, 300, 1_000):
        assert arrive(book, now_ms, named=7, marked=False) is None
    refuse(book, 1_000, 1_000, named=7)
    for now_ms in (1_100, 1_200, 1_300):
        assert arrive(book, now_ms, named=7, marked=False) is None
    assert arrive(book, 1_400, named=7, marked=False) is not None


def test_many_requests_of_one_caller_are_measured_by_the_first_to_return() -> None:
    """Told 1 s and 9 s, a retry after 1 s may be either: it is in time."""
    book = a_book()
    refuse(book, 0, 1_000)
    refuse(book, 10, 9_000)
    for _ in range(10):
        assert arrive(book, 1_000) is None


def test_a_new_request_is_no_retry() -> None:
    """What does not say that it is a retry, and has no name, is new: its caller's other requests do not count."""
    book = a_book()
    refuse(book, 0, 50_000)
    for now_ms in range(1, 50):
        assert arrive(book, now_ms, marked=False) is None


def test_the_same_body_again_is_a_retry_unless_the_first_is_still_there() -> None:
    """One after the other they come back early; side by side they are two callers with the same question."""
    book = a_book()
    results = []
    for now_ms in range(6):
        results.append(book.opened(5, RULES, now_ms))
        refuse(book, now_ms, 50_000, body=5)
        book.closed(5)
    assert [result is not None for result in results] == [False, False, False, False, True, True]
    side_by_side = a_book()
    for now_ms in range(6):
        assert side_by_side.opened(5, RULES, now_ms) is None
        refuse(side_by_side, now_ms, 50_000, body=5)


def test_retries_that_nobody_asked_for_are_paid_from_the_budget() -> None:
    """Two at once, and then one for every two other requests; another tenant has its own budget."""
    book = a_book()
    assert [arrive(book, 0) for _ in range(2)] == [None, None]
    assert arrive(book, 0) == Penalty(wrong=Wrong.BUDGET, wait_ms=10_000)
    arrive(book, 0, marked=False)
    assert arrive(book, 0) is not None
    arrive(book, 0, marked=False)
    assert arrive(book, 0) is None
    assert book.arrived(tenant="zoë", caller=OTHER, named=None, marked=True, rules=RULES, now_ms=0) is None


def test_after_the_window_nothing_is_remembered() -> None:
    """A note is of interest for as long as the window after the moment it names."""
    book = a_book()
    refuse(book, 0, 1_000, named=7)
    for now_ms in (1, 2, 3):
        arrive(book, now_ms, named=7, marked=False)
    assert arrive(book, 61_001, named=7, marked=False) is None
    assert len(book) == 1  # the caller's own, which nobody has asked about since


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5_000), st.booleans()), max_size=200))
def test_the_book_is_bounded(events: list[tuple[int, int, bool]]) -> None:
    """Whatever comes, there are never more notes than fit, nor negative budgets, and bodies are all closed."""
    book = a_book(most=20)
    for now_ms, (key, wait_ms, marked) in enumerate(events):
        arrive(book, now_ms, caller=key, named=key + 1_000, marked=marked)
        book.opened(key + 2_000, RULES, now_ms)
        book.refused(
            caller=key, named=key + 1_000, body=key + 2_000, wait_ms=wait_ms, rules=RULES, now_ms=now_ms
        )
        book.closed(key + 2_000)
        assert len(book) <= 20
        assert all(parts >= 0 for parts in book._budget_parts.values())
    assert not book._open


@pytest.mark.parametrize(("workers", "burst"), [(1, 2), (2, 2), (4, 8), (4, 2)])
def test_a_tenants_budget_is_one_over_all_workers(workers: int, burst: int) -> None:
    """However its requests are spread, a tenant has its burst once, and then the ratio; each worker lets one pass."""
    rules = replace(RULES, budget_burst=burst)
    dice = random.Random(workers)
    books = [RetryBook(b"secret", workers=lambda: workers) for _ in range(workers)]

    def passes(book: RetryBook, *, marked: bool) -> bool:
        answer = book.arrived(tenant="acme", caller=CALLER, named=None, marked=marked, rules=rules, now_ms=0)
        return answer is None

    assert sum(passes(book, marked=True) for _ in range(100) for book in books) == max(burst, workers)
    others = retries = 0
    for _ in range(2_000):
        marked = dice.random() < 0.8
        passed = passes(dice.choice(books), marked=marked)
        retries += marked and passed
        others += not marked
    assert retries <= others * rules.budget_permille / 1000
    assert retries >= 0.9 * others * rules.budget_permille / 1000  # what is paid in beyond the burst is lost


def test_keys_tell_apart_what_differs_and_nothing_else() -> None:
    """Parts cannot run into each other, secrets change everything, and a long body is known by its ends."""
    book = a_book()
    assert book.key("a", "bc") != book.key("ab", "c")
    assert book.key("a") == a_book().key("a") != RetryBook(b"other").key("a")
    body = bytes(3 * HASHED_BYTES)
    assert book.key(body) == book.key(bytes(3 * HASHED_BYTES))
    assert (
        len({book.key(body), book.key(body + b"x"), book.key(b"x" + body[1:]), book.key(body[:-1] + b"x")})
        == 4
    )
    headers = {"authorization": "Bearer s3cret", "idempotency-key": "k"}
    assert book.caller_key("acme", headers) != book.caller_key("zoë", headers)
    assert book.named_key("acme", {}) is None
    assert "s3cret" not in repr(vars(book))
