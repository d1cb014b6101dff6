"""Engines that have too much to do, that die, and that do not tell: through the real Envoy, by what clients see."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from extproc.sim.engine import EngineConfig
from extproc.sim.server import ServerConfig, SimulatedEngine
from tests.e2e.conftest import POLICY
from tests.e2e.test_admission import CHAT, chat, post
from tests.support.gateway import Gateway, running_gateway

BULK = {"x-request-intent": "bulk"}
RULES = """
    probe: {interval_ms: 200ms, timeout_ms: 2s, stale_ms: 4s}
    breaker: {failures: 3, open_ms: 1s}
    overload: {waiting_requests: 4, enter_ms: 600ms, leave_ms: 1s}
  documents:"""


class ShyEngine(SimulatedEngine):
    """A simulated engine that can keep its load to itself."""

    hangs = False

    async def _scrape(self, request: web.Request) -> web.Response:
        while self.hangs:
            await asyncio.sleep(0.05)
        return await super()._scrape(request)


def an_engine() -> ShyEngine:
    """Two sequences at a time, so that others soon wait."""
    config = EngineConfig(prefill_tokens_per_s=20_000, kv_capacity_tokens=64_000, max_num_seqs=2)
    return ShyEngine(ServerConfig(engine=config, models=("tiny",)))


@asynccontextmanager
async def gateway_with(
    directory: Path, tokenizer_dir: Path, *, chat_at: str, documents_at: str, **changes: str
) -> AsyncIterator[Gateway]:
    """Both lanes in the pool chat, whose engines are asked five times a second."""
    text = POLICY.format(
        tokenizer=tokenizer_dir / "tokenizer.json",
        chat=chat_at,
        documents=documents_at,
        ceiling_tokens=64_000,
    )
    text = text.replace("bulk: documents}", "bulk: chat}" + changes.get("fallback", ""), 1)
    text = text.replace("\n  documents:", RULES, 1)
    async with AsyncExitStack() as stack:
        running = running_gateway(directory, text)
        gateway = await asyncio.to_thread(running.__enter__)
        stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        yield gateway


@asynccontextmanager
async def direct_load(address: str, requests: int) -> AsyncIterator[None]:
    """Others use the engine too, past the gateway: long answers, for as long as the block lasts."""
    body = chat(max_tokens=20_000, ignore_eos=True)

    async def ask(client: aiohttp.ClientSession) -> None:
        async with client.post(f"http://{address}{CHAT}", json=body) as answer:
            await answer.read()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        tasks = [asyncio.create_task(ask(client)) for _ in range(requests)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(found: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for it, generously."""
    try:
        async with asyncio.timeout(60):
            while not await found():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"never {what}") from None


async def pool_of(gateway: Gateway) -> dict[str, Any]:
    """What the state page tells of the pool chat."""
    state = await asyncio.to_thread(gateway.state)
    return next(pool for pool in state["pools"] if pool["pool"] == "chat")


async def engine_of(gateway: Gateway) -> dict[str, Any]:
    """What it tells of its engine."""
    engine: dict[str, Any] = (await pool_of(gateway))["replicas"][0]["engine"]
    return engine


async def metric(gateway: Gateway, start: str) -> float:
    """The value of the one series that begins so."""
    page = await asyncio.to_thread(gateway.get, "/metrics")
    (line,) = [line for line in page.splitlines() if line.startswith(start)]
    return float(line.rsplit(" ", 1)[1])


async def logged(gateway: Gateway, state: str) -> list[dict[str, Any]]:
    """The service's log lines that tell of this state, once there is one."""
    found: list[dict[str, Any]] = []

    async def is_there() -> bool:
        lines = (gateway.directory / "service.log").read_text().splitlines()
        found[:] = [line for line in map(json.loads, filter(str.strip, lines)) if line.get("state") == state]
        return bool(found)

    await until(is_there, f"logged: {state}")
    return found


