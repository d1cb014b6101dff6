"""Workers and connections that die while callers wait: nobody is forgotten, told twice, or kept by the dead."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.adapters.redis_ledger.ledger import LedgerOptions
from extproc.adapters.redis_ledger.waiters import REPLY_MS
from extproc.domain.reservation import Answer, Granted, LaneTerms, Reservation, Unavailable
from extproc.ports import Ledger
from tests.support.ledgers import ask, eventually, policy_of, worker
from tests.support.lua_books import LuaBooks
from tests.support.reservations import pool, reservation
from tests.support.tcp_proxy import TcpProxy
from tests.support.valkey import ValkeyServer

OPTIONS = LedgerOptions(domain="test", budget_ms=300, silence_ms=1_000)
SMALL = pool(1_000, prefill_tokens_per_s=1_000_000)
TERMS = LaneTerms(queue_requests=100, queue_tokens=1_000_000)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A Valkey of this test's own."""
    with ValkeyServer() as running:
        yield running


def patient(lease_id: str, **changes: Any) -> Reservation:
    """One that waits for all of the small pool."""
    fields: dict[str, Any] = {"pool": SMALL, "hold_ms": 60_000, "lane_terms": TERMS, "residence_ms": 1_000}
    return reservation(lease_id, total_tokens=1_000, **(fields | changes))


def ask_for_later(ledger: Ledger, lease_id: str, told: list[tuple[str, Answer]]) -> None:
    """Ask, and go on."""
    ledger.reserve(patient(lease_id), lambda answer: told.append((lease_id, answer)))


async def queued(ledger: Ledger) -> int:
    """How many wait."""
    snapshot = await ledger.snapshot(policy_of(patient("x")))
    return sum(lane.queued_requests for lane in snapshot.lanes)


async def test_the_dead_keep_nobody_waiting(server: ValkeyServer) -> None:
    """What is granted to a worker that does not hear of it is taken back and goes to the next in line."""
    told: list[tuple[str, Answer]] = []
    async with (
        TcpProxy(socket_path=str(server.directory / "socket")) as proxy,
        worker(server.url, "w2", options=OPTIONS) as living,
    ):
        assert isinstance(await ask(living, patient("full")), Granted)
        async with worker(proxy.url, "w1", options=OPTIONS) as dead:
            ask_for_later(dead, "a", [])
            assert await queued(dead) == 1
            proxy.swallows = True
            ask_for_later(living, "b", told)
            assert await queued(living) == 2
            living.release("full")
            await eventually(lambda: bool(told), timeout_s=REPLY_MS / 1000 + 4)
        [(name, answer)] = told
        assert name == "b"
        assert isinstance(answer, Granted)
        living.release("b")
        assert await queued(living) == 0


async def test_a_connection_that_is_cut_loses_nobody_who_waits(server: ValkeyServer) -> None:
    """Those who wait ask again over the next connection, keep their places, and are told once."""
    told: list[tuple[str, Answer]] = []
    async with (
        TcpProxy(socket_path=str(server.directory / "socket")) as proxy,
        worker(proxy.url, "w1", options=OPTIONS) as ledger,
        worker(server.url, "w2", options=OPTIONS) as other,
    ):
        assert isinstance(await ask(other, patient("full")), Granted)
        for name in ("a", "b"):
            ask_for_later(ledger, name, told)
        assert await queued(ledger) == 2
        proxy.cut()
        other.release("full")  # granted, perhaps, while nobody is there to be told
        for _ in range(2):
            count = len(told) + 1
            await eventually(lambda count=count: len(told) == count)  # type: ignore[misc]
            assert isinstance(told[-1][1], Granted)
            proxy.cut()
            ledger.release(told[-1][0])
        assert [name for name, _ in told] == ["a", "b"]
        await eventually(lambda: ledger.health().available and ledger.health().waiting_ops == 0)
        assert await queued(other) == 0
        with server.client() as client:
            assert not LuaBooks(client).balances()


async def test_those_who_wait_are_told_that_the_store_is_away(server: ValkeyServer) -> None:
    """A store that dies answers nobody; its worker does, by the lane's posture, and long before the wait is over."""
    told: list[tuple[str, Answer]] = []
    async with worker(server.url, "w1", options=OPTIONS) as ledger:
        assert isinstance(await ask(ledger, patient("full")), Granted)
        ask_for_later(ledger, "a", told)
        assert await queued(ledger) == 1
        server.kill()
        while not told:
            await ask(ledger, patient(f"r{asyncio.get_running_loop().time()}", hold_ms=0))
        assert isinstance(told[0][1], Unavailable)
        server.start()
        await eventually(lambda: ledger.health().available)
        assert len(told) == 1
        assert await queued(ledger) == 0
