"""One round: exchanges sent to a server in a closed or an open loop, and what they cost it.

A closed loop (`Closed`) sends the next exchange when one has ended: it shows what work costs. An open loop
(`OnClock`, `AsTraced`) sends on schedule whatever the answers do, and counts a latency from the moment the request
was due: a server that stalls is charged for everybody who had to wait (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.bench.envoy_side import EnvoySide, Exchanged, access_log_message
from tests.bench.processes import Server
from tests.bench.requests import Make, Traced

CHANNELS = 8
"""Of an open loop: Envoy has a connection per worker thread; one alone would make the client the bottleneck."""

OUTPUT_TOKENS = 50
"""What the engine says it used, half of what was reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """So many exchanges at once, the next when one has ended."""

    at_once: int

    def said(self) -> str:
        """For the table."""
        return f"{self.at_once} at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnClock:
    """So many exchanges per second, evenly."""

    rate_per_s: float

    def due_s(self) -> Iterator[float]:
        """When each exchange is due, from the start."""
        number = 0
        while True:
            yield number / self.rate_per_s
            number += 1

    def said(self) -> str:
        """For the table."""
        return f"{self.rate_per_s:g}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class AsTraced:
    """When a trace's requests came, with time running `faster`, bursts and pauses included."""

    trace: Traced
    faster: float

    def due_s(self) -> Iterator[float]:
        """When each exchange is due, from the start."""
        rows = self.trace.rows
        ran_s = 0.0
        while True:
            for row in rows:
                yield ran_s + row.at_us / 1e6 / self.faster
            ran_s += rows[-1].at_us / 1e6 / self.faster

    def said(self) -> str:
        """For the table."""
        rows = self.trace.rows
        return f"as traced, about {len(rows) / (rows[-1].at_us / 1e6) * self.faster:.0f}/s"


Arrivals = Closed | OnClock | AsTraced


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round saw.

    Latencies are µs, sorted: in a closed loop from the last message's sending to the answer, in an open loop from
    the exchange's due time to the answer. `decided_us` is from the last message's sending in both.
    """

    cpu_us: float
    cores: float
    per_s: float
    refused: int
    latencies_us: tuple[int, ...]
    decided_us: tuple[int, ...]

    @property
    def p50_us(self) -> int:
        """The median."""
        return self.quantile_us(0.5)

    @property
    def p95_us(self) -> int:
        """What one of twenty exceeds."""
        return self.quantile_us(0.95)

    def quantile_us(self, quantile: float) -> int:
        """The latency that this share of exchanges did not exceed."""
        return quantile_of(self.latencies_us, quantile)


def quantile_of(ordered: Sequence[int], quantile: float) -> int:
    """The value that this share of the ordered ones does not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))]


Exchange = Callable[[EnvoySide, int], Awaitable[Exchanged]]


def exchanges(make: Make, *, log: bool) -> Exchange:
    """Sends the messages that `make` makes; with `log`, each admitted request's access-log record as well."""

    async def exchange(side: EnvoySide, number: int) -> Exchanged:
        done = await side.exchange(*make(number))
        if log and (record := access_log_message(done.answer, output_tokens=OUTPUT_TOKENS)) is not None:
            await side.log(record)
        return done

    return exchange


async def measure(server: Server, exchange: Exchange, arrivals: Arrivals, *, count: int) -> Round:
    """`count` exchanges, after a warm-up of a tenth."""
    each = 1 if isinstance(arrivals, Closed) else CHANNELS
    sides = [EnvoySide(address) for _ in range(each) for address in server.addresses]
    for side in sides:
        await side.ready()
    play = _closed if isinstance(arrivals, Closed) else _open
    await play(sides, exchange, arrivals, range(count, count + count // 10 + len(sides)))
    cpu_s, started = server.cpu_s(), time.perf_counter()
    seen = await play(sides, exchange, arrivals, range(count))
    elapsed_s, used_s = time.perf_counter() - started, server.cpu_s() - cpu_s
    for side in sides:
        await side.close()
    return Round(
        cpu_us=used_s / len(seen) * 1e6,
        cores=used_s / elapsed_s,
        per_s=len(seen) / elapsed_s,
        refused=sum(done.refused for _, done in seen),
        latencies_us=tuple(sorted(latency_us for latency_us, _ in seen)),
        decided_us=tuple(sorted(done.decision_us for _, done in seen)),
    )


Seen = list[tuple[int, Exchanged]]
"""Exchanges with their latencies."""


async def _closed(sides: Sequence[EnvoySide], exchange: Exchange, arrivals: Arrivals, numbers: range) -> Seen:
    assert isinstance(arrivals, Closed)
    each = max(1, len(numbers) // arrivals.at_once)

    async def work(worker: int) -> Seen:
        side = sides[worker % len(sides)]
        mine = numbers[worker * each : (worker + 1) * each]
        done = [await exchange(side, number) for number in mine]
        return [(one.decision_us, one) for one in done]

    workers = await asyncio.gather(*(work(worker) for worker in range(arrivals.at_once)))
    return [one for worker in workers for one in worker]


async def _open(sides: Sequence[EnvoySide], exchange: Exchange, arrivals: Arrivals, numbers: range) -> Seen:
    assert not isinstance(arrivals, Closed)
    seen: Seen = []
    running: set[asyncio.Task[None]] = set()
    start = time.perf_counter()

    async def one(number: int, due: float) -> None:
        done = await exchange(sides[number % len(sides)], number)
        seen.append((int((done.answered_s - due) * 1e6), done))

    for number, due_s in zip(numbers, arrivals.due_s(), strict=False):
        due = start + due_s
        pause = due - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        task = asyncio.create_task(one(number, due))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return seen