async def test_overload_suspends_bulk_until_the_engine_has_caught_up(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Bulk is told 429 and when to come again, interactive goes on; then everything is as before."""
    engine = an_engine()
    address = f"127.0.0.1:{await engine.start()}"
    try:
        async with gateway_with(
            tmp_path, tokenizer_dir, chat_at=address, documents_at="127.0.0.1:9"
        ) as gateway:
            await until(lambda: _is(gateway, "waiting_requests", 0), "read")
            status, _, _ = await post(gateway, chat(), headers=BULK)
            assert status == 200

            async with direct_load(address, 12):
                await until(lambda: _suspended(gateway), "suspended")
                status, headers, content = await post(gateway, chat(), headers=BULK)
                assert (status, headers["x-admission-reason"]) == (429, "lane_suspended")
                assert content["error"]["code"] == "lane_suspended"
                assert headers["x-admission-lane"] == "bulk"
                assert 1 <= int(headers["retry-after"]) <= 2
                assert "x-should-retry" not in headers
                assert await metric(gateway, 'extproc_lane_suspended{lane="bulk",pool="chat"}') == 1
                assert await metric(gateway, 'extproc_engine_waiting_requests{pool="chat"') >= 4
                interactive = asyncio.create_task(post(gateway, chat(max_tokens=4)))
                await asyncio.sleep(0.5)
                assert not interactive.done(), "admitted: it waits in the engine"
            status, headers, _ = await interactive
            assert (status, headers["x-admission-lane"]) == (200, "interactive")

            await until(lambda: _not(_suspended(gateway)), "resumed")
            status, _, _ = await post(gateway, chat(), headers=BULK)
            assert status == 200
            decisions = json.loads(await asyncio.to_thread(gateway.get, "/recent"))["decisions"]
            (suspended,) = [one for one in decisions if one["reason"] == "lane_suspended"]
            assert (suspended["pool"], suspended["lane"]) == ("chat", "bulk")
            await asyncio.to_thread(gateway.await_idle)
            for message in ("lane suspended", "lane resumed"):
                (line,) = await logged(gateway, message)
                assert (line["pool"], line["lane"]) == ("chat", "bulk")
    finally:
        await engine.stop()


async def test_a_dead_engine_is_told_at_once_until_it_is_back(tokenizer_dir: Path, tmp_path: Path) -> None:
    """503 with an honest wait, without asking the engine; a pool that falls back serves on."""
    engine, spare = an_engine(), an_engine()
    port = await engine.start()
    spare_address = f"127.0.0.1:{await spare.start()}"
    try:
        async with gateway_with(
            tmp_path,
            tokenizer_dir,
            chat_at=f"127.0.0.1:{port}",
            documents_at=spare_address,
            fallback="\n  twin:\n    tokenizer: " + str(tokenizer_dir / "tokenizer.json") + "\n"
            "    context_tokens: 16_384\n    default_output_tokens: 64\n"
            "    lanes: {interactive: chat}\n    fallback: [{pool: documents}]",
        ) as gateway:
            await until(lambda: _is(gateway, "breaker", "closed"), "closed")
            assert (await post(gateway, chat()))[0] == 200
            await engine.stop()
            await until(lambda: _is(gateway, "breaker", "open"), "open")
            status, headers, content = await post(gateway, chat())
            assert (status, headers["x-admission-reason"]) == (503, "breaker_open")
            assert content["error"]["code"] == "breaker_open"
            assert headers["retry-after"] in ("1", "2")
            assert await metric(gateway, 'extproc_breaker_open{pool="chat",replica="chat-0"}') == 1
            # The spare engine only knows the name tiny: what is wrong then is its answer, and not ours.
            status, headers, _ = await post(gateway, chat(model="twin"))
            assert (status, headers["x-admission-fallback"]) == (404, "pool:documents")

            engine = an_engine()
            await engine.start(port=port)
            await until(lambda: _is(gateway, "breaker", "closed"), "closed again")
            assert (await post(gateway, chat()))[0] == 200
            await asyncio.to_thread(gateway.await_idle)
            assert {line["pool"] for line in await logged(gateway, "breaker open")} == {"chat"}
            assert await logged(gateway, "breaker closed")
    finally:
        await engine.stop()
        await spare.stop()


async def test_without_probes_failed_answers_open_the_breaker(tokenizer_dir: Path, tmp_path: Path) -> None:
    """Envoy's records alone tell it: so many failures in a row, then 503 by our own answer."""
    engine = an_engine()
    port = await engine.start()
    try:
        async with gateway_with(
            tmp_path, tokenizer_dir, chat_at=f"127.0.0.1:{port}", documents_at="127.0.0.1:9"
        ) as gateway:
            policy = gateway.directory / "policy.yaml"
            policy.write_text(
                policy.read_text().replace("interval_ms: 200ms", "interval_ms: 20min").replace(" 4s}", " 1h}")
            )
            gateway.service.reload()
            await until(lambda: _reloaded(gateway), "reloaded")
            assert (await post(gateway, chat()))[0] == 200
            await engine.stop()

            async def refused() -> bool:
                status, headers, _ = await another(gateway)
                assert status == 503
                return headers.get("x-admission-reason") == "breaker_open"

            await until(refused, "refused by our own breaker")
            engine = an_engine()
            await engine.start(port=port)
            await until(lambda: _serves(gateway), "served again")
            await asyncio.to_thread(gateway.await_idle)
    finally:
        await engine.stop()


async def test_an_engine_that_does_not_tell_serves_on(tokenizer_dir: Path, tmp_path: Path) -> None:
    """Its probes hang: the signal grows stale, which is said, and changes nothing for anybody."""
    engine = an_engine()
    address = f"127.0.0.1:{await engine.start()}"
    try:
        async with gateway_with(
            tmp_path, tokenizer_dir, chat_at=address, documents_at="127.0.0.1:9"
        ) as gateway:
            await until(lambda: _is(gateway, "waiting_requests", 0), "read")
            engine.hangs = True
            await until(lambda: _is(gateway, "is_stale", True), "stale")
            for headers in ({}, BULK):
                answers = await asyncio.gather(*(post(gateway, chat(), headers=headers) for _ in range(8)))
                assert {status for status, _, _ in answers} == {200}
            told = await engine_of(gateway)
            assert (told["waiting_requests"], told["kv_used_permille"]) == (None, None)
            assert (told["breaker"], told["probes"]["timeout"] >= 1) == ("closed", True)
            assert await metric(gateway, 'extproc_signal_stale{pool="chat",replica="chat-0"}') == 1
            engine.hangs = False
            await until(lambda: _is(gateway, "is_stale", False), "back")
            await asyncio.to_thread(gateway.await_idle)
            details = {line["detail"] for line in await logged(gateway, "engine signal stale")}
            assert "it does not answer in time" in details
    finally:
        await engine.stop()


async def _is(gateway: Gateway, name: str, value: object) -> bool:
    return bool((await engine_of(gateway))[name] == value)


async def _suspended(gateway: Gateway) -> bool:
    lanes = {lane["lane"]: lane["suspended"] for lane in (await pool_of(gateway))["lanes"]}
    assert not lanes["interactive"]
    return bool(lanes["bulk"])


async def _not(found: Awaitable[bool]) -> bool:
    return not await found


async def _reloaded(gateway: Gateway) -> bool:
    return await metric(gateway, 'extproc_policy_reloads_total{result="ok"}') == 1


async def _serves(gateway: Gateway) -> bool:
    return (await another(gateway))[0] == 200


async def another(gateway: Gateway) -> tuple[int, dict[str, str], Any]:
    """A question that was not asked before: whoever repeats one too early is told to stay away."""
    return await post(gateway, chat(f"{uuid.uuid4()}?"))
