"""What was really used is booked once, in the window in which it was charged."""

from __future__ import annotations

import pytest

from extproc.domain.books import Books
from extproc.domain.lease import RECORD_WAIT_MS
from extproc.domain.reservation import Granted
from tests.support.reservations import quota, reservation

LIMITS = quota(tokens_per_minute=60, burst_tokens=100)


def remaining(books: Books, now_ms: int) -> int:
    """What the tenant could take now: looked at by a reservation of nothing."""
    answer = books.reserve(reservation("look", total_tokens=0, input_tokens=0, quota=LIMITS), now_ms)
    assert isinstance(answer, Granted)
    books.release("look", now_ms)
    books.book("look", None, now_ms)
    assert answer.balance.tokens_remaining is not None
    return answer.balance.tokens_remaining


@pytest.mark.parametrize("record_first", [True, False], ids=["record first", "stream's end first"])
@pytest.mark.parametrize(
    ("used", "left"),
    [(30, 70), (80, 20), (95, 5), (None, 20)],
    ids=["less", "as reserved", "more", "unknown"],
)
def test_the_unused_part_is_refunded(*, record_first: bool, used: int | None, left: int) -> None:
    """80 were charged: what was not used comes back, what was used beyond it is charged, in either order."""
    books = Books()
    books.reserve(reservation("r", total_tokens=80, quota=LIMITS), 0)
    if record_first:
        assert books.book("r", used, 0)
        assert not books.release("r", 0)
    else:
        assert books.release("r", 0)
        assert books.book("r", used, 0)
    assert not books.book("r", 0, 0)
    assert remaining(books, 0) == left
    assert not books.leases


def test_a_record_after_the_window_refunds_nothing() -> None:
    """When time has refilled the bucket since, the refund would be a second gift."""
    books = Books()
    books.reserve(reservation("r", total_tokens=80, quota=LIMITS), 0)
    books.release("r", 1_000)
    books.reserve(reservation("later", total_tokens=50, quota=LIMITS), 100_000)
    assert books.book("r", 0, 100_000)
    assert remaining(books, 100_000) == 50


def test_a_record_in_the_window_refunds_what_time_has_not() -> None:
    """60 of 80 have been refilled after a minute: only the other 20 can come back."""
    books = Books()
    books.reserve(reservation("r", total_tokens=80, quota=LIMITS), 0)
    books.reserve(reservation("later", total_tokens=50, quota=LIMITS), 60_000)
    assert books.book("r", 0, 60_000)
    assert remaining(books, 60_000) == 50


def test_holding_and_cancelling_does_not_double_the_burst() -> None:
    """Large reservations that are cancelled just before they are paid leave no second burst behind."""
    books = Books()
    books.reserve(reservation("unused", total_tokens=100, quota=LIMITS), 0)
    books.reserve(reservation("used", total_tokens=98, quota=LIMITS), 98_000)
    books.book("unused", 0, 98_001)
    books.book("used", 98, 98_001)
    assert remaining(books, 98_001) == 2


def test_a_record_that_never_comes_is_given_up() -> None:
    """The lease is forgotten after a minute, its charge stands, and it is counted."""
    books = Books()
    books.reserve(reservation("r", total_tokens=80, quota=LIMITS), 0)
    books.release("r", 0)
    assert books.reclaim(RECORD_WAIT_MS - 1, most=9).forgotten == 0
    assert books.reclaim(RECORD_WAIT_MS, most=9).forgotten == 1
    assert not books.book("r", 0, RECORD_WAIT_MS)
    assert not books.leases


def test_unknown_records_and_releases_do_nothing() -> None:
    """Records and ends of leases that the books never had are harmless."""
    books = Books()
    assert not books.book("nobody", 100, 0)
    assert not books.release("nobody", 0)
    assert not books.tenants
    assert not books.leases
