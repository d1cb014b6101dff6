"""Whoever disturbs, as a process of its own: `python -m tests.bench.disturb KIND TARGET`.

So that the client whose latencies are measured shares a core with it at most, and no event loop. It says `ready`
when it is connected, sends until its standard input ends, and says how often it was answered how, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

from tests.bench.envoy_side import EnvoySide, body_message, chat_body, head_message
from tests.bench.processes import Server
from tests.bench.prompts import prompt
from tests.bench.requests import Make

STORM_PER_S = 500
DOCUMENTS_PER_S = 10
HOSTILE_PER_S = 2
HOSTILE_CHARS = 200_000
CLIENTS = 50
STOP_TIMEOUT_S = 60
NICE = 5
"""The client whose latencies are measured goes first."""


def storm() -> Make:
    """Clients as SDKs are that do not wait: the same body again at once, with the number of the attempt."""
    bodies = [chat_body(prompt(290, seed=seed), seed=seed) for seed in range(CLIENTS)]

    def make(number: int) -> tuple[bytes, bytes]:
        attempt, client = divmod(number, len(bodies))
        more = {"x-stainless-retry-count": str(min(attempt, 9)), "x-forwarded-for": f"10.1.0.{client}"}
        body = bodies[client]
        return head_message(len(body), tenant="pauper", more=more), body_message(body)

    return make


def documents() -> Make:
    """Documents of 100k tokens, each new to every cache."""
    text = prompt(100_000)

    def make(number: int) -> tuple[bytes, bytes]:
        body = body_message(chat_body(f"{number} {time.monotonic_ns()} {text}"))
        return head_message(len(body)), body

    return make


def hostile() -> Make:
    """Texts that are hard on regular expressions and merges, of a tenant that may not even have them answered."""
    chance = random.Random(1)
    texts = [
        "a" * HOSTILE_CHARS,
        " " * HOSTILE_CHARS,
        "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(HOSTILE_CHARS)),
        "".join(chr(chance.randrange(0x20, 0xD7FF)) for _ in range(HOSTILE_CHARS)),
        "e" + "\u0301" * HOSTILE_CHARS,
    ]

    def make(number: int) -> tuple[bytes, bytes]:
        body = body_message(chat_body(f"{number} {time.monotonic_ns()} {texts[number % len(texts)]}"))
        return head_message(len(body), tenant="pauper"), body

    return make


KINDS: dict[str, tuple[Callable[[], Make], float]] = {
    "storm": (storm, STORM_PER_S),
    "documents": (documents, DOCUMENTS_PER_S),
    "hostile": (hostile, HOSTILE_PER_S),
}


@contextmanager
def disturbed(server: Server, kind: str) -> Iterator[Counter[str]]:
    """Disturb the server until the block ends; the answers are there afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.disturb", kind, server.target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    answers: Counter[str] = Counter()
    try:
        assert process.stdout.readline() == "ready\n"
        yield answers
        said, _ = process.communicate(timeout=STOP_TIMEOUT_S)
        answers.update(json.loads(said))
    finally:
        process.kill()
        process.wait()


def _reason(answer: bytes) -> str:
    response = pb.ProcessingResponse.FromString(answer)
    if not response.HasField("immediate_response"):
        return "admitted"
    return str(response.immediate_response.details.removeprefix("extproc_"))


async def pour(target: str, make: Make, rate_per_s: float) -> Counter[str]:
    """Exchanges on a clock until the standard input ends; how they were answered."""
    side = EnvoySide(target)
    await side.ready()
    print("ready", flush=True)
    answers: Counter[str] = Counter()
    running: set[asyncio.Task[None]] = set()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    async def one(number: int) -> None:
        with suppress(aio.AioRpcError):
            answers[_reason((await side.exchange(*make(number))).answer)] += 1

    start, number = time.perf_counter(), 0
    while not ended.done():
        number += 1
        task = asyncio.create_task(one(number))
        running.add(task)
        task.add_done_callback(running.discard)
        await asyncio.wait([ended], timeout=max(0.0, start + number / rate_per_s - time.perf_counter()))
    await asyncio.gather(*running)
    await side.close()
    return answers


def main() -> None:
    """Disturb."""
    os.nice(NICE)
    make, rate_per_s = KINDS[sys.argv[1]]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(pour(sys.argv[2], make(), rate_per_s))))


if __name__ == "__main__":
    main()
