"""Loads that no comparison with a floor shows: neighbours in trouble, and thousands of open streams."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import uvloop

from tests.bench.disturb import disturbed
from tests.bench.envoy_side import EnvoySide, body_message, chat_body, head_message
from tests.bench.processes import Server
from tests.bench.prompts import prompt
from tests.bench.requests import Chats
from tests.bench.rounds import CHANNELS, OnClock, Round, exchanges, measure
from tests.bench.scenarios import spread
from tests.bench.services import AS_IT_COMES, Services

BESIDE_STORM_PER_S = 50
"""Chats of everybody else: the storm is ten times as many attempts."""

BESIDE_DOCUMENTS_PER_S = 100
STREAMS = 10_000
FIRST_SHARE = 5
"""One of so many streams is opened before memory is looked at: by then what only starting took was given back, and
what the first streams take for all of them is taken."""


Figures = dict[str, Any]


def chats(server: Server, *, rate_per_s: float, seconds: float) -> Round:
    """Cached chats on a clock."""
    exchange = exchanges(Chats(tokens=190, texts=64).prepared(), log=False)
    count = max(20, int(rate_per_s * seconds))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure(server, exchange, OnClock(rate_per_s=rate_per_s), count=count))


def beside(services: Services, kind: str, *, rounds: int, rate_per_s: float, seconds: float) -> Figures:
    """Chats alone, then beside a disturbance of this kind: latency of both, and what one disturbance cost.

    The cost is what the server used more of its processor while it was disturbed, by answer that it gave.
    """
    server = services.service(AS_IT_COMES)
    alone: list[Round] = []
    crowded: list[Round] = []
    costs_us: list[float] = []
    told: Counter[str] = Counter()
    for _ in range(rounds):
        begun_s = server.cpu_s()
        alone.append(chats(server, rate_per_s=rate_per_s, seconds=seconds))
        quiet_s, begun_s = server.cpu_s() - begun_s, server.cpu_s()
        with disturbed(server, kind) as answers:
            crowded.append(chats(server, rate_per_s=rate_per_s, seconds=seconds))
        costs_us.append((server.cpu_s() - begun_s - quiet_s) / max(1, answers.total()) * 1e6)
        told.update(answers)
    return {
        "p99_us_alone": spread(one.quantile_us(0.99) for one in alone),
        "p99_us_beside": spread(one.quantile_us(0.99) for one in crowded),
        "ratio": spread(
            loud.quantile_us(0.99) / quiet.quantile_us(0.99)
            for loud, quiet in zip(crowded, alone, strict=True)
        ),
        "chats_refused": sum(one.refused for one in crowded),
        "cpu_us_per_answer": spread(costs_us),
        "answers": dict(told),
    }


def storm(services: Services, *, rounds: int, seconds: float) -> Figures:
    """A tenant over its rate whose clients retry at once, ten times the load of everybody else."""
    return beside(services, "storm", rounds=rounds, rate_per_s=BESIDE_STORM_PER_S, seconds=seconds)


def documents(services: Services, *, rounds: int, seconds: float) -> Figures:
    """Ten documents of 100k tokens a second, each new to every cache."""
    return beside(services, "documents", rounds=rounds, rate_per_s=BESIDE_DOCUMENTS_PER_S, seconds=seconds)


def hostile(services: Services, *, rounds: int, seconds: float) -> Figures:
    """Two prompts a second that are as hard to count as texts of their length get."""
    return beside(services, "hostile", rounds=rounds, rate_per_s=BESIDE_DOCUMENTS_PER_S, seconds=seconds)


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
        for number in range(max(50, streams // 10)):
            await sides[number % len(sides)].exchange(head, body)
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

        async def open_until(number: int) -> float:
            """Open more, until there are `number`; the server's memory then."""
            while len(tasks) < number:
                tasks.append(asyncio.create_task(hold(sides[len(tasks) % len(sides)])))
                if len(tasks) % 50 == 0:
                    await asyncio.sleep(0.01)
            while opened < number and not any(task.done() for task in tasks):
                await asyncio.sleep(0.05)
            return server.private_mb()

        first = streams // FIRST_SHARE
        before_mb = await open_until(first)
        kilobytes = (await open_until(streams) - before_mb) * 1024 / (streams - first)
        release.set()
        await asyncio.gather(*tasks)
        for side in sides:
            await side.close()
        return kilobytes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        kilobytes = runner.run(run())
    # What was freed meanwhile is not what a stream takes: then there are too few of them to tell.
    told = round(kilobytes, 2) if kilobytes > 0 else None
    return {"streams": streams, "kb_per_stream": told, "peak_mb": round(server.peak_mb())}
