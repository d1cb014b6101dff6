"""Leases that expire: renewed, orphaned, reclaimed, reasserted."""

from __future__ import annotations

import pytest

from extproc.domain.books import Books
from extproc.domain.lease import RECORD_WAIT_MS, Claim, Holder, LeaseState
from extproc.domain.policy import Lane
from extproc.domain.reservation import Denied, Granted
from tests.support.reservations import pool, quota, reservation

TTL_MS = 30_000
GRACE_MS = 60_000
WORKER = Holder(id="w1", lease_ttl_ms=TTL_MS, orphan_grace_ms=GRACE_MS)
OTHER = Holder(id="w2", lease_ttl_ms=TTL_MS, orphan_grace_ms=GRACE_MS)
ONE = pool(100)


def held(books: Books) -> int:
    """Tokens that the only replica holds."""
    return sum(book.held.tokens for book in books.replicas.values())


def claim(lease_id: str, **changes: object) -> Claim:
    """What a holder says of a lease of 100 tokens that it has had for 5 s."""
    fields: dict[str, object] = {
        "lease_id": lease_id,
        "tenant": "acme",
        "lane": Lane.INTERACTIVE,
        "pool": "chat",
        "replica": "a",
        "tokens": 100,
        "charge_units": 0,
        "rate_per_minute": None,
        "residence_ms": 20_000,
        "age_ms": 5_000,
        "policy_version": "v1",
    }
    return Claim(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_live_half_hour_stream_is_never_reclaimed() -> None:
    """While its holder renews it, a lease stays, however far beyond its expected residence."""
    books = Books()
    books.reserve(reservation("r", pool=ONE, residence_ms=20_000), 0, WORKER)
    for now_ms in range(10_000, 30 * 60_000, 10_000):
        assert books.renew(WORKER, ["r"], now_ms) == ()
        books.reclaim(now_ms, most=100)
        assert isinstance(books.reserve(reservation("next", pool=ONE), now_ms, OTHER), Denied)
    assert held(books) == 100


@pytest.mark.parametrize(
    ("residence_ms", "freed_at_ms"),
    [
        (50_000, 50_000),  # what was left of the residence after the TTL
        (10_000, TTL_MS),  # it should have ended before: the TTL alone
        (500_000, TTL_MS + GRACE_MS),  # capped by the grace
    ],
)
def test_a_dead_workers_lease_is_counted_through_its_grace(residence_ms: int, freed_at_ms: int) -> None:
    """An orphan is held until its answer should have ended, at most the grace, and then not a call longer."""
    books = Books()
    books.reserve(reservation("r", pool=ONE, residence_ms=residence_ms), 0, WORKER)
    books.reclaim(freed_at_ms - 1, most=100)
    assert held(books) == 100
    books.reclaim(freed_at_ms, most=100)
    assert held(books) == 0
    assert isinstance(books.reserve(reservation("next", pool=ONE), freed_at_ms, OTHER), Granted)


def test_an_orphans_record_frees_it_on_any_worker() -> None:
    """Envoy's record says that the answer ended; who held it once does not matter."""
    books = Books()
    books.reserve(reservation("r", pool=ONE, residence_ms=500_000), 0, WORKER)
    books.reclaim(TTL_MS, most=100)
    assert books.leases["r"].state is LeaseState.ORPHANED
    assert books.book("r", None, TTL_MS + 1)
    assert held(books) == 0


def test_a_draining_workers_leases_are_orphans_at_once() -> None:
    """The grace of an answer that outlives its worker begins when the worker says that it leaves."""
    books = Books()
    books.reserve(reservation("r", pool=ONE, residence_ms=40_000), 0, WORKER)
    assert books.orphan("r", 5_000)
    assert not books.orphan("r", 6_000)
    books.reclaim(39_999, most=100)
    assert held(books) == 100
    assert books.reclaim(40_000, most=100).freed == 1
    assert held(books) == 0


def test_a_late_record_of_a_reclaimed_lease_still_refunds() -> None:
    """Reclaiming frees tokens and slots; the charge waits for the record like that of any ended stream."""
    books = Books()
    limits = quota(tokens_per_minute=1, burst_tokens=100)
    books.reserve(reservation("r", quota=limits, residence_ms=0), 0, WORKER)
    books.reclaim(TTL_MS, most=100)
    assert held(books) == 0
    assert books.book("r", 0, TTL_MS + RECORD_WAIT_MS - 1)
    after = books.reserve(reservation("next", quota=limits, total_tokens=100), TTL_MS + RECORD_WAIT_MS)
    assert isinstance(after, Granted)


def test_reclaiming_works_in_bounded_steps() -> None:
    """A thousand leases of a dead worker are not reclaimed inside one caller's call."""
    books = Books()
    for position in range(1_000):
        books.reserve(reservation(f"r{position}", residence_ms=0), 0, WORKER)
    steps = 0
    while held(books):
        done = books.reclaim(TTL_MS, most=16)
        assert done.freed <= 16
        steps += 1
    assert steps == -(-1_000 // 16)


def test_unknown_leases_are_named_and_reasserted() -> None:
    """After a wipe the holder learns which leases are gone, and holds them again, beyond any limit."""
    books = Books()
    books.reserve(reservation("known", pool=ONE), 0, WORKER)
    assert books.renew(WORKER, ["known", "lost"], 1_000) == ("lost",)
    assert books.reassert(claim("lost"), 1_000, WORKER)
    assert held(books) == 200
    assert books.renew(WORKER, ["known", "lost"], 2_000) == ()
    assert not books.reassert(claim("lost"), 2_000, WORKER)
    assert held(books) == 200


def test_a_reasserted_lease_keeps_its_age() -> None:
    """What is left of the residence counts from the grant, not from the reassertion."""
    books = Books()
    books.reassert(claim("r", residence_ms=40_000, age_ms=15_000), 1_000, WORKER)
    books.orphan("r", 2_000)
    assert books.reclaim(25_999, most=9).freed == 0
    assert books.reclaim(26_000, most=9).freed == 1


def test_a_reasserted_lease_is_charged_only_if_it_never_was() -> None:
    """A grant that was made while the store was away is charged now; one that the store lost is not again."""
    limits = quota(tokens_per_minute=60, burst_tokens=100)
    books = Books()
    books.reassert(claim("lost"), 0, WORKER)
    books.reassert(claim("local", charge_units=70, rate_per_minute=60), 0, WORKER)
    answer = books.reserve(reservation("r", total_tokens=10, quota=limits), 0)
    assert isinstance(answer, Granted)
    assert answer.balance.tokens_remaining == 20
    books.book("local", 50, 0)
    books.book("lost", 50, 0)
    answer = books.reserve(reservation("r2", total_tokens=10, quota=limits), 0)
    assert isinstance(answer, Granted)
    assert answer.balance.tokens_remaining == 30


def test_a_holder_that_comes_back_holds_its_reclaimed_lease_again() -> None:
    """A worker that was frozen longer than TTL and grace still has open streams: they count again."""
    books = Books()
    books.reserve(reservation("r", pool=ONE, residence_ms=0), 0, WORKER)
    books.reclaim(TTL_MS, most=9)
    assert held(books) == 0
    assert books.renew(WORKER, ["r"], TTL_MS + 5) == ()
    assert held(books) == 100
    assert books.release("r", TTL_MS + 6)
    assert held(books) == 0


def test_what_is_idle_is_forgotten_and_what_is_not_is_not() -> None:
    """The books do not grow with every tenant and replica that was ever named."""
    books = Books()
    limits = quota(tokens_per_minute=60, burst_tokens=100)
    for position in range(50):
        name = f"t{position}"
        replica_pool = pool(1_000, name=name)
        books.reserve(reservation(name, tenant=name, quota=limits, pool=replica_pool), 0)
        books.release(name, 0)
        books.book(name, None, 0)
    books.reserve(reservation("live", tenant="live"), 0)
    assert len(books.tenants) == 51
    for _ in range(10):
        books.sweep(50_000, most=10)
    assert len(books.tenants) == 51  # half of what was charged is still owed
    for _ in range(11):
        books.sweep(100_000, most=10)
    assert set(books.tenants) == {"live"}
    assert set(books.replicas) == {("chat", "a")}
    assert not books.lanes.keys() - {("chat", Lane.INTERACTIVE)}
