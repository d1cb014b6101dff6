"""What holds for the books after any history."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace

from hypothesis import assume, given
from hypothesis import strategies as st

from extproc.domain.books import Books
from extproc.domain.holdings import Held
from extproc.domain.lease import RECORD_WAIT_MS, LeaseState
from extproc.domain.policy import Pool, Quota
from extproc.domain.reservation import Denied, Granted, Queued, Reservation
from tests.support.ledger_histories import (
    Book,
    Move,
    Orphan,
    Pass,
    Reassert,
    Reclaim,
    Release,
    Renew,
    Reserve,
    histories,
    pools,
    quotas,
    reservations,
)
from tests.support.reservations import pool, quota, reservation

START_MS = 1_000_000


@dataclass(slots=True)
class Run:
    """A history played on books of its own."""

    books: Books = field(default_factory=Books)
    now_ms: int = START_MS

    def play(self, move: Move) -> Granted | Denied | Queued | None:
        """Make one move; the answer, if it was a question."""
        books, now_ms = self.books, self.now_ms
        match move:
            case Reserve():
                return books.reserve(move.reservation, now_ms, move.holder)
            case Release(lease_id=lease_id):
                books.release(lease_id, now_ms)
            case Book(lease_id=lease_id, work_units=work_units):
                books.book(lease_id, work_units, now_ms)
            case Renew():
                books.renew(move.holder, move.lease_ids, now_ms)
            case Reassert():
                books.reassert(move.claim, now_ms, move.holder)
            case Orphan(lease_id=lease_id):
                books.orphan(lease_id, now_ms)
            case Reclaim(most=most):
                books.reclaim(now_ms, most=most)
                books.sweep(now_ms, most=most)
            case Pass(ms=ms):
                self.now_ms = max(0, now_ms + ms)
        return None


def balances(books: Books) -> dict[object, Held]:
    """What every scope holds; a scope that holds nothing is as good as absent."""
    every: dict[object, Held] = {
        **{("tenant", key): book.held for key, book in books.tenants.items()},
        **{("replica", *key): book.held for key, book in books.replicas.items()},
        **{("lane", *key): held for key, held in books.lanes.items()},
    }
    return {key: held for key, held in every.items() if held != Held()}


def recounted(books: Books) -> dict[object, Held]:
    """The same balances, counted from the leases."""
    every: dict[object, Held] = {}
    for lease in books.live_leases():
        for key in (
            ("tenant", lease.tenant),
            ("replica", lease.pool, lease.replica),
            ("lane", lease.pool, lease.lane),
        ):
            every.setdefault(key, Held()).add(lease.tokens, lease.residence_ms)
    return {key: held for key, held in every.items() if held != Held()}


def owed(books: Books, now_ms: int) -> dict[str, tuple[int, int]]:
    """What every tenant owes; who owes nothing is as good as unknown."""
    debts = {
        tenant: tuple(
            debt.parts_at(debt.rate_per_minute, now_ms) for debt in (book.token_debt, book.request_debt)
        )
        for tenant, book in books.tenants.items()
    }
    return {tenant: (parts[0], parts[1]) for tenant, parts in debts.items() if any(parts)}


@given(history=histories)
def test_balances_are_the_sum_of_the_leases(history: list[Move]) -> None:
    """After every move every counter is exactly what its leases say, and none is negative."""
    run = Run()
    for move in history:
        run.play(move)
        assert balances(run.books) == recounted(run.books)
        for held in balances(run.books).values():
            assert min(held.tokens, held.requests, held.request_ms, held.token_ms) >= 0
        for parts in owed(run.books, run.now_ms).values():
            assert min(parts) >= 0


@given(history=histories, asked=reservations())
def test_a_grant_was_within_every_limit(history: list[Move], asked: Reservation) -> None:
    """Whatever came before, what is held after a grant is within every limit that the grant was asked for."""
    run = Run()
    for drawn in history:
        if not isinstance(drawn, Reserve):
            run.play(drawn)
            continue
        request, limits = replace(drawn.reservation, pool=asked.pool, quota=asked.quota), asked.quota
        existing = run.books.leases.get(request.lease_id)
        held_before = existing is not None and existing.state is not LeaseState.RELEASED
        answer = run.play(replace(drawn, reservation=request))
        if held_before or not isinstance(answer, Granted):
            continue
        tenant = run.books.tenants[request.tenant]
        assert limits.inflight_tokens is None or tenant.held.tokens <= limits.inflight_tokens
        assert limits.inflight_requests is None or tenant.held.requests <= limits.inflight_requests
        if limits.burst_tokens is not None:
            assert tenant.token_debt.parts <= limits.burst_tokens * 60_000
        if limits.requests_per_minute is not None:
            assert tenant.request_debt.parts <= limits.requests_per_minute * 60_000
        lane_held = run.books.lanes[request.pool.name, request.lane]
        assert lane_held.tokens <= request.lane_limit_tokens
        replica = next(one for one in request.pool.replicas if one.name == answer.replica)
        book = run.books.replicas[request.pool.name, replica.name]
        assert book.held.tokens <= request.pool.usable_tokens(replica)
        assert book.held.requests <= request.pool.request_cap
        assert answer.ttft_ms <= request.deadline_in_ms


@given(history=histories, asked=reservations())
def test_a_refusal_changes_nothing(history: list[Move], asked: Reservation) -> None:
    """No scope keeps anything of a request that was refused: the books are equal before and after."""
    run = Run()
    for move in history:
        run.play(move)
    before = copy.deepcopy(run.books)
    if isinstance(run.books.reserve(asked, run.now_ms), Denied):
        assert run.books == before


@given(history=histories)
def test_looking_changes_nothing(history: list[Move]) -> None:
    """Repeated ends and records of what is gone, and renewals of nothing, leave the books as they are."""
    run = Run()
    for move in history:
        run.play(move)
        if isinstance(move, Release | Book):
            before = copy.deepcopy(run.books)
            run.play(move)
            assert run.books == before


@given(history=histories)
def test_after_everything_has_ended_nothing_is_held(history: list[Move]) -> None:
    """Idle rule: when all streams are closed, or all holders dead and all graces over, every balance is zero."""
    released, crashed = Run(), Run()
    for move in history:
        released.play(move)
        crashed.play(move)
    for lease_id in [*released.books.leases]:
        released.play(Release(lease_id=lease_id))
    assert not balances(released.books)
    # A clock that was set back for good makes dues wait; the latest one bounds them all.
    latest = max((lease.due_at_ms for lease in crashed.books.leases.values()), default=0)
    crashed.now_ms = max(crashed.now_ms, latest)
    for _ in range(3):
        crashed.books.reclaim(crashed.now_ms, most=10_000)
        crashed.now_ms += max(RECORD_WAIT_MS, 10_000)
    assert not crashed.books.leases
    assert not balances(crashed.books)
    crashed.books.sweep(crashed.now_ms + 1_000_000_000, most=1_000)
    assert not crashed.books.tenants
    assert not crashed.books.replicas
    assert not crashed.books.lanes


@given(
    asked=st.lists(reservations(), min_size=1, max_size=6, unique_by=lambda one: one.lease_id),
    used=st.lists(st.one_of(st.none(), st.integers(0, 300)), min_size=6, max_size=6),
    order=st.randoms(use_true_random=False),
    at_once=st.booleans(),
)
def test_ends_and_records_in_any_order_leave_the_same_books(
    asked: list[Reservation], used: list[int | None], order: random.Random, *, at_once: bool
) -> None:
    """Ends and records of different leases, in whatever order and however often, come to the same balances."""
    plain, shuffled = Run(), Run()
    for request in asked:
        plain.books.reserve(request, START_MS)
        shuffled.books.reserve(request, START_MS)
    settles: list[Move] = []
    for request, units in zip(asked, used, strict=False):
        settles += [Release(lease_id=request.lease_id), Book(lease_id=request.lease_id, work_units=units)]
    now_ms = START_MS if at_once else START_MS + 400
    plain.now_ms = shuffled.now_ms = now_ms
    for move in settles:
        plain.play(move)
    mixed = [*settles, *settles]
    order.shuffle(mixed)
    for move in mixed:
        shuffled.play(move)
    assert balances(shuffled.books) == balances(plain.books) == {}
    assert set(shuffled.books.leases) == set(plain.books.leases)


@given(
    limits=quotas(),
    where=pools(),
    tokens=st.lists(st.integers(1, 60), max_size=8),
    more=st.integers(1, 60),
    asked=st.integers(1, 90),
    residence_ms=st.integers(1, 9_000),
    input_tokens=st.integers(0, 60),
)
def test_waits_grow_with_load(
    *,
    limits: Quota,
    where: Pool,
    tokens: list[int],
    more: int,
    asked: int,
    residence_ms: int,
    input_tokens: int,
) -> None:
    """Where requests stay equally long, one more of them never makes the next one's wait shorter."""
    request = reservation(
        "next",
        total_tokens=input_tokens + asked,
        input_tokens=input_tokens,
        quota=replace(limits, tokens_per_minute=None, burst_tokens=None, requests_per_minute=None),
        pool=replace(where, replicas=where.replicas[:1]),
        lane_limit_tokens=300,
    )

    def wait_ms(held: list[int]) -> int:
        books = Books()
        roomy = pool(1_000_000, name=where.name)
        for position, total in enumerate(held):
            one = reservation(f"r{position}", total_tokens=total, residence_ms=residence_ms, pool=roomy)
            assert isinstance(books.reserve(one, 0), Granted)
        answer = books.reserve(request, 0)
        return answer.wait_ms if isinstance(answer, Denied) else 0

    assume(wait_ms([]) == 0)  # what can never fit is refused before the ledger is asked
    assert wait_ms(tokens) <= wait_ms([*tokens, more])


