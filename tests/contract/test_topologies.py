"""Wherever the store is: a cluster that moves its slots, a Sentinel that fails over, TLS, users with few rights."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from extproc.adapters.redis_ledger.address import Address, AddressError
from extproc.adapters.redis_ledger.ledger import LedgerOptions
from extproc.adapters.redis_ledger.scripts import keys_of
from extproc.domain.reservation import Denied, Granted
from tests.support.ledgers import ask, eventually, policy_of, worker
from tests.support.lua_books import LuaBooks
from tests.support.reservations import pool, quota, reservation
from tests.support.tcp_proxy import TcpProxy
from tests.support.valkey import (
    SentinelPair,
    ValkeyServer,
    server_programs,
    valkey_cluster,
    valkey_sentinel,
)

OPTIONS = LedgerOptions(domain="test", budget_ms=3_000, silence_ms=2_000)

PHASE_S = 0.1

RIGHTS = (
    "+eval +evalsha +time +hget +hmget +hset +hdel +hscan "
    "+zadd +zrem +zrangebyscore +zremrangebyscore +zcount +pttl +pexpire +publish +subscribe"
)
"""All that the ledger's user needs; deploy/ledger.md says the same."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[ValkeyServer, ...]]:
    """Three primaries."""
    with valkey_cluster() as nodes:
        yield nodes


@pytest.fixture
def sentinel() -> Iterator[SentinelPair]:
    """A primary, its replica and a Sentinel."""
    with valkey_sentinel() as pair:
        yield pair


async def test_any_node_of_a_cluster_will_do(cluster: tuple[ValkeyServer, ...]) -> None:
    """Domains live on different nodes; whichever node is named, every domain is found, whole, on one of them."""
    domains = ["a", "b", "c", "d", "e", "f"]
    for domain in domains:
        for node in cluster:
            options = LedgerOptions(domain=domain, budget_ms=3_000)
            async with worker(node.url, "w1", options=options) as ledger:
                lease_id = f"{domain}{node.port}"
                assert isinstance(await ask(ledger, reservation(lease_id)), Granted)
                ledger.release(lease_id)
    homes = set()
    for node in cluster:
        with node.client() as client:
            stored = set(client.keys("*"))
        for domain in domains:
            if found := stored & set(keys_of(domain)):
                assert found == set(keys_of(domain)) or len(found) >= 3  # a left domain may lack its holders
                homes.add((domain, node.port))
    assert len(homes) == len(domains)
    assert len({port for _, port in homes}) > 1


async def test_a_slot_that_moves_takes_its_ledger_with_it(cluster: tuple[ValkeyServer, ...]) -> None:
    """While the slot migrates between nodes, every request is answered by the one set of books."""
    limits = quota(inflight_requests=40)
    url = ",".join([cluster[0].url, *(node.url.partition("//")[2] for node in cluster[1:])])
    answers: list[object] = []
    async with worker(url, "w1", options=OPTIONS) as ledger:
        for number in range(20):
            assert isinstance(await ask(ledger, reservation(f"held{number}", quota=limits)), Granted)

        stop = asyncio.Event()

        async def traffic() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                answer = await ask(ledger, reservation(f"r{number}", quota=limits))
                answers.append(answer)
                if isinstance(answer, Granted):
                    ledger.release(answer.lease_id)
                await asyncio.sleep(0.001)

        running = asyncio.create_task(traffic())
        await asyncio.to_thread(_move_slot, cluster)
        await asyncio.sleep(0.2)
        stop.set()
        await running
        assert len(answers) > 20
        assert {type(answer) for answer in answers} == {Granted}
        more = [await ask(ledger, reservation(f"more{number}", quota=limits)) for number in range(21)]
        assert [type(answer) for answer in more] == [Granted] * 20 + [Denied]
        for number in range(20):
            ledger.release(f"held{number}")
            ledger.release(f"more{number}")
        assert (await ledger.snapshot(policy_of(reservation("x")))).is_idle


def _move_slot(cluster: tuple[ValkeyServer, ...]) -> None:
    """Move the slot of the domain `test` from its node to another, key by key."""
    clients: list[Any] = [node.client() for node in cluster]
    try:
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", keys_of("test")[0])
        ids = [client.execute_command("CLUSTER", "MYID") for client in clients]
        counts = [client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) for client in clients]
        source = counts.index(max(counts))
        target = (source + 1) % len(cluster)
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        for key in keys_of("test"):
            clients[source].execute_command("MIGRATE", "127.0.0.1", cluster[target].port, key, 0, 1_000)
            time.sleep(PHASE_S)  # some keys here and some there: TRYAGAIN; all of them there: ASK
        for node in (target, source, (target + 1) % len(cluster)):
            clients[node].execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    finally:
        for client in clients:
            client.close()


