"""Several workers behind one Envoy: losing one loses no request, and no access-log record that comes later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from extproc.adapters.envoy_bootstrap import PipeAddress
from extproc.exchange.events import Answer, RequestHeaders
from tests.envoy.conftest import Gateway, running_engine, running_gateway
from tests.envoy.policies import policy, pool
from tests.envoy.stubs import PATIENCE_S, StubService, admitted_to

REQUESTS = 30


async def _plain(_request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


async def _admit(_head: RequestHeaders, _body: bytes) -> Answer:
    return admitted_to("main")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """A gateway with two workers."""

    gateway: Gateway
    first: StubService
    second: StubService

    @property
    def decided(self) -> tuple[int, int]:
        """How many requests each worker has seen."""
        return len(self.first.heads), len(self.second.heads)

    async def ask(self) -> list[int]:
        """The statuses of `REQUESTS` requests, one after the other."""
        statuses = []
        for _ in range(REQUESTS):
            async with self.gateway.client.post("/v1/chat/completions", data="{}") as answer:
                statuses.append(answer.status)
        return statuses

    async def by_log_stream(self) -> tuple[StubService, StubService]:
        """The worker that gets the access log, once records have come, and the other one."""
        async with asyncio.timeout(PATIENCE_S):
            while self.first.records.empty() and self.second.records.empty():
                await asyncio.sleep(0.02)
        return (self.second, self.first) if self.first.records.empty() else (self.first, self.second)


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    second = StubService(socket=tmp_path / "second.sock", decide=_admit)
    await second.start()
    sockets = (tmp_path / "service.sock", second.socket)
    async with (
        running_engine(_plain) as engine,
        running_gateway(
            policy(pool(addresses=(engine.address,))),
            _admit,
            tmp_path,
            extproc=tuple(PipeAddress(path=str(path)) for path in sockets),
        ) as gateway,
    ):
        yield Workers(gateway=gateway, first=gateway.service, second=second)
    await second.stop()


async def test_a_lost_worker_loses_no_request(workers: Workers) -> None:
    """When a worker dies, the very next requests are decided by the other one, and their records arrive there.

    The one that dies is the one that had the access log's stream. It has no open streams then, so it would be
    everybody's first choice: only a retry that may not return to it helps.
    """
    assert await workers.ask() == [200] * REQUESTS
    assert min(workers.decided) > 0
    victim, rest = await workers.by_log_stream()
    for _ in range(REQUESTS):
        await victim.record()
    await victim.stop()
    assert await workers.ask() == [200] * REQUESTS
    for _ in range(REQUESTS):
        await rest.record()


async def test_a_draining_worker_is_left_alone(workers: Workers) -> None:
    """A worker that says it no longer serves gets no new request once Envoy has asked."""
    await workers.first.say_not_serving()
    for _ in range(20):
        before, _ = workers.decided
        assert await workers.ask() == [200] * REQUESTS
        if workers.decided[0] == before:
            return
        await asyncio.sleep(0.25)
    pytest.fail("the draining worker still gets requests after 5 s")