@given(
    rate=st.integers(1, 5_000),
    burst=st.integers(1, 500),
    asks=st.lists(
        st.tuples(st.integers(0, 3_000), st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=25
    ),
)
def test_a_rate_admits_no_more_than_its_burst_and_what_time_refills(
    rate: int, burst: int, asks: list[tuple[int, int, int]]
) -> None:
    """From the first request on, what was really used never exceeds burst + rate x time, refunds included."""
    books = Books()
    limits = quota(tokens_per_minute=rate, burst_tokens=burst)
    now_ms = used_in_all = 0
    for position, (wait, amount, used) in enumerate(asks):
        now_ms += wait
        request = reservation(f"r{position}", total_tokens=amount, work_units=amount, quota=limits)
        if amount <= burst and isinstance(books.reserve(request, now_ms), Granted):
            books.release(request.lease_id, now_ms)
            books.book(request.lease_id, min(used, amount), now_ms)
            used_in_all += min(used, amount)
            assert used_in_all * 60_000 <= burst * 60_000 + rate * now_ms


@given(wait_for=st.integers(1, 400), held=st.integers(1, 400), rate=st.integers(1, 5_000))
def test_a_rates_wait_is_exact(wait_for: int, held: int, rate: int) -> None:
    """A request refused by its rate alone is granted after the wait, and not a millisecond earlier."""
    limits = quota(tokens_per_minute=rate, burst_tokens=400)
    books = Books()
    books.reserve(reservation("held", total_tokens=held, quota=limits), START_MS)
    request = reservation("next", total_tokens=wait_for, quota=limits)
    answer = books.reserve(request, START_MS)
    if isinstance(answer, Denied):
        early = books.reserve(request, START_MS + answer.wait_ms - 1)
        assert isinstance(early, Denied)
        assert early.wait_ms == 1
        assert isinstance(books.reserve(request, START_MS + answer.wait_ms), Granted)