async def test_a_failover_keeps_what_is_held(sentinel: SentinelPair) -> None:
    """The primary dies, Sentinel promotes the replica, and the holders tell it what it may have missed."""
    one = pool(1_000)
    url = f"redis+sentinel://127.0.0.1:{sentinel.sentinel_port}/{sentinel.service}"
    async with (
        worker(url, "w1", options=OPTIONS) as first,
        worker(url, "w2", options=OPTIONS) as second,
    ):
        for number in range(10):
            holder = first if number % 2 else second
            assert isinstance(await ask(holder, reservation(f"r{number}", pool=one)), Granted)
        sentinel.primary.kill()
        await eventually(lambda: not first.health().available, timeout_s=10)
        await eventually(lambda: first.health().available and second.health().available, timeout_s=20)
        assert isinstance(await ask(first, reservation("more", pool=one)), Denied)
        for number in range(10):
            (first if number % 2 else second).release(f"r{number}")
        assert isinstance(await ask(first, reservation("last", pool=one)), Granted)
    with sentinel.replica.client() as client:
        assert not LuaBooks(client).keys_without_expiry()


@pytest.mark.parametrize("program", server_programs(), ids=lambda program: Path(program).name)
async def test_a_user_with_few_rights_is_enough(program: Path) -> None:
    """The ledger needs no admin command, no SCRIPT, and no key outside its prefix."""
    with ValkeyServer(program=program, tcp=True) as server, server.client() as client:
        administrator: Any = client
        administrator.execute_command(
            "ACL",
            "SETUSER",
            "ledger",
            "on",
            ">s3cret",
            "resetkeys",
            "~extproc:*",
            "&extproc:*",
            *RIGHTS.split(),
        )
        administrator.execute_command("ACL", "SETUSER", "default", "off")
        url = f"redis://ledger:s3cret@127.0.0.1:{server.port}"
        async with worker(url, "w1", options=OPTIONS) as ledger:
            assert isinstance(await ask(ledger, reservation("r")), Granted)
            ledger.release("r")
            assert (await ledger.snapshot(policy_of(reservation("r")))).is_idle
            assert ledger.health().failed_ops_total == 0


async def test_a_wrong_password_is_named_without_being_told() -> None:
    """Health says that the credentials are refused, and nothing that prints shows them."""
    with ValkeyServer(tcp=True) as server, server.client() as client:
        client.config_set("requirepass", "right")
        url = f"redis://:wr0ng@127.0.0.1:{server.port}/0"
        assert "wr0ng" not in repr(Address.parse(url))
        options = LedgerOptions(domain="test", silence_ms=300)
        async with worker(url, "w1", options=options) as ledger:
            await eventually(lambda: ledger.health().fault in {"WRONGPASS", "NOAUTH"})
            assert not ledger.health().available


async def test_tls_is_verified(tmp_path: Path) -> None:
    """With the right authority the store is reached over TLS; with none it is not."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    pem = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(pem))
    with ValkeyServer() as server:
        async with TcpProxy(socket_path=str(server.directory / "socket"), tls=context) as proxy:
            async with worker(f"{proxy.url}?ssl_ca_certs={pem}", "w1", options=OPTIONS) as ledger:
                assert isinstance(await ask(ledger, reservation("r")), Granted)
            options = LedgerOptions(domain="test", silence_ms=300)
            async with worker(proxy.url, "w2", options=options) as distrustful:
                await eventually(lambda: "SSL" in distrustful.health().fault)
                assert not distrustful.health().available


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("http://localhost", "scheme 'http'"),
        ("redis://", "host:port"),
        ("redis://localhost:seven", "host:port"),
        ("unix://", "path"),
        ("redis+sentinel://localhost:26379", "service"),
        ("redis://localhost?socket_timeout=soon", "options"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused(text: str, part: str) -> None:
    """The error says what is wrong with the address, before anything is connected."""
    with pytest.raises(AddressError, match=part):
        Address.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "redis://localhost",
        "redis://user:p%40ss@10.0.0.1:6379/3",
        "rediss://cache.example:6380",
        "redis://h1:1,h2:2,[::1]:3",
        "unix:///run/valkey.sock?db=2",
        "redis+sentinel://:secret@s1:26379,s2:26379/ledger/1",
    ],
)
def test_every_form_of_address_is_understood(text: str) -> None:
    """All documented forms parse, and none of them prints its credentials."""
    address = Address.parse(text)
    assert "secret" not in repr(address)
    assert "p%40ss" not in repr(address)


def test_the_documented_rights_are_those_that_are_tested() -> None:
    """deploy/ledger.md grants the ledger's user exactly what the test above did."""
    text = (Path(__file__).parents[2] / "deploy" / "ledger.md").read_text()
    assert RIGHTS in " ".join(text.replace("\\\n", " ").split())


def test_redis_client_errors_stop_at_the_seam() -> None:
    """The exceptions of redis-py are translated: none of them is part of what the adapter raises."""
    with pytest.raises(AddressError) as raised:
        Address.parse("redis://localhost?db=many")
    assert not isinstance(raised.value, redis.RedisError)


def test_every_promise_names_a_test_that_exists() -> None:
    """The table of promises in deploy/ledger.md cannot outlive its tests."""
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "deploy" / "ledger.md").read_text()))
    defined = {
        name
        for path in (root / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 20
    assert named <= defined
