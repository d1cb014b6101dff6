"""How long does one request keep the event loop from everybody else? Large and hostile bodies of all kinds.

    python -m tests.bench.loop_block [--megabytes N ...] [--only NAME ...]

Each body is measured twice, the best of some trials each time:

- `callback`: it goes through a whole worker in this process, and every callback of the event loop is timed: the
  longest is how long nobody else was served. Processor time of the loop's thread, so that a busy machine does not
  show; and nothing of what other threads do.
- `late`: it is sent to the worker by a client in another process, through gRPC, and a timer of the event loop notes
  how much later than its millisecond it was called, at worst. Everything is in it: gRPC's copies, and what threads
  did while they held the interpreter. But no more than this process had of the processors meanwhile: what else the
  machine does is no lateness of ours. `idle` is the same without any request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from grpc import aio

from extproc.adapters.grpc_server import server_options
from tests.bench.envoy_side import EnvoySide, body_message, head_message
from tests.bench.in_process import InProcess
from tests.bench.prompts import write_policy

TICK_S = 0.001
SETTLED_S = 0.05
"""How long the timer goes on after the answer: what is given back then is in it."""

CHAT = '{"model":"tiny","max_tokens":10,"messages":[%s]}'
MESSAGE = '{"role":"user","content":"%s"}'
UNKNOWN = '{"model":"tiny","max_tokens":10,"messages":[{"role":"user","content":"x"}],"x":%s}'
STRING = '"ab"'
PARTS = '{"role":"user","content":[%s]}'
IMAGE = '{"type":"image_url","image_url":{"url":"http:x"}}'
NAMED = '"k%07d":1'
IDS = '{"model":"tiny","max_tokens":10,"prompt":[%s]}'


def _text(unit: str) -> Callable[[int], str]:
    return lambda size: CHAT % (MESSAGE % (unit * (size // len(unit.encode()))))


BODIES: dict[str, Callable[[int], str]] = {
    "prose": _text("The river rose overnight, and by noon the road was under water. "),
    "escaped lines": _text("some code(1, 2);\\n\\t"),
    "escaped letters": _text("\\u00e9\\u4f60"),
    "Chinese": _text("河水夜里上涨。中午时下面的路已被淹没。"),
    "one letter": _text("a"),
    "messages": lambda size: CHAT % ",".join([MESSAGE % ("x" * 40)] * (size // 72)),
    "token ids": lambda size: IDS % ",".join(["12345"] * (size // 6)),
    "texts": lambda size: IDS % ",".join([STRING] * (size // 5)),
    "images": lambda size: CHAT % PARTS.replace("%s", ",".join([IMAGE] * (size // 50))),
    "digits": lambda size: IDS % ",".join("1" * (size // 2)),
    "unknown strings": lambda size: UNKNOWN % f"[{','.join([STRING] * (size // 5))}]",
    "unknown keys": lambda size: (
        UNKNOWN.replace("%s", "{%s}") % ",".join(NAMED % number for number in range(size // 13))
    ),
    "white space": lambda size: CHAT % (MESSAGE % "x" + " " * size),
}


@contextmanager
def timed_callbacks(longest_ns: list[int]) -> Iterator[None]:
    """Note in `longest_ns` the longest callback of every event loop that is no uvloop."""
    plain = asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        begun_ns = time.thread_time_ns()
        plain(handle)
        longest_ns[0] = max(longest_ns[0], time.thread_time_ns() - begun_ns)

    asyncio.Handle._run = run  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        asyncio.Handle._run = plain  # type: ignore[method-assign]


def _messages(body: bytes, number: int) -> tuple[bytes, bytes]:
    """Head and body of a request; the number makes it another one: it would be refused as a hasty retry."""
    path = "/v1/completions" if b'"prompt":[' in body[:64] else "/v1/chat/completions"
    body = b'{"user":"%d",' % number + body.lstrip()[1:]
    return head_message(len(body), path=path), body_message(body)


async def callback_ms(worker: InProcess, body: bytes, *, repeats: int = 3) -> float:
    """The longest callback while `body` is decided on: the best of some trials."""
    trials: list[int] = []
    for number in range(repeats):
        longest_ns = [0]
        messages = _messages(body, number)
        with timed_callbacks(longest_ns):
            answer = await asyncio.create_task(worker.exchange(*messages))  # a callback of its own
        trials.append(longest_ns[0])
        del answer
    return min(trials) / 1e6


def _client(target: str, orders: Connection) -> None:
    """Another process: sends what it is given, when it is told to."""

    async def run() -> None:
        side = EnvoySide(target)
        await side.ready()
        orders.send(None)
        while (messages := orders.recv()) is not None:
            orders.send(None)
            orders.recv()
            exchanged = await side.exchange(*messages)
            orders.send(exchanged.decision_us)
        await side.close()

    asyncio.run(run())


@asynccontextmanager
async def client_of(worker: InProcess, scratch: Path) -> AsyncIterator[Connection]:
    """A client of the worker, which is served on a socket in `scratch` as long as there is a client."""
    target = f"unix:{scratch / 'worker.sock'}"
    server = aio.server(options=server_options(worker.worker.current.limits.body_bytes))
    server.add_generic_rpc_handlers((worker.worker._processor.handler(),))
    server.add_insecure_port(target)
    await server.start()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_client, args=(target, theirs))
    process.start()
    await asyncio.to_thread(ours.recv)
    yield ours
    ours.send(None)
    await asyncio.to_thread(process.join)
    await server.stop(grace=None)


class Ticker:
    """A timer that notes how much later than it was due it is called, at worst."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._due_s = time.perf_counter()
        self._used_s = time.process_time()
        self._timer: asyncio.Handle = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now_s, used_s = time.perf_counter(), time.process_time()
        self.worst_s = max(self.worst_s, min(now_s - self._due_s, used_s - self._used_s))
        self._due_s, self._used_s = now_s + TICK_S, used_s
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Tick no more."""
        self._timer.cancel()


async def late_ms(client: Connection, body: bytes | None, *, repeats: int = 5) -> float:
    """How late the loop's timer is called at worst while `body` is decided on: the best of some trials."""
    trials: list[float] = []
    for number in range(repeats):
        if body is not None:
            await asyncio.to_thread(client.send, _messages(body, 1000 + number))
            await asyncio.to_thread(client.recv)
        await asyncio.sleep(SETTLED_S)
        ticker = Ticker()
        if body is None:
            await asyncio.sleep(4 * SETTLED_S)
        else:
            client.send(None)
            await asyncio.to_thread(client.recv)
        await asyncio.sleep(SETTLED_S)
        ticker.stop()
        trials.append(ticker.worst_s)
    return min(trials) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0.4, 1.0, 4.0, 8.3])
    parser.add_argument("--only", nargs="*", default=list(BODIES), choices=list(BODIES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        worker = InProcess(write_policy(Path(scratch)))
        worker.load()

        async def late(bodies: dict[str, bytes]) -> dict[str, float]:
            async with client_of(worker, Path(scratch)) as client:
                found = {"idle": await late_ms(client, None)}
                for name, body in bodies.items():
                    found[name] = await late_ms(client, body)
            return found

        for megabytes in options.megabytes:
            size = int(megabytes * 1_000_000)
            bodies = {name: BODIES[name](size).encode() for name in options.only}
            found = {
                "callback": {name: asyncio.run(callback_ms(worker, body)) for name, body in bodies.items()},
                "late": uvloop.run(late(bodies)),
            }
            for measure, values in found.items():
                rounded = {name: round(value, 2) for name, value in values.items()}
                print(json.dumps({"megabytes": megabytes, f"{measure}_ms": rounded}, ensure_ascii=False))
        worker.close()


if __name__ == "__main__":
    main()
