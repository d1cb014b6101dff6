"""What every ledger promises, whoever keeps the books."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from extproc.domain.reservation import Answer, Booking, Denied, Granted, Scope
from extproc.ports import Ledger
from tests.support.ledgers import Workplace, ask, policy_of
from tests.support.reservations import pool, quota, reservation


async def idle(ledger: Ledger, *asked: str) -> bool:
    """Whether nothing is held for the tenants that asked."""
    snapshot = await ledger.snapshot(policy_of(*(reservation("r", tenant=tenant) for tenant in asked)))
    return snapshot.is_idle


async def test_what_one_worker_holds_the_other_knows(workplace: Workplace) -> None:
    """Two workers share every limit, and what one gives back the other can take."""
    first, second = await workplace.worker("w1"), await workplace.worker("w2")
    one = pool(100)
    assert isinstance(await ask(first, reservation("a", pool=one)), Granted)
    denied = await ask(second, reservation("b", pool=one))
    assert isinstance(denied, Denied)
    assert denied.scope is Scope.REPLICA_TOKENS
    assert denied.wait_ms > 0
    first.release("a")
    await ask(first, reservation("c", total_tokens=0, input_tokens=0))
    assert isinstance(await ask(second, reservation("b", pool=one)), Granted)


async def test_usage_may_be_booked_by_another_worker(workplace: Workplace) -> None:
    """The record refunds the unused part once, on whatever worker it arrives, before or after the stream's end."""
    first, second = await workplace.worker("w1"), await workplace.worker("w2")
    limits = quota(tokens_per_minute=1, burst_tokens=1_000)
    for lease_id, record_first in (("a", True), ("b", False)):
        assert isinstance(await ask(first, reservation(lease_id, total_tokens=400, quota=limits)), Granted)
        if record_first:
            second.book(Booking(lease_id=lease_id, work_units=100))
            await ask(second, reservation("x", total_tokens=0, input_tokens=0))
        first.release(lease_id)
        await ask(first, reservation("y", total_tokens=0, input_tokens=0))
        second.book(Booking(lease_id=lease_id, work_units=100))
        second.book(Booking(lease_id=lease_id, work_units=0))
        await ask(second, reservation("x", total_tokens=0, input_tokens=0))
        first.book(Booking(lease_id=lease_id, work_units=0))
    await ask(first, reservation("y", total_tokens=0, input_tokens=0))
    last = await ask(first, reservation("c", total_tokens=100, quota=limits))
    assert isinstance(last, Granted)
    assert last.balance.tokens_remaining == 700


async def test_settling_what_nobody_holds_is_harmless(workplace: Workplace) -> None:
    """Ends and records that are repeated, late or unknown change nothing."""
    ledger = await workplace.worker("w1")
    await ask(ledger, reservation("a"))
    for _ in range(3):
        ledger.release("a")
        ledger.release("unknown")
        ledger.book(Booking(lease_id="a", work_units=None))
        ledger.book(Booking(lease_id="unknown", work_units=5))
    assert await idle(ledger, "acme")


@pytest.mark.parametrize("limit", [1, 7, 100])
async def test_exactly_the_limit_is_admitted(workplace: Workplace, limit: int) -> None:
    """Of 100 tasks that ask four workers at once, exactly as many are admitted as fit."""
    workers = [await workplace.worker(f"w{number}") for number in range(4)]
    limits = quota(inflight_requests=limit)
    answers = await asyncio.gather(
        *(ask(workers[number % 4], reservation(f"r{number}", quota=limits)) for number in range(100))
    )
    granted = [answer for answer in answers if isinstance(answer, Granted)]
    assert len(granted) == limit
    assert all(isinstance(answer, Granted | Denied) for answer in answers)
    for answer in granted:
        workers[0].release(answer.lease_id)
    assert await idle(workers[0], "acme")


async def test_simultaneous_requests_do_not_share_one_quota_twice(workplace: Workplace) -> None:
    """A quota of 100 a minute takes five requests of 20, however many ask at the same moment."""
    workers = [await workplace.worker(f"w{number}") for number in range(2)]
    limits = quota(tokens_per_minute=1, burst_tokens=100)
    answers = await asyncio.gather(
        *(
            ask(workers[number % 2], reservation(f"r{number}", total_tokens=20, quota=limits))
            for number in range(20)
        )
    )
    assert sum(isinstance(answer, Granted) for answer in answers) == 5
    assert {answer.scope for answer in answers if isinstance(answer, Denied)} == {Scope.TENANT_TOKEN_RATE}


