"""A store that is slow, silent, gone, emptied or broken: what callers are told, and that the books come right."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from extproc.adapters.redis_ledger.ledger import LedgerOptions, RedisLedger
from extproc.adapters.redis_ledger.scripts import keys_of
from extproc.domain.policy import Posture
from extproc.domain.reservation import Booking, Denied, Granted, Unavailable
from extproc.ports import LedgerFault
from tests.support.ledgers import ask, eventually, ledger_policy, policy_of, worker
from tests.support.reservations import pool, quota, reservation
from tests.support.tcp_proxy import TcpProxy
from tests.support.valkey import ValkeyServer

BUDGET_MS = 300
OPTIONS = LedgerOptions(domain="test", budget_ms=BUDGET_MS, silence_ms=1_000)
SCOPES_KEY, LEASES_KEY, DUES_KEY, *_ = keys_of("test")


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A Valkey of this test's own."""
    with ValkeyServer() as running:
        yield running


def assert_idle(server: ValkeyServer, *, keys_expire: bool = True) -> None:
    """Read from the store itself: no scope holds anything, and no key stays for ever."""
    from tests.support.lua_books import LuaBooks

    with server.client() as client:
        books = LuaBooks(client)
        assert not books.balances()
        if keys_expire:
            assert not books.keys_without_expiry()


async def settled(ledger: RedisLedger) -> None:
    """Wait until everything that was asked has been sent and answered."""
    await eventually(lambda: ledger.health().available and ledger.health().waiting_ops == 0)
    await ledger.snapshot(policy_of(reservation("x")))


async def test_a_silent_store_costs_a_budget_and_then_nothing(server: ValkeyServer) -> None:
    """Callers are answered when their budget is over; once the breaker is open, at once and without a call."""
    async with worker(server.url, "w1", options=OPTIONS) as ledger:
        assert isinstance(await ask(ledger, reservation("before")), Granted)
        server.pause()
        try:
            began = time.monotonic()
            while not ledger.health().breaker_opened_total:
                answer = await ask(ledger, reservation(f"r{time.monotonic()}"))
                assert isinstance(answer, Unavailable)
                assert answer.wait_ms >= 1
                assert time.monotonic() - began < 10
            calls = ledger.health().calls_total
            began = time.monotonic()
            for number in range(200):
                assert isinstance(await ask(ledger, reservation(f"open{number}")), Unavailable)
            assert ledger.health().calls_total - calls <= 2  # a probe may have been due
            with pytest.raises(LedgerFault):
                await ledger.snapshot(ledger_policy())
        finally:
            server.resume()
        await settled(ledger)
        assert isinstance(await ask(ledger, reservation("after")), Granted)
        ledger.release("before")
        ledger.release("after")
        await settled(ledger)
        assert_idle(server)


async def test_a_worker_that_was_busy_does_not_blame_the_store(server: ValkeyServer) -> None:
    """An answer that is there, and was not read because the worker had other things to do, is not a silent store."""
    options = LedgerOptions(domain="test", budget_ms=BUDGET_MS, silence_ms=10_000)
    mine, others = socket.socketpair()
    loop = asyncio.get_running_loop()
    async with worker(server.url, "w1", options=options) as ledger:
        with server.client() as client, mine, others:

            def be_busy(lease_id: str, until_s: float) -> None:
                mine.recv(1)
                give_up_s = time.monotonic() + 10
                while not client.hexists(LEASES_KEY, lease_id):
                    assert time.monotonic() < give_up_s
                time.sleep(max(0.0, until_s - time.monotonic()))

            for number in range(5):
                calls, lease_id = ledger.health().calls_total, f"r{number}"
                answering = asyncio.ensure_future(ask(ledger, reservation(lease_id)))
                while ledger.health().calls_total == calls:
                    await asyncio.sleep(0)
                # As most work of a worker, it begins with something that has been read.
                loop.add_reader(mine, be_busy, lease_id, time.monotonic() + 1.2 * BUDGET_MS / 1000)
                others.send(b"x")
                assert isinstance(await answering, Granted)
                loop.remove_reader(mine)
        health = ledger.health()
        assert (health.unanswered_total, health.late_grants_total, health.available) == (0, 0, True)


