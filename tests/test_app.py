"""A worker from its start to its end: healthy when ready, not serving while it drains, and a policy that reloads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from extproc.adapters.envoy_names import EXT_PROC_SERVICE
from extproc.app import Worker
from extproc.settings import Settings
from tests.support.valkey import ValkeyServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

POLICY = """
version: 1
models:
  tiny: {{tokenizer: {tokenizer}, context_tokens: 8_192, lanes: {{interactive: chat}}}}
pools:
  chat:
    replicas: [{{name: r0, address: "127.0.0.1:9", ceiling_tokens: {ceiling}}}]
    breaker: {{failures: 1000}}  # no engine is behind it
tenants:
  identity: {{header: x-tenant-id}}
  tiers: {{paid: {{}}}}
  members: {{acme: {{tier: paid}}}}
"""


@asynccontextmanager
async def working(
    directory: Path, tokenizer_dir: Path, *, drain_wait_ms: int = 0, ledger: str | None = None
) -> AsyncIterator[Worker]:
    """A started worker on a socket of its own; the caller may stop it."""
    policy = directory / "policy.yaml"
    policy.write_text(POLICY.format(tokenizer=tokenizer_dir / "tokenizer.json", ceiling=96_000))
    worker = Worker(
        Settings(
            policy=policy,
            listen=f"unix:{directory}/s.sock",
            admin_port=0,
            drain_wait_ms=drain_wait_ms,
            ledger=ledger,
            ledger_domain="app",
        )
    )
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def health_of(channel: aio.Channel, service: str) -> Any:
    """What the health service says of `service`."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_knows_the_names_that_envoy_asks_for(tmp_path: Path, tokenizer_dir: Path) -> None:
    """The empty name and the processor's own are SERVING; a name nobody knows is NOT_FOUND."""
    async with (
        working(tmp_path, tokenizer_dir),
        aio.insecure_channel(f"unix:{tmp_path}/s.sock") as channel,
    ):
        assert await health_of(channel, "") == SERVING
        assert await health_of(channel, EXT_PROC_SERVICE) == SERVING
        with pytest.raises(aio.AioRpcError) as unknown:
            await health_of(channel, "nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_what_is_served(tmp_path: Path, tokenizer_dir: Path) -> None:
    """A tool that knows no protos finds the processor, the access log and the health service."""
    async with (
        working(tmp_path, tokenizer_dir),
        aio.insecure_channel(f"unix:{tmp_path}/s.sock") as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = {service.name for service in answer.list_services_response.service}
        assert names >= {
            EXT_PROC_SERVICE,
            "envoy.service.accesslog.v3.AccessLogService",
            "grpc.health.v1.Health",
        }


async def test_a_draining_worker_says_so_before_it_stops(tmp_path: Path, tokenizer_dir: Path) -> None:
    """NOT_SERVING while new requests are still taken: the time in which Envoy finds another worker."""
    async with (
        working(tmp_path, tokenizer_dir, drain_wait_ms=1_500) as worker,
        aio.insecure_channel(f"unix:{tmp_path}/s.sock") as channel,
    ):
        assert await health_of(channel, "") == SERVING
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0.3)
        assert await health_of(channel, "") == NOT_SERVING
        assert await health_of(channel, EXT_PROC_SERVICE) == NOT_SERVING
        await stopping


async def test_a_bad_policy_changes_nothing_and_a_good_one_applies(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    """The last good policy stays, its version too; so it does when a tokenizer cannot be loaded."""
    async with working(tmp_path, tokenizer_dir) as worker:
        path = tmp_path / "policy.yaml"
        good, before = path.read_text(), worker.current
        broken = tmp_path / "tokenizer.json"
        broken.write_text("{}")
        for bad in (
            good.replace("ceiling_tokens: 96000", "ceiling_tokens: -1"),
            good.replace("version: 1", "version: 1\nunknown: 1"),
            "{",
            good.replace(str(tokenizer_dir / "tokenizer.json"), str(broken)),
        ):
            assert bad != good
            path.write_text(bad)
            await worker.reload()
            assert worker.current is before
        path.write_text(good.replace("ceiling_tokens: 96000", "ceiling_tokens: 48000"))
        await worker.reload()
        assert worker.current.version != before.version
        assert worker.current.pools["chat"].replicas[0].ceiling_tokens == 48_000


async def test_a_tenants_burst_of_retries_is_shared_by_the_workers_of_a_ledger(
    tmp_path: Path, tokenizer_dir: Path, valkey: ValkeyServer
) -> None:
    """Two workers: each lets half of it pass. A worker alone lets all of it."""

    def retries_that_pass(worker: Worker) -> int:
        retry: dict[str, Any] = {"tenant": "acme", "caller": 1, "named": None, "marked": True, "now_ms": 0}
        rules = worker.current.retries
        asked = range(2 * rules.budget_burst)
        return sum(worker._retries.arrived(**retry, rules=rules) is None for _ in asked)

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with working(tmp_path / "one", tokenizer_dir, ledger=valkey.url) as first:
        burst = first.current.retries.budget_burst
        assert retries_that_pass(first) == burst
        async with working(tmp_path / "two", tokenizer_dir, ledger=valkey.url) as second:
            assert retries_that_pass(second) == burst // 2


async def test_an_address_in_use_is_told(tmp_path: Path, tokenizer_dir: Path) -> None:
    """A second worker on the same port does not start in silence."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.format(tokenizer=tokenizer_dir / "tokenizer.json", ceiling=96_000))
    first = Worker(Settings(policy=policy, listen="127.0.0.1:0", admin_port=0, drain_wait_ms=0))
    await first.start()
    try:
        unreachable = f"unix:{tmp_path}/no/such/directory/{os.getpid()}.sock"
        second = Worker(Settings(policy=policy, listen=unreachable, admin_port=0, drain_wait_ms=0))
        with pytest.raises((OSError, RuntimeError), match=r"no/such/directory|bind"):
            await second.start()
        await second.stop()
    finally:
        await first.stop()