async def test_a_refusal_takes_nothing(workplace: Workplace) -> None:
    """Whatever refuses, no other limit has been charged: the snapshot is the same before and after."""
    ledger = await workplace.worker("w1")
    limits = quota(tokens_per_minute=1, burst_tokens=1_000, requests_per_minute=60, inflight_requests=1)
    held = reservation("held", quota=limits)
    assert isinstance(await ask(ledger, held), Granted)
    policy = policy_of(held)
    before = await ledger.snapshot(policy)
    refused = await ask(ledger, reservation("refused", quota=limits))
    assert isinstance(refused, Denied)
    assert refused.scope is Scope.TENANT_INFLIGHT_REQUESTS
    after = await ledger.snapshot(policy)
    assert (after.replicas[0].reserved_tokens, after.lanes, after.leases) == (
        before.replicas[0].reserved_tokens,
        before.lanes,
        before.leases,
    )
    assert after.tenants[0].requests_remaining == before.tenants[0].requests_remaining == 59
    assert after.tenants[0].tokens_remaining == before.tenants[0].tokens_remaining == 900


async def test_a_snapshot_shows_what_is_held(workplace: Workplace) -> None:
    """Replicas, lanes and tenants beside their limits, and how many leases there are."""
    ledger = await workplace.worker("w1")
    two = pool(1_000, 2_000, guard_band_permille=100, prefill_tokens_per_s=1)
    asked = reservation("a", pool=two, total_tokens=300, input_tokens=50, quota=quota(inflight_tokens=500))
    await ask(ledger, asked)
    snapshot = await ledger.snapshot(policy_of(asked))
    a, b = snapshot.replicas
    assert (a.reserved_tokens, b.reserved_tokens, b.requests) == (0, 300, 1)
    assert (b.ceiling_tokens, b.guard_band_tokens) == (2_000, 200)
    assert 0 < b.prefill_backlog_tokens <= 50
    assert snapshot.lanes[0].reserved_tokens == 300
    assert snapshot.lanes[0].limit_tokens == 2_700
    assert snapshot.tenants[0].inflight_tokens == 300
    assert (snapshot.leases, snapshot.orphans, snapshot.unbooked) == (1, 0, 0)
    ledger.release("a")
    after = await ledger.snapshot(policy_of(asked))
    assert after.is_idle
    assert (after.leases, after.unbooked) == (0, 1)


async def test_requests_spread_by_room(workplace: Workplace) -> None:
    """The replica with most room; of equals the one with the shorter prefill backlog, then the one named first."""
    ledger = await workplace.worker("w1")
    slow = pool(1_000, 2_000, 1_500, prefill_tokens_per_s=1, prefill_window_ms=1_000_000_000)
    story = [
        # tokens, input, picked: room left is
        (700, 30, "b"),  # a 1000, b 1300, c 1500
        (200, 20, "c"),  # a 1000, b 1300, c 1300
        (400, 90, "c"),  # equal room, and c is reading less; a 1000, b 1300, c 900
        (300, 10, "b"),  # a 1000, b 1000, c 900
        (100, 10, "a"),  # equal room, and a has read nothing yet; a 900, b 1000, c 900
        (100, 10, "b"),  # a 900, b 900, c 900
        (100, 10, "a"),  # all equal: a is reading least
    ]
    for number, (tokens, input_tokens, picked) in enumerate(story):
        answer = await ask(
            ledger, reservation(f"r{number}", pool=slow, total_tokens=tokens, input_tokens=input_tokens)
        )
        assert isinstance(answer, Granted)
        assert (number, answer.replica) == (number, picked)


async def test_a_caller_that_left_still_gets_its_answer(workplace: Workplace) -> None:
    """Answers come back to whoever asked, in order, even if some no longer care; what they hold is given back."""
    ledger = await workplace.worker("w1")
    answers: dict[str, Answer] = {}
    asked = [f"r{number}" for number in range(50)]

    def answered(answer: Answer, *, lease_id: str) -> None:
        answers[lease_id] = answer
        if int(lease_id[1:]) % 3 == 0:
            ledger.release(lease_id)
            raise RuntimeError("this caller is broken")

    for lease_id in asked:
        try:
            ledger.reserve(reservation(lease_id), partial(answered, lease_id=lease_id))
        except RuntimeError:
            assert workplace.url is None  # an answer within the call: the caller's fault is its own
    await ask(ledger, reservation("last"))
    assert list(answers) == asked
    assert all(isinstance(one, Granted) and one.lease_id == lease_id for lease_id, one in answers.items())
    for lease_id in asked:
        ledger.release(lease_id)
    ledger.release("last")
    assert await idle(ledger, "acme")
