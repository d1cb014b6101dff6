"""How long does one request keep the event loop from everybody else? Large and hostile bodies of all kinds.

    python -m tests.bench.loop_block [--megabytes N]

Each body goes through a whole worker in this process, and every callback of the event loop is timed: the longest
is how long nobody else was served. Processor time of the loop's thread, so that a busy machine does not show.
gRPC's own copies of a message are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.envoy_side import body_message, head_message
from tests.bench.in_process import InProcess
from tests.bench.prompts import POLICY, model_directory

CHAT = '{"model":"tiny","max_tokens":10,"messages":[%s]}'
MESSAGE = '{"role":"user","content":"%s"}'
UNKNOWN = '{"model":"tiny","max_tokens":10,"messages":[{"role":"user","content":"x"}],"x":%s}'
STRING = '"ab"'
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


async def longest_ms(worker: InProcess, body: bytes, *, repeats: int = 3) -> float:
    """The longest callback while `body` is decided on: the best of some trials."""
    path = "/v1/completions" if b'"prompt":[' in body[:64] else "/v1/chat/completions"
    trials: list[int] = []
    for number in range(repeats):
        body = b'{"user":"%d",' % number + body.lstrip()[1:]  # else it would be refused as a hasty retry
        longest_ns = [0]
        with timed_callbacks(longest_ns):
            messages = (head_message(len(body), path=path), body_message(body))
            answer = await asyncio.create_task(worker.exchange(*messages))  # a callback of its own
        trials.append(longest_ns[0])
        del answer
    return min(trials) / 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0.4, 1.0, 4.0])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        policy = Path(scratch) / "policy.yaml"
        policy.write_text(POLICY.format(tokenizer=model_directory() / "tokenizer.json"))
        worker = InProcess(policy)
        worker.load()
        for megabytes in options.megabytes:
            size = int(megabytes * 1_000_000)
            found = {
                name: round(asyncio.run(longest_ms(worker, make(size).encode())), 2)
                for name, make in BODIES.items()
            }
            print(json.dumps({"megabytes": megabytes, "longest_callback_ms": found}, ensure_ascii=False))
        worker.close()


if __name__ == "__main__":
    main()
