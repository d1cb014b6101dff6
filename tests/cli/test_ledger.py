"""`extproc ledger` against a live store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from extproc.adapters.redis_ledger.ledger import LedgerOptions
from extproc.cli import build_app
from extproc.domain.lease import Holder
from extproc.domain.reservation import Granted
from tests.support.ledgers import ask, ledger_policy, worker
from tests.support.lua_books import LuaBooks
from tests.support.reservations import reservation
from tests.support.valkey import ValkeyServer, valkey_cluster

OPTIONS = LedgerOptions(domain="test", budget_ms=3_000)
DEAD = Holder(id="host-1-dead", lease_ttl_ms=60_000, orphan_grace_ms=60_000)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A store of this test's own."""
    with ValkeyServer() as running:
        yield running


def run(*arguments: str, url: str) -> tuple[int, str]:
    """The exit code, and everything that was printed."""
    environment = {"EXTPROC_LEDGER": url, "EXTPROC_LEDGER_DOMAIN": "test", "COLUMNS": "200"}
    result = CliRunner().invoke(build_app(), ["ledger", *arguments], env=environment)
    return result.exit_code, result.output


def leave_leases(server: ValkeyServer, count: int) -> None:
    """Leases of a worker that gave its last sign of life long ago."""
    from extproc.adapters.redis_ledger import wire

    with server.client() as client:
        books = LuaBooks(client)
        ops = [
            wire.reserve_op(reservation(f"dead-{number}", residence_ms=50_000), 0) for number in range(count)
        ]
        books.play(ops, holder=DEAD, at_ms=None, pools=[reservation("x").pool])


async def test_workers_and_leases_are_shown(server: ValkeyServer) -> None:
    """A live worker and a dead one, with what each holds, as tables and as JSON."""
    leave_leases(server, 3)
    async with worker(server.url, "host-2-live", options=OPTIONS) as ledger:
        assert isinstance(await ask(ledger, reservation("live-0", tenant="globex")), Granted)
        code, output = await asyncio.to_thread(run, "show", url=server.url)
        assert code == 0
        assert [line.split("│")[2].strip() for line in output.splitlines() if "host-" in line] == [
            "gone",
            "alive",
        ]
        assert "globex" in output

        code, output = await asyncio.to_thread(run, "show", "--json", url=server.url)
        document: dict[str, Any] = json.loads(output)
        assert [(one["id"], one["leases"]) for one in document["holders"]] == [
            ("host-1-dead", 3),
            ("host-2-live", 1),
        ]
        held = {one["name"]: one["requests"] for one in document["scopes"]}
        assert held == {"chat / interactive": 4, "chat / a": 4, "acme": 3, "globex": 1}

        code, output = await asyncio.to_thread(run, "leases", "--holder=host-2-live", url=server.url)
        assert code == 0
        assert "live-0" in output
        assert "dead-0" not in output


def test_a_dead_workers_leases_become_orphans(server: ValkeyServer) -> None:
    """Draining does not wait for the TTL, and frees nothing that Envoy may still be serving."""
    leave_leases(server, 200)
    code, output = run("drain", DEAD.id, url=server.url)
    assert (code, output.strip()) == (0, "200 of 200 leases made orphans")
    code, output = run("leases", "--json", "--limit=1000", url=server.url)
    assert [one["state"] for one in json.loads(output)] == [1] * 200
    with server.client() as client:
        assert LuaBooks(client).balances()["tenant", "acme"].requests == 200


def test_a_dead_workers_leases_can_be_freed_at_once(server: ValkeyServer) -> None:
    """An operator who knows that nothing is served any more need not wait for the grace."""
    leave_leases(server, 5)
    code, output = run("drain", DEAD.id, "--free", url=server.url)
    assert (code, output.strip()) == (0, "5 of 5 leases freed")
    with server.client() as client:
        books = LuaBooks(client)
        assert not books.balances()
        assert not books.keys_without_expiry()


async def test_a_live_worker_is_not_drained_by_mistake(server: ValkeyServer) -> None:
    """It says so and does nothing; with --force the worker claims its leases at its next renewal."""
    policy = ledger_policy(lease_ttl_ms=900)
    async with worker(server.url, "host-2-live", policy=policy, options=OPTIONS) as ledger:
        assert isinstance(await ask(ledger, reservation("live-0")), Granted)
        code, output = await asyncio.to_thread(run, "drain", "host-2-live", url=server.url)
        assert code == 2
        assert "alive" in output
        with server.client() as client:
            books = LuaBooks(client)
            assert [lease[13] for lease in books.leases().values()] == [0]
            code, output = await asyncio.to_thread(run, "drain", "host-2-live", "--force", url=server.url)
            assert code == 0
            for _ in range(200):
                if [lease[13] for lease in books.leases().values()] == [0]:
                    break
                await asyncio.sleep(0.01)
            assert [lease[13] for lease in books.leases().values()] == [0]


def test_who_is_not_there_is_named(server: ValkeyServer) -> None:
    """An unknown worker, a store that does not answer and a wrong address are told apart."""
    code, output = run("drain", "nobody", url=server.url)
    assert code == 2
    assert "nobody" in output
    code, output = run("show", url="unix:///nowhere.sock")
    assert (code, "FileNotFoundError" in output) == (1, True)
    code, output = run("show", url="http://localhost")
    assert (code, "scheme 'http'" in output) == (1, True)


def test_any_node_of_a_cluster_may_be_named() -> None:
    """The tools find the node that owns the domain's slot."""
    with valkey_cluster() as nodes:
        for node in nodes:
            code, output = run("show", "--json", url=node.url)
            assert (code, json.loads(output)) == (0, {"holders": [], "scopes": []})
