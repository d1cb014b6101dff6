"""The in-memory ledger keeps callers waiting: it tells each of them once, in time, and without being asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.adapters.memory_ledger import TOLD_AT_ONCE, MemoryLedger
from extproc.domain.reservation import Answer, Denied, Granted, LaneTerms, Reservation, Scope
from tests.builders import a_policy, a_pool
from tests.support.reservations import pool, reservation

SMALL = pool(1_000)
TERMS = LaneTerms(queue_requests=3_000, queue_tokens=10_000_000)


class Steady:
    """This machine's clock."""

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return time.monotonic_ns() // 1000


class Callers:
    """Who has been told what."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.told: dict[str, Answer] = {}
        self._ledger = ledger
        self._changed = asyncio.Event()

    def ask(self, lease_id: str, tokens: int = 1_000, **changes: Any) -> None:
        """Ask for `tokens` of a thousand, and wait up to 10 s for them."""
        fields: dict[str, Any] = {"pool": SMALL, "hold_ms": 10_000, "lane_terms": TERMS}
        request: Reservation = reservation(lease_id, total_tokens=tokens, **(fields | changes))

        def deliver(answer: Answer) -> None:
            assert lease_id not in self.told, f"{lease_id} was told twice"
            self.told[lease_id] = answer
            self._changed.set()

        self._ledger.reserve(request, deliver)

    async def answer(self, lease_id: str) -> Answer:
        """Wait for this one's answer."""
        async with asyncio.timeout(10):
            while lease_id not in self.told:
                self._changed.clear()
                await self._changed.wait()
        return self.told[lease_id]


@pytest.fixture
def callers() -> Iterator[Callers]:
    """Callers of a ledger whose room is all taken by `full`."""
    crowd = Callers(MemoryLedger(Steady()))
    crowd.ask("full")
    yield crowd
    # Whatever a test does, the timer ends with the last one that waits.
    for lease_id in [*crowd._ledger.books.waiting.tickets]:
        crowd._ledger.withdraw(lease_id)
    assert crowd._ledger._timer is None or not crowd._ledger._callers


async def test_a_release_tells_the_next_one(callers: Callers) -> None:
    """No timer, no polling: the release itself delivers the grant."""
    callers.ask("a")
    assert "a" not in callers.told
    callers._ledger.release("full")
    answer = callers.told["a"]
    assert isinstance(answer, Granted)


async def test_time_alone_ends_a_wait(callers: Callers) -> None:
    """Nothing happens but time: the caller is refused when its residence is over."""
    callers.ask("a", hold_ms=30)
    answer = await callers.answer("a")
    assert isinstance(answer, Denied)
    assert answer.scope is Scope.RESIDENCE
    assert answer.waited_ms >= 30


async def test_time_alone_makes_room() -> None:
    """A prefill window that drains lets the next one go without any event."""
    crowd = Callers(MemoryLedger(Steady()))
    window = pool(10_000, prefill_window_ms=100)  # 100 tokens, 1 per ms
    crowd.ask("first", 200, pool=window, input_tokens=150)
    crowd.ask("second", 200, pool=window, input_tokens=50)
    assert "second" not in crowd.told
    answer = await crowd.answer("second")
    assert isinstance(answer, Granted)
    assert answer.waited_ms >= 95


async def test_who_leaves_is_told_at_once_and_makes_room(callers: Callers) -> None:
    """A withdrawal delivers the one answer that is owed, and the line moves up."""
    callers.ask("a")
    callers.ask("b")
    callers._ledger.withdraw("a")
    answer = callers.told["a"]
    assert isinstance(answer, Denied)
    assert answer.scope is Scope.WITHDRAWN
    callers._ledger.withdraw("a")
    callers._ledger.release("full")
    assert isinstance(callers.told["b"], Granted)


async def test_many_are_told_a_few_at_a_time(callers: Callers) -> None:
    """One large release lets many go; the event loop runs in between, and nobody is forgotten."""
    for number in range(100):
        callers.ask(f"r{number}", 10)
    callers._ledger.release("full")
    assert len(callers.told) == 1 + TOLD_AT_ONCE
    await callers.answer("r99")
    assert all(isinstance(answer, Granted) for answer in callers.told.values())
    assert len(callers.told) == 101


async def test_a_caller_may_give_back_from_within(callers: Callers) -> None:
    """Whoever is told may release at once: the next one is told, and nobody twice."""
    ledger = callers._ledger

    def pass_on(number: int) -> None:
        request = reservation(f"p{number}", total_tokens=1_000, pool=SMALL, hold_ms=9_000, lane_terms=TERMS)

        def deliver(answer: Answer) -> None:
            assert isinstance(answer, Granted)
            callers.told[answer.lease_id] = answer
            ledger.release(answer.lease_id)

        ledger.reserve(request, deliver)

    for number in range(30):
        pass_on(number)
    ledger.release("full")
    async with asyncio.timeout(5):
        while len(callers.told) < 31:
            await asyncio.sleep(0.001)
    assert not list(ledger.books.live_leases())


async def test_a_new_policy_is_noticed_by_those_who_wait(callers: Callers) -> None:
    """A larger pool lets them go at once."""
    callers.ask("a")
    callers._ledger.policy_changed(a_policy(pools=(a_pool(replicas=pool(5_000).replicas),)))
    assert isinstance(callers.told["a"], Granted)
    assert (await callers._ledger.snapshot(a_policy())).lanes[0].queued_requests == 0


async def test_the_snapshot_tells_who_waits(callers: Callers) -> None:
    """How many, how much of it is prompt, and for how long the oldest has; waiting is not idle."""
    callers.ask("a", input_tokens=40)
    callers.ask("b", input_tokens=2)
    await asyncio.sleep(0.02)
    snapshot = await callers._ledger.snapshot(a_policy())
    lane = snapshot.lanes[0]
    assert (lane.queued_requests, lane.queued_input_tokens) == (2, 42)
    assert 15 <= lane.oldest_queued_ms < 10_000
    assert not snapshot.is_idle
