"""Many worker processes on one store, killed at any moment: nothing is over-admitted and nothing stays behind.

`CHAOS_SCALE=40 pytest tests/chaos` runs the full size: 8 workers of 20,000 granted requests each.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.adapters.redis_ledger import wire
from extproc.domain.holdings import Held
from extproc.domain.lease import Holder, LeaseState
from extproc.domain.reservation import Booking, Granted
from tests.chaos.worker_process import LANE_TOKENS, POOL, QUOTA, Orders
from tests.support.ledgers import ask, policy_of, worker
from tests.support.lua_books import LuaBooks
from tests.support.reservations import reservation
from tests.support.valkey import ValkeyServer

SCALE = float(os.environ.get("CHAOS_SCALE", "1"))
WORKERS = 4 if SCALE < 10 else 8
REQUESTS = int(500 * SCALE)
ROOT = Path(__file__).parents[2]
JANITOR = Holder(id="janitor", lease_ttl_ms=1_000, orphan_grace_ms=0)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A Valkey of this test's own."""
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def books(server: ValkeyServer) -> Iterator[LuaBooks]:
    """What is stored there."""
    with server.client() as client:
        yield LuaBooks(client)


def start(orders: Orders) -> subprocess.Popen[str]:
    """A worker process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.worker_process", orders.text()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> Counter[str]:
    """What the process printed at its end."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return Counter(json.loads(out.splitlines()[-1]))


def tidy(books: LuaBooks) -> None:
    """Be the one who comes next."""
    books.play([], holder=JANITOR, at_ms=None, reclaim_most=1_000)


def assert_within_limits(books: LuaBooks) -> int:
    """No scope is over its limit or below zero, at this instant; how many requests are held."""
    requests = 0
    for key, held in books.balances().items():
        assert min(held.tokens, held.requests, held.request_ms, held.token_ms) >= 0, (key, held)
        match key:
            case ("tenant", _):
                assert held.requests <= (QUOTA.inflight_requests or 0), (key, held)
                assert held.tokens <= (QUOTA.inflight_tokens or 0), (key, held)
                requests += held.requests
            case ("lane", *_):
                assert held.tokens <= LANE_TOKENS, (key, held)
            case ("replica", *_):
                assert held.tokens <= POOL.largest_usable_tokens, (key, held)
                assert held.requests <= POOL.request_cap, (key, held)
    return requests


def assert_idle(books: LuaBooks) -> None:
    """The idle rule: every counter zero, no lease that holds, no key that stays."""
    assert books.balances() == {}
    assert {lease[13] for lease in books.leases().values()} <= {2}
    counts = books.scopes().get(wire.LEASE_COUNTS_FIELD, [0, 0, 0])
    assert counts[:2] == [0, 0]
    assert not books.keys_without_expiry()


def test_workers_that_are_killed_leave_nothing_behind(server: ValkeyServer, books: LuaBooks) -> None:
    """With callers that leave and workers that are killed, no limit is passed, and at the end nothing is held."""
    chance = random.Random(7)

    def orders(slot: int, seed: int) -> Orders:
        offset_ms = (-5_000, 0, 5_000)[slot % 3]
        return Orders(
            url=server.url,
            name=f"w{slot}",
            mode="churn",
            count=REQUESTS,
            seed=seed,
            clock_offset_ms=offset_ms,
        )

    seeds = iter(range(1, 1_000_000))
    running = {slot: start(orders(slot, next(seeds))) for slot in range(WORKERS)}
    said: Counter[str] = Counter()
    most = kills = 0
    next_kill = 0.0
    while running:
        most = max(most, assert_within_limits(books))
        for slot, process in [*running.items()]:
            if process.poll() is not None:
                said += finished(process)
                del running[slot]
        # The first dies as soon as anybody holds anything, however fast the machine is.
        if running and most > 0 and kills < 2 * WORKERS and time.monotonic() > next_kill:
            slot = chance.choice([*running])
            running[slot].kill()
            running[slot].communicate()
            running[slot] = start(orders(slot, next(seeds)))
            kills += 1
            next_kill = time.monotonic() + chance.random() / 4
    assert said["Granted"] >= WORKERS * REQUESTS
    assert said["Unavailable"] == 0
    assert most > 10
    assert kills > 0
    # TTL and grace are a second each; the dead are reclaimed by whoever comes next.
    deadline = time.monotonic() + 4
    while books.balances() and time.monotonic() < deadline:
        tidy(books)
        assert_within_limits(books)
        time.sleep(0.05)
    assert_idle(books)


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_exactly_the_limit_is_admitted_over_processes(
    server: ValkeyServer, books: LuaBooks, limit: int
) -> None:
    """Four processes with 100 tasks each ask at the same moment: exactly as many get in as fit."""
    at_s = time.time() + 3
    processes = [
        start(
            Orders(
                url=server.url,
                name=f"w{number}",
                mode="race",
                count=100,
                limit=limit,
                at_s=at_s,
                lease_ttl_ms=60_000,
            )
        )
        for number in range(4)
    ]
    said: Counter[str] = Counter()
    for process in processes:
        said += finished(process)
    assert said == {"Granted": limit, "Denied": 400 - limit}
    assert books.balances()["tenant", "acme"].requests == limit


def test_a_killed_workers_answers_stay_counted_through_ttl_and_grace(
    server: ValkeyServer, books: LuaBooks
) -> None:
    """Nothing of it is freed before, everything after, and a record on another worker frees one at once."""
    ttl_ms, grace_ms = 600, 900
    process = start(
        Orders(
            url=server.url,
            name="w1",
            mode="hold",
            count=10,
            limit=10,
            lease_ttl_ms=ttl_ms,
            grace_ms=grace_ms,
            residence_ms=60_000,
        )
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "10\n"
    process.kill()
    process.communicate()
    killed_at = time.monotonic()

    def held() -> Held:
        tidy(books)
        return books.balances().get(("tenant", "acme"), Held())

    while (waited_s := time.monotonic() - killed_at) < (ttl_ms * 2 / 3 + grace_ms) / 1000 - 0.1:
        if waited_s > 0.3:
            books.play([wire.book_op("w1-3", 5)], holder=JANITOR, at_ms=None)
        expected = 10 if waited_s <= 0.3 else 9
        assert held().requests == expected
        time.sleep(0.02)
    while time.monotonic() - killed_at < (ttl_ms + grace_ms) / 1000 + 0.1:
        time.sleep(0.02)
    assert held() == Held()
    assert_idle(books)


async def test_a_worker_that_leaves_in_order_leaves_orphans(server: ValkeyServer, books: LuaBooks) -> None:
    """What a draining worker still holds goes on counting, is nobody's, and is freed by its record."""
    asked = [reservation(f"r{number}", residence_ms=60_000) for number in range(2)]
    async with worker(server.url, "w1") as leaving, worker(server.url, "w2") as staying:
        assert all([isinstance(await ask(leaving, one), Granted) for one in asked])
        await leaving.stop()
        assert [lease[13] for lease in books.leases().values()] == [LeaseState.ORPHANED] * 2
        assert books.balances()["tenant", "acme"].requests == 2
        assert books.client.zcard(books.keys[3]) == 1
        staying.book(Booking(lease_id="r0", work_units=7))
        snapshot = await staying.snapshot(policy_of(*asked))
        assert (snapshot.leases, snapshot.orphans) == (1, 1)
