"""Loads that a closed loop cannot show: arrivals on a clock, thousands of open streams, neighbours in trouble.

An open loop sends on schedule whatever the answers do, and counts a latency from the moment the request was due:
a server that stalls is charged for everybody who had to wait (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.bench.envoy_side import EnvoySide, access_log_message, body_message, chat_body, head_message
from tests.bench.processes import Server

Exchange = Callable[[EnvoySide, int], Awaitable[object]]

CHANNELS = 8
"""Envoy has a connection per worker thread; one alone would make the client the bottleneck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """What an open loop saw: server CPU over wall time, and latencies from the due time, sorted, in µs."""

    cores: float
    rate_per_s: float
    latencies_us: tuple[int, ...]

    def quantile_us(self, quantile: float) -> int:
        """The latency that this share of requests did not exceed."""
        return self.latencies_us[min(len(self.latencies_us) - 1, int(len(self.latencies_us) * quantile))]


async def open_loop(server: Server, exchange: Exchange, *, rate_per_s: int, seconds: float) -> OpenLoop:
    """Send `rate_per_s` exchanges on schedule for `seconds`, after a second of warm-up."""
    sides = [EnvoySide(server.target) for _ in range(CHANNELS)]
    for side in sides:
        await side.ready()
    latencies: list[int] = []
    running: set[asyncio.Task[None]] = set()

    async def one(number: int, due: float, *, counted: bool) -> None:
        await exchange(sides[number % CHANNELS], number)
        if counted:
            latencies.append(int((time.perf_counter() - due) * 1e6))

    async def play(count: int, *, counted: bool) -> None:
        start = time.perf_counter()
        for number in range(count):
            due = start + number / rate_per_s
            pause = due - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            task = asyncio.create_task(one(number, due, counted=counted))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(running)

    await play(rate_per_s, counted=False)
    cpu_s, started = server.cpu_s(), time.perf_counter()
    await play(int(rate_per_s * seconds), counted=True)
    elapsed_s = time.perf_counter() - started
    used_s = server.cpu_s() - cpu_s
    for side in sides:
        await side.close()
    return OpenLoop(
        cores=used_s / elapsed_s,
        rate_per_s=len(latencies) / elapsed_s,
        latencies_us=tuple(sorted(latencies)),
    )


def chats(texts: tuple[str, ...], *, log: bool = False, max_tokens: int = 100) -> Exchange:
    """Chats in turn, each with its access-log record if `log`."""
    bodies = [body_message(chat_body(text, max_tokens=max_tokens)) for text in texts]
    heads = [head_message(len(body)) for body in bodies]

    async def exchange(side: EnvoySide, number: int) -> object:
        done = await side.exchange(heads[number % len(heads)], bodies[number % len(bodies)])
        if log and (record := access_log_message(done.answer, output_tokens=max_tokens // 2)) is not None:
            await side.log(record)
        return done

    return exchange


async def open_streams(server: Server, text: str, count: int) -> float:
    """Kilobytes of server memory per stream while `count` admitted streams are open at once."""
    sides = [EnvoySide(server.target) for _ in range(max(CHANNELS, count // 500))]
    for side in sides:
        await side.ready()
    body = body_message(chat_body(text, max_tokens=1))
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

    tasks: list[asyncio.Task[Any]] = []
    for number in range(count):
        tasks.append(asyncio.create_task(hold(sides[number % len(sides)])))
        if number % 50 == 49:
            await asyncio.sleep(0.01)
    while opened < count and not any(task.done() for task in tasks):
        await asyncio.sleep(0.05)
    kilobytes = (server.resident_mb() - before_mb) * 1024 / max(opened, 1)
    release.set()
    await asyncio.gather(*tasks)
    for side in sides:
        await side.close()
    return kilobytes