async def test_a_grant_that_comes_too_late_is_given_back(server: ValkeyServer) -> None:
    """The store granted what the caller had given up on: nobody holds it afterwards."""
    limits = quota(inflight_requests=5)
    async with worker(server.url, "w1", options=OPTIONS) as ledger:
        await settled(ledger)
        server.pause()
        try:
            answers = await asyncio.gather(
                *(ask(ledger, reservation(f"r{number}", quota=limits)) for number in range(5))
            )
        finally:
            server.resume()
        assert all(isinstance(answer, Unavailable) for answer in answers)
        await settled(ledger)
        assert_idle(server)
        again = [await ask(ledger, reservation(f"s{number}", quota=limits)) for number in range(6)]
        assert [type(answer) for answer in again] == [Granted] * 5 + [Denied]


async def test_a_black_hole_is_left_for_a_new_connection(server: ValkeyServer) -> None:
    """A connection that swallows everything is given up, and what it may have swallowed is told again."""
    async with (
        TcpProxy(socket_path=str(server.directory / "socket")) as proxy,
        worker(proxy.url, "w1", options=OPTIONS) as ledger,
    ):
        for number in range(3):
            assert isinstance(await ask(ledger, reservation(f"held{number}")), Granted)
        proxy.swallows = True
        ledger.release("held0")
        assert isinstance(await ask(ledger, reservation("lost")), Unavailable)
        ledger.release("held1")
        await eventually(lambda: not ledger.health().available)
        proxy.swallows = False
        await settled(ledger)
        assert proxy.connections >= 2
        assert ledger.health().leases_held == 1
        ledger.release("held2")
        await settled(ledger)
        assert_idle(server)


async def test_a_connection_cut_at_any_call_loses_nothing(server: ValkeyServer) -> None:
    """Whatever call a cut hits: no key without expiry, no lease that nobody holds, and work goes on."""
    async with (
        TcpProxy(socket_path=str(server.directory / "socket")) as proxy,
        worker(proxy.url, "w1", options=OPTIONS) as ledger,
    ):
        for cut_at in range(1, 9):
            seen = 0

            def allow(_: bytes, cut_at: int = cut_at) -> bool:
                nonlocal seen
                seen += 1
                return seen != cut_at

            proxy.allow = allow
            for number in range(4):
                lease_id = f"r{cut_at}-{number}"
                if isinstance(await ask(ledger, reservation(lease_id)), Granted):
                    ledger.release(lease_id)
                    ledger.book(Booking(lease_id=lease_id, work_units=1))
                await asyncio.sleep(0)
        proxy.allow = None
        await settled(ledger)
        assert ledger.health().leases_held == 0
        assert_idle(server)


async def test_an_emptied_store_learns_what_is_held(server: ValkeyServer) -> None:
    """After a restart without data the living holders say what they hold, before anybody asks for more."""
    one = pool(1_000)
    async with (
        worker(server.url, "w1", options=OPTIONS) as first,
        worker(server.url, "w2", options=OPTIONS) as second,
    ):
        for number in range(10):
            holder = first if number % 2 else second
            assert isinstance(await ask(holder, reservation(f"r{number}", pool=one)), Granted)
        server.kill()
        await asyncio.sleep(0.05)
        server.start()
        await settled(first)
        await settled(second)
        assert isinstance(await ask(first, reservation("more", pool=one)), Denied)
        assert first.health().reasserted_total == second.health().reasserted_total == 5
        for number in range(10):
            (first if number % 2 else second).release(f"r{number}")
        await settled(first)
        await settled(second)
        assert_idle(server)


