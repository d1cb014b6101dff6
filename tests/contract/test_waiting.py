"""Who waits for room in a ledger is told once, in time, whoever makes the room."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from extproc.adapters.memory_ledger import MemoryLedger
from extproc.adapters.redis_ledger.ledger import RedisLedger
from extproc.domain.policy import Lane, Policy
from extproc.domain.reservation import Answer, Denied, Granted, LaneTerms, Reservation, Scope
from extproc.ports import Ledger
from tests.support.ledgers import Workplace, ask, eventually, policy_of
from tests.support.reservations import pool, reservation

SMALL = pool(1_000, prefill_tokens_per_s=1_000_000)
TERMS = LaneTerms(queue_requests=3_000, queue_tokens=10_000_000)
SOON_S = 0.9
"""Less than it takes until a worker looks without having been called."""


def patient(lease_id: str, tokens: int = 1_000, **changes: Any) -> Reservation:
    """One that waits up to 10 s for `tokens` of a thousand."""
    fields: dict[str, Any] = {"pool": SMALL, "hold_ms": 10_000, "lane_terms": TERMS, "residence_ms": 1_000}
    return reservation(lease_id, total_tokens=tokens, **(fields | changes))


class Told:
    """What has been told to callers that do not stay to hear it."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}

    def ask(self, ledger: Ledger, asked: Reservation) -> None:
        """Ask, and go on."""

        def deliver(answer: Answer) -> None:
            assert asked.lease_id not in self.answers, f"{asked.lease_id} was told twice"
            self.answers[asked.lease_id] = answer

        ledger.reserve(asked, deliver)

    async def all_of(self, *lease_ids: str) -> None:
        """Wait until these have been told."""
        await eventually(lambda: self.answers.keys() >= set(lease_ids))


Worker = MemoryLedger | RedisLedger


async def two_workers(workplace: Workplace, policy: Policy | None = None) -> tuple[Worker, Worker]:
    """Two workers of a store; the books in memory have only one."""
    first = await workplace.worker("w1", policy=policy)
    return first, first if isinstance(first, MemoryLedger) else await workplace.worker("w2", policy=policy)


async def waiting(ledger: Ledger, *asked: Reservation) -> int:
    """How many wait in the small pool."""
    snapshot = await ledger.snapshot(policy_of(*asked))
    return sum(lane.queued_requests for lane in snapshot.lanes)


async def test_a_release_lets_the_first_that_came_go(workplace: Workplace) -> None:
    """Those who wait are granted in their order, as room is made."""
    ledger, told = await workplace.worker("w1"), Told()
    assert isinstance(await ask(ledger, patient("full")), Granted)
    for name in ("a", "b"):
        told.ask(ledger, patient(name))
    assert await waiting(ledger, patient("a")) == 2
    ledger.release("full")
    await told.all_of("a")
    assert isinstance(told.answers["a"], Granted)
    assert "b" not in told.answers
    ledger.release("a")
    await told.all_of("b")
    assert isinstance(told.answers["b"], Granted)
    ledger.release("b")
    assert await waiting(ledger, patient("a")) == 0


async def test_another_workers_release_wakes_this_one(workplace: Workplace) -> None:
    """Room that one worker makes is heard of by the other at once, not at its next look."""
    first, second = await two_workers(workplace)
    told = Told()
    for round_ in range(5):
        assert isinstance(await ask(first, patient(f"full-{round_}")), Granted)
        told.ask(second, patient(f"a-{round_}"))
        assert await waiting(second, patient("a")) == 1
        await asyncio.sleep(0.2)  # the bell is hung up when somebody waits first
        first.release(f"full-{round_}")
        async with asyncio.timeout(SOON_S / 2):
            while f"a-{round_}" not in told.answers:
                await asyncio.sleep(0.002)
        answer = told.answers[f"a-{round_}"]
        assert isinstance(answer, Granted)
        assert answer.waited_ms >= 150
        second.release(f"a-{round_}")
        assert await waiting(second, patient("a")) == 0


async def test_time_alone_ends_a_wait(workplace: Workplace) -> None:
    """Who has waited as long as its lane lets it is refused."""
    ledger = await workplace.worker("w1")
    await ask(ledger, patient("full"))
    async with asyncio.timeout(SOON_S):
        answer = await ask(ledger, patient("a", hold_ms=60))
    assert isinstance(answer, Denied)
    assert answer.scope is Scope.RESIDENCE
    assert answer.waited_ms >= 60
    assert answer.behind is Scope.REPLICA_TOKENS


