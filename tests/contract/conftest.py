"""Every ledger there is, so that one suite holds for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack

import pytest
import redis
import uvloop

from tests.support.ledgers import Workplace
from tests.support.valkey import ValkeyServer, redis_program, valkey_cluster, valkey_program

STORES = ["memory", "valkey", *(["redis"] if redis_program() else []), "cluster"]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a worker: it is not the one that comes with Python."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="package", params=STORES)
def store_url(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """Where a running store is; `None` is this process's memory."""
    match request.param:
        case "memory":
            yield None
        case "cluster":
            with valkey_cluster() as nodes:
                yield ",".join([nodes[0].url, *(node.url.partition("//")[2] for node in nodes[1:])])
        case name:
            program = redis_program() if name == "redis" else valkey_program()
            assert program is not None
            with ValkeyServer(program=program) as server:
                yield server.url


@pytest.fixture
async def workplace(store_url: str | None) -> AsyncIterator[Workplace]:
    """Workers that share an empty ledger."""
    async with AsyncExitStack() as stack:
        yield Workplace(store_url, stack)
    if store_url is not None:
        for url in store_url.split(","):
            _wipe(url if "//" in url else f"redis://{url}")


def _wipe(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.flushall()