async def test_a_failover_that_loses_the_last_moments_learns_of_the_ends_too(server: ValkeyServer) -> None:
    """Leases that the new server still thinks held were released just before: it is told again."""
    async with worker(server.url, "w1", options=OPTIONS) as ledger:
        for number in range(5):
            assert isinstance(await ask(ledger, reservation(f"r{number}")), Granted)
        with server.client() as client:
            earlier = {key: client.dump(key) for key in (SCOPES_KEY, LEASES_KEY, DUES_KEY)}
            for number in range(4):
                ledger.release(f"r{number}")
                ledger.book(Booking(lease_id=f"r{number}", work_units=1))
            await settled(ledger)
            for key, value in earlier.items():
                client.restore(key, 60_000, value, replace=True)
            client.client_kill_filter(_type="normal", skipme=True)
        await eventually(lambda: ledger.health().connections_total == 2)
        await settled(ledger)
        snapshot = await ledger.snapshot(policy_of(reservation("x")))
        assert (snapshot.leases, snapshot.unbooked) == (1, 0)


async def test_one_bad_operation_spoils_no_other(server: ValkeyServer) -> None:
    """An operation that the script cannot run is refused alone; those that went out with it are answered."""
    async with worker(server.url, "w1", options=OPTIONS) as ledger:
        await settled(ledger)
        asked = [reservation(f"r{number}", tenant=None if number == 5 else "acme") for number in range(10)]
        answers = await asyncio.gather(*(ask(ledger, one) for one in asked))
        kinds = [type(answer) for answer in answers]
        assert kinds == [Unavailable if number == 5 else Granted for number in range(10)]
        assert ledger.health().available


async def test_leases_that_the_store_forgot_are_reasserted_at_the_next_renewal(server: ValkeyServer) -> None:
    """A store that loses data without losing the connection is told again within a third of the TTL."""
    one = pool(100)
    policy = ledger_policy(lease_ttl_ms=600)
    async with worker(server.url, "w1", policy=policy, options=OPTIONS) as ledger:
        assert isinstance(await ask(ledger, reservation("r", pool=one)), Granted)
        with server.client() as client:
            client.flushall()
        await eventually(lambda: ledger.health().reasserted_total == 1)
        assert isinstance(await ask(ledger, reservation("next", pool=one)), Denied)


async def test_a_script_flush_fails_nobody(server: ValkeyServer) -> None:
    """A server that forgets its scripts between and during calls answers every request all the same."""
    limits = quota(inflight_requests=5)
    async with (
        worker(server.url, "w1", options=OPTIONS) as first,
        worker(server.url, "w2", options=OPTIONS) as second,
    ):
        with server.client() as client:
            for round_ in range(20):
                client.script_flush()
                answers = await asyncio.gather(
                    *(
                        ask(holder, reservation(f"{name}{round_}-{number}", quota=limits))
                        for name, holder in (("a", first), ("b", second))
                        for number in range(8)
                    )
                )
                granted = [answer for answer in answers if isinstance(answer, Granted)]
                assert len(granted) == 5
                assert sum(isinstance(answer, Denied) for answer in answers) == 11
                for answer in granted:
                    (first if answer.lease_id.startswith("a") else second).release(answer.lease_id)
                await settled(first)
                await settled(second)


@pytest.mark.parametrize("fault", ["wrong type", "out of memory", "read only"])
async def test_a_store_that_answers_with_errors_is_a_store_that_is_away(
    server: ValkeyServer, fault: str
) -> None:
    """Errors fail closed and never open, and the ledger works again as soon as the store does."""
    async with worker(server.url, "w1", options=OPTIONS) as ledger:
        await settled(ledger)
        with server.client() as client:
            match fault:
                case "wrong type":
                    client.flushall()
                    client.set(SCOPES_KEY, "not a hash")
                case "out of memory":
                    client.config_set("maxmemory", "1")
                case "read only":
                    client.execute_command("REPLICAOF", "127.0.0.1", "1")
            for number in range(5):
                answer = await ask(ledger, reservation(f"r{number}"))
                assert isinstance(answer, Unavailable)
            match fault:
                case "wrong type":
                    client.delete(SCOPES_KEY)
                case "out of memory":
                    client.config_set("maxmemory", "0")
                case "read only":
                    client.execute_command("REPLICAOF", "NO", "ONE")
        await settled(ledger)
        assert isinstance(await ask(ledger, reservation("after")), Granted)
        ledger.release("after")
        await settled(ledger)
        assert_idle(server)