async def test_who_leaves_is_told_and_makes_room(workplace: Workplace) -> None:
    """A caller that leaves, whether it waits already or has just asked, is told and stands in nobody's way."""
    ledger, told = await workplace.worker("w1"), Told()
    await ask(ledger, patient("full"))
    told.ask(ledger, patient("a"))
    assert await waiting(ledger, patient("a")) == 1
    ledger.withdraw("a")
    told.ask(ledger, patient("b"))
    ledger.withdraw("b")
    await told.all_of("a", "b")
    for name in ("a", "b"):
        answer = told.answers[name]
        assert isinstance(answer, Denied)
        assert answer.scope is Scope.WITHDRAWN
        ledger.withdraw(name)
    told.ask(ledger, patient("c"))
    ledger.release("full")
    await told.all_of("c")
    assert isinstance(told.answers["c"], Granted)
    ledger.release("c")
    snapshot = await ledger.snapshot(policy_of(patient("a")))
    assert snapshot.is_idle


def resized(ceiling_tokens: int, version: str) -> Policy:
    """A policy under which the small pool has this size; every lane may have all of it."""
    return replace(
        policy_of(patient("x")),
        pools={"chat": replace(SMALL, replicas=pool(ceiling_tokens).replicas)},
        version=version,
    )


async def test_a_new_policy_lets_those_who_wait_go(workplace: Workplace) -> None:
    """A larger pool, and with it a larger share of it for each lane, holds at once for whoever waits anywhere."""
    changed, other = await two_workers(workplace, resized(1_000, "v1"))
    told = Told()
    assert isinstance(await ask(other, patient("full")), Granted)
    small = [f"r{number}" for number in range(100)]
    for name in small:
        told.ask(other, patient(name, 10, lane_limit_tokens=1_000))
    told.ask(other, patient("large", 1_001 - 10, lane_limit_tokens=1_000))
    assert await waiting(other, patient("x")) == 101
    await asyncio.sleep(0.2)  # the bell is hung up when somebody waits first
    changed.policy_changed(resized(2_000, "v2"))
    async with asyncio.timeout(SOON_S / 2):
        while not told.answers.keys() >= set(small):
            await asyncio.sleep(0.002)
    assert all(isinstance(told.answers[name], Granted) for name in small)
    assert await waiting(other, patient("x")) == 1
    changed.policy_changed(resized(3_000, "v3"))
    await told.all_of("large")
    assert isinstance(told.answers["large"], Granted)


async def test_a_request_of_the_policy_before_changes_nothing_back(workplace: Workplace) -> None:
    """It began under a smaller pool and lines up late: whoever waits goes on being measured by the larger one."""
    ledger, told = await workplace.worker("w1", policy=resized(2_000, "v2")), Told()
    assert isinstance(await ask(ledger, patient("full")), Granted)
    told.ask(ledger, patient("late", lane_limit_tokens=1_000))
    await told.all_of("late")
    assert isinstance(told.answers["late"], Granted)


async def test_the_snapshot_tells_how_long_the_oldest_has_waited(workplace: Workplace) -> None:
    """Of those who still wait, whoever goes first; 0 when nobody does."""
    ledger, told = await workplace.worker("w1"), Told()

    async def oldest_ms() -> int:
        snapshot = await ledger.snapshot(policy_of(patient("x")))
        return max(lane.oldest_queued_ms for lane in snapshot.lanes)

    assert isinstance(await ask(ledger, patient("full")), Granted)
    told.ask(ledger, patient("old", deadline_in_ms=50_000))
    await asyncio.sleep(0.3)
    young_since_s = time.monotonic()
    for name in ("first", "young"):
        told.ask(ledger, patient(name, deadline_in_ms=20_000))
    assert await oldest_ms() >= 250
    ledger.release("full")
    await told.all_of("first")
    assert await oldest_ms() >= 250
    ledger.withdraw("old")
    assert await oldest_ms() <= (time.monotonic() - young_since_s) * 1000 + 50
    ledger.withdraw("young")
    assert await oldest_ms() == 0


async def test_many_wait_and_all_go(workplace: Workplace) -> None:
    """Whatever lets them go, of many that wait with two workers nobody is forgotten and nobody told twice."""
    workers, told = await two_workers(workplace), Told()
    await ask(workers[0], patient("full"))
    names = [f"r{number}" for number in range(60)]
    lanes = list(Lane)
    for number, name in enumerate(names):
        told.ask(workers[number % 2], patient(name, 10 + 40 * (number % 7), lane=lanes[number % 3]))
    assert await waiting(workers[0], *(patient("r", lane=lane) for lane in lanes)) > 0
    workers[0].release("full")
    released: set[str] = set()
    async with asyncio.timeout(10):
        while released != set(names):
            for name in told.answers.keys() - released:
                assert isinstance(told.answers[name], Granted)
                released.add(name)
                workers[names.index(name) % 2].release(name)
            await asyncio.sleep(0.002)
