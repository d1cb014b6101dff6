"""Loads that no comparison with a floor shows: neighbours in trouble, and thousands of open streams."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

from tests.bench.envoy_side import EnvoySide, body_message, chat_body, head_message
from tests.bench.processes import Server
from tests.bench.prompts import prompt
from tests.bench.requests import Chats
from tests.bench.rounds import CHANNELS, OnClock, Round, exchanges, measure
from tests.bench.scenarios import spread
from tests.bench.services import AS_IT_COMES, Services

ALIVE_PER_S = 50
"""Chats of whoever is measured."""

STORM_PER_S = 500
"""Attempts of the clients that retry: ten times as many."""

DOCUMENTS_PER_S = 10
STREAMS = 10_000

Figures = dict[str, Any]
Disturb = Callable[[EnvoySide], Awaitable[None]]


def chats_beside(
    server: Server, disturb: Disturb | None, *, seconds: float, rate_per_s: float = ALIVE_PER_S
) -> tuple[Round, float]:
    """Cached chats on a clock, alone or beside somebody else; and the server's CPU seconds meanwhile."""

    async def run() -> tuple[Round, float]:
        side = EnvoySide(server.target)
        await side.ready()
        other = asyncio.ensure_future(disturb(side)) if disturb is not None else None
        begun_s = server.cpu_s()
        exchange = exchanges(Chats(tokens=190, texts=64).prepared(), log=False)
        count = max(20, int(rate_per_s * seconds))
        try:
            done = await measure(server, exchange, OnClock(rate_per_s=rate_per_s), count=count)
        finally:
            if other is not None:
                other.cancel()
                with suppress(asyncio.CancelledError):
                    await other
            await side.close()
        return done, server.cpu_s() - begun_s

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _pour(
    side: EnvoySide, rate_per_s: float, message: Callable[[int], tuple[bytes, bytes]], told: Any
) -> None:
    """Exchanges on a clock until cancelled; `told` hears each last answer."""
    running: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        with suppress(aio.AioRpcError):
            told((await side.exchange(*message(number))).answer)

    start, number = time.perf_counter(), 0
    try:
        while True:
            number += 1
            task = asyncio.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(max(0.0, start + number / rate_per_s - time.perf_counter()))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def storm(services: Services, *, rounds: int, seconds: float) -> Figures:
    """A tenant over its rate whose clients retry at once, ten times the load of everybody else.

    They are as SDKs are that do not wait: the same body again, with the number of the attempt, 50 of them.
    The cost of a refusal is what the storm adds to the server's CPU, by refusal.
    """
    server = services.service(AS_IT_COMES)
    bodies = [chat_body(prompt(290, seed=seed), seed=seed) for seed in range(50)]
    reasons: Counter[str] = Counter()
    answers: list[bytes] = []

    def message(number: int) -> tuple[bytes, bytes]:
        attempt, client = divmod(number, len(bodies))
        more = {"x-stainless-retry-count": str(min(attempt, 9)), "x-forwarded-for": f"10.1.0.{client}"}
        body = bodies[client]
        return head_message(len(body), tenant="pauper", more=more), body_message(body)

    async def disturb(side: EnvoySide) -> None:
        await _pour(side, STORM_PER_S, message, answers.append)

    alone: list[Round] = []
    beside: list[Round] = []
    per_refusal_us = []
    for _ in range(rounds):
        quiet, quiet_s = chats_beside(server, None, seconds=seconds)
        answers.clear()
        loud, loud_s = chats_beside(server, disturb, seconds=seconds)
        alone.append(quiet)
        beside.append(loud)
        per_refusal_us.append((loud_s - quiet_s) / max(1, len(answers)) * 1e6)
        reasons.update(_reason(answer) for answer in answers)
    return {
        "admitted_p99_us_alone": spread(one.quantile_us(0.99) for one in alone),
        "admitted_p99_us_in_storm": spread(one.quantile_us(0.99) for one in beside),
        "ratio": spread(
            loud.quantile_us(0.99) / quiet.quantile_us(0.99)
            for loud, quiet in zip(beside, alone, strict=True)
        ),
        "admitted_refused": sum(one.refused for one in beside),
        "cpu_us_per_refusal": spread(per_refusal_us),
        "storm_answers": dict(reasons),
    }


def _reason(answer: bytes) -> str:
    response = pb.ProcessingResponse.FromString(answer)
    if not response.HasField("immediate_response"):
        return "admitted"
    return str(response.immediate_response.details.removeprefix("extproc_"))


def documents(services: Services, *, rounds: int, seconds: float) -> Figures:
    """Interactive chats alone, and beside ten documents of 100k tokens a second, each new to every cache."""
    server = services.service(AS_IT_COMES)
    text = prompt(100_000)

    def message(number: int) -> tuple[bytes, bytes]:
        body = body_message(chat_body(f"{number} {time.monotonic_ns()} {text}"))
        return head_message(len(body)), body

    async def disturb(side: EnvoySide) -> None:
        await _pour(side, DOCUMENTS_PER_S, message, lambda _answer: None)

    alone: list[Round] = []
    beside: list[Round] = []
    for _ in range(rounds):
        alone.append(chats_beside(server, None, seconds=seconds, rate_per_s=100)[0])
        beside.append(chats_beside(server, disturb, seconds=seconds, rate_per_s=100)[0])
    return {
        "chat_p99_us_alone": spread(one.quantile_us(0.99) for one in alone),
        "chat_p99_us_beside": spread(one.quantile_us(0.99) for one in beside),
        "ratio": spread(
            loud.quantile_us(0.99) / quiet.quantile_us(0.99)
            for loud, quiet in zip(beside, alone, strict=True)
        ),
    }


def open_streams(services: Services, *, scale: float) -> Figures:
    """Kilobytes of server memory per stream while many admitted streams are open at once."""
    server = services.fresh(AS_IT_COMES)
    streams = max(50, int(STREAMS * scale))

    async def run() -> float:
        sides = [EnvoySide(server.target) for _ in range(max(CHANNELS, streams // 500))]
        for side in sides:
            await side.ready()
        body = body_message(chat_body(prompt(190), max_tokens=1))
        head = head_message(len(body))
        for number in range(50):
            await sides[number % len(sides)].exchange(head, body)
        before_mb = server.resident_mb()
        release = asyncio.Event()
        opened = 0

        async def hold(side: EnvoySide) -> None:
            nonlocal opened

            async def until() -> None:
                nonlocal opened
                opened += 1
                await release.wait()

            await side.exchange(head, body, until=until)

        tasks: list[asyncio.Task[None]] = []
        for number in range(streams):
            tasks.append(asyncio.create_task(hold(sides[number % len(sides)])))
            if number % 50 == 49:
                await asyncio.sleep(0.01)
        while opened < streams and not any(task.done() for task in tasks):
            await asyncio.sleep(0.05)
        kilobytes = (server.resident_mb() - before_mb) * 1024 / max(opened, 1)
        release.set()
        await asyncio.gather(*tasks)
        for side in sides:
            await side.close()
        return kilobytes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        kilobytes = runner.run(run())
    return {"streams": streams, "kb_per_stream": round(kilobytes, 2), "peak_mb": round(server.peak_mb())}