async def test_a_key_without_expiry_gets_one(server: ValkeyServer) -> None:
    """What somebody else made eternal does not stay so."""
    async with worker(server.url, "w1", options=OPTIONS) as ledger:
        await ask(ledger, reservation("a"))
        with server.client() as client:
            for key in (SCOPES_KEY, LEASES_KEY, DUES_KEY):
                client.persist(key)
                assert client.pttl(key) == -1
            await ask(ledger, reservation("b"))
            for key in (SCOPES_KEY, LEASES_KEY, DUES_KEY):
                assert client.pttl(key) > 0


async def test_alone_a_worker_grants_its_share(server: ValkeyServer) -> None:
    """With posture local and two workers, each grants half of every limit, and counts what it already holds."""
    policy = ledger_policy(Posture.LOCAL, lease_ttl_ms=3_000)
    one = pool(1_000)
    async with (
        worker(server.url, "w1", policy=policy, options=OPTIONS) as first,
        worker(server.url, "w2", policy=policy, options=OPTIONS) as second,
    ):
        assert isinstance(await ask(first, reservation("before", pool=one)), Granted)
        await eventually(lambda: first.health().workers == second.health().workers == 2)
        server.kill()
        await eventually(lambda: not first.health().available and not second.health().available)
        kinds = []
        for holder, name in ((first, "a"), (second, "b")):
            answers = [await ask(holder, reservation(f"{name}{n}", pool=one)) for n in range(7)]
            kinds.append([type(answer) for answer in answers])
        assert kinds[0] == [Granted] * 4 + [Denied] * 3
        assert kinds[1] == [Granted] * 5 + [Denied] * 2
        # What no share can hold is not a matter of waiting for somebody to finish.
        assert isinstance(await ask(first, reservation("big", pool=one, total_tokens=600)), Unavailable)
        first.release("a0")
        first.book(Booking(lease_id="a0", work_units=1))
        assert isinstance(await ask(first, reservation("a7", pool=one)), Granted)

        server.start()
        await settled(first)
        await settled(second)
        # 1 from before and 9 granted alone fill the replica: all of it is known to the store again.
        assert isinstance(await ask(second, reservation("more", pool=one)), Denied)
        for name in ("before", *(f"a{number}" for number in range(8))):
            first.release(name)
        for number in range(7):
            second.release(f"b{number}")
        await settled(first)
        await settled(second)
        assert_idle(server)


async def test_what_was_granted_alone_is_charged_when_the_store_is_back(server: ValkeyServer) -> None:
    """A tenant's rate does not forget an outage."""
    policy = ledger_policy(Posture.LOCAL)
    limits = quota(tokens_per_minute=1, burst_tokens=1_000)
    async with worker(server.url, "w1", policy=policy, options=OPTIONS) as ledger:
        assert isinstance(await ask(ledger, reservation("before", quota=limits, total_tokens=300)), Granted)
        server.pause()
        try:
            await eventually(lambda: _opens(ledger))
            assert isinstance(
                await ask(ledger, reservation("alone", quota=limits, total_tokens=200)), Granted
            )
        finally:
            server.resume()
        await settled(ledger)
        after = await ask(ledger, reservation("after", quota=limits, total_tokens=100))
        assert after.balance.tokens_remaining == 400  # type: ignore[union-attr]


def _opens(ledger: RedisLedger) -> bool:
    """Ask without waiting, so that silence is noticed."""
    ledger.reserve(reservation(f"probe{time.monotonic_ns()}", total_tokens=10**9), lambda _: None)
    return ledger.health().breaker_opened_total > 0


async def test_a_posture_is_the_lanes(server: ValkeyServer) -> None:
    """Only lanes with posture local are served alone; the others are told that the ledger is unavailable."""
    async with worker(server.url, "w1", policy=ledger_policy(Posture.OPEN), options=OPTIONS) as ledger:
        server.kill()
        await eventually(lambda: not ledger.health().available)
        assert isinstance(await ask(ledger, reservation("r")), Unavailable)
