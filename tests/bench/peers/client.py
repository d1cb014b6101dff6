"""The client's side: closed-loop load by wrk, arrivals on a clock, bursts, and clients that hang up.

What the client costs is in no figure: the peers' CPU is read from their own processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.peers.peer import Reply, Running

PATH = "/v1/chat/completions"
CONNECTIONS = 16
TIMEOUT = aiohttp.ClientTimeout(total=300)

WRK = """
local requests, turn = {}, 0
local headers = {["content-type"] = "application/json"}
for name, value in string.gmatch(os.getenv("PEERS_HEADERS"), "([^\\t\\n]+)\\t([^\\n]+)") do headers[name] = value end
function init()
  for body in io.lines(os.getenv("PEERS_BODIES")) do
    requests[#requests + 1] = wrk.format("POST", "/v1/chat/completions", headers, body)
  end
end
function request()
  turn = turn % #requests + 1
  return requests[turn]
end
function done(summary, latency)
  local errors = summary.errors
  io.write(string.format('\\n{"requests": %d, "refused": %d, "broken": %d, "microseconds": %d, "p50_us": %d}\\n',
    summary.requests, errors.status, errors.connect + errors.read + errors.write + errors.timeout,
    summary.duration, latency:percentile(50)))
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """How a closed loop went. `broken` are requests without an answer."""

    requests: int
    refused: int
    broken: int
    seconds: float

    @property
    def answered(self) -> int:
        """Requests that were let in and answered."""
        return self.requests - self.refused


def read_wrk(output: str) -> Loaded:
    """What wrk's script says in its last line. Raises ValueError if it says nothing."""
    line = output.strip().rsplit("\n", 1)[-1]
    said = json.loads(line)
    return Loaded(
        requests=said["requests"],
        refused=said["refused"],
        broken=said["broken"],
        seconds=said["microseconds"] / 1e6,
    )


def has_wrk() -> bool:
    """Whether wrk is installed; without it a slower client of our own makes the load."""
    return shutil.which("wrk") is not None


def load(peer: Running, bodies: Sequence[bytes], *, seconds: float, directory: Path) -> Loaded:
    """As many requests as it answers, `CONNECTIONS` at a time, for `seconds`."""
    if not has_wrk():
        return asyncio.run(_closed_loop(peer, bodies, seconds))
    script, file = directory / "load.lua", directory / "bodies.jsonl"
    script.write_text(WRK)
    file.write_bytes(b"\n".join(bodies) + b"\n")
    headers = "".join(f"{name}\t{value}\n" for name, value in peer.headers("load").items())
    done = subprocess.run(
        ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}s", "--timeout", "20s", "-s", script, peer.url],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PEERS_HEADERS": headers, "PEERS_BODIES": str(file)},
    )
    return read_wrk(done.stdout)


def warm_up(peer: Running, bodies: Sequence[bytes], *, directory: Path) -> None:
    """Until it has answered some, however slow the first are; then two seconds of load."""
    asyncio.run(burst(peer, "load", bodies[:CONNECTIONS]))
    load(peer, bodies, seconds=2, directory=directory)


async def _closed_loop(peer: Running, bodies: Sequence[bytes], seconds: float) -> Loaded:
    statuses: list[int] = []
    started = time.monotonic()

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        while time.monotonic() < started + seconds:
            number += CONNECTIONS
            statuses.append((await ask(client, peer, "load", bodies[number % len(bodies)])).status)

    async with session(CONNECTIONS) as client:
        await asyncio.gather(*(one(client, number) for number in range(CONNECTIONS)))
    return Loaded(
        requests=len(statuses),
        refused=sum(status != 200 for status in statuses),
        broken=0,
        seconds=time.monotonic() - started,
    )


def session(connections: int = 0) -> aiohttp.ClientSession:
    """A client; 0 is without a bound."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections), timeout=TIMEOUT)


def encode(body: Mapping[str, Any]) -> bytes:
    """A body as clients send it."""
    return json.dumps(body, ensure_ascii=False).encode()


async def ask(client: aiohttp.ClientSession, peer: Running, who: str, body: bytes) -> Reply:
    """One request, answered whole; status 0 is a connection that broke."""
    headers = peer.headers(who) | {"content-type": "application/json"}
    try:
        async with client.post(peer.url + PATH, data=body, headers=headers) as answer:
            return Reply(
                status=answer.status,
                headers={name.lower(): value for name, value in answer.headers.items()},
                body=await answer.read(),
            )
    except (aiohttp.ClientError, TimeoutError) as error:
        return Reply(status=0, headers={}, body=type(error).__name__.encode())


async def paced(
    targets: Mapping[str, Running], bodies: Sequence[bytes], *, rate_per_s: int, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds from due time to whole answer, for each target, asked in turn at the same rate."""
    took_ms: dict[str, list[float]] = {name: [] for name in targets}
    async with session() as client:

        async def one(name: str, due: float, body: bytes) -> None:
            reply = await ask(client, targets[name], "load", body)
            if reply.status == 200:
                took_ms[name].append((time.monotonic() - due) * 1000)

        for name, target in targets.items():  # connections and caches first
            await asyncio.gather(*(ask(client, target, "load", body) for body in bodies[:4]))
            took_ms[name].clear()
        started = time.monotonic()
        running: list[asyncio.Task[None]] = []
        step_s = 1 / rate_per_s / len(targets)
        for number in range(int(rate_per_s * seconds)):
            for place, name in enumerate(targets):
                due = started + (number * len(targets) + place) * step_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                running.append(asyncio.create_task(one(name, due, bodies[number % len(bodies)])))
        await asyncio.gather(*running)
    return took_ms


async def burst(peer: Running, who: str, bodies: Sequence[bytes]) -> list[Reply]:
    """All at once, each on a connection of its own."""
    async with session() as client:
        return list(await asyncio.gather(*(ask(client, peer, who, body) for body in bodies)))


async def two_bursts(
    peer: Running, who: str, bodies: Sequence[bytes], *, pause_s: float
) -> tuple[list[Reply], list[Reply]]:
    """A burst, and after `pause_s`, while what it let in is still running, the same again."""
    first = asyncio.create_task(burst(peer, who, bodies))
    await asyncio.sleep(pause_s)
    second = await burst(peer, who, bodies)
    return await first, second


async def hang_up(
    peer: Running, who: str, body: bytes, clients: int, *, within_s: float = 30
) -> tuple[int, int]:
    """`clients` begin to read a streamed answer, and all drop their connection, at the latest after `within_s`.

    How many had begun to read, and how many were refused; what is missing was still waiting.
    """
    begun = refused = 0
    async with session() as client:

        async def begin() -> aiohttp.ClientResponse | None:
            nonlocal begun, refused
            headers = peer.headers(who) | {"content-type": "application/json"}
            try:
                answer = await client.post(peer.url + PATH, data=body, headers=headers)
                first = await answer.content.readany()
            except (aiohttp.ClientError, TimeoutError):
                refused += 1
                return None
            if answer.status == 200 and b'"error"' not in first:
                begun += 1
            else:
                refused += 1
            return answer

        tasks = [asyncio.create_task(begin()) for _ in range(clients)]
        done, waiting = await asyncio.wait(tasks, timeout=within_s)
        for task in waiting:
            task.cancel()
        for task in done:
            if (answer := task.result()) is not None:
                answer.close()
        await asyncio.gather(*waiting, return_exceptions=True)
    return begun, refused
