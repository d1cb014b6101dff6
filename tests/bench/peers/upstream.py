"""The one upstream of all peers: a server that answers chat completions at once and costs next to nothing.

It knows two words in a prompt. `[hold N]` delays the answer by N milliseconds; `[drip]` makes a streamed answer last
two minutes, one event every 500 ms. `GET /stats` tells how many answers are open, the most that ever were, and how
many ended in each way; `POST /stats` starts those over.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

HOLD = re.compile(rb"\[hold (\d+)\]")
DRIP = b"[drip]"
STREAM = re.compile(rb'"stream" ?: ?true')
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
DRIP_EVERY_S = 0.5
DRIP_EVENTS = 240


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """As OpenAI writes it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


class Answers:
    """The bytes of every answer, made once."""

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        whole = {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 1,
            "model": "default",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "word " * output_tokens},
                    "finish_reason": "length",
                }
            ],
            "usage": usage(prompt_tokens, output_tokens),
        }
        self.whole = response(json.dumps(whole).encode())
        self.models = response(
            json.dumps({"object": "list", "data": [{"id": "default", "object": "model"}]}).encode()
        )
        self.head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.event = self._event({"content": "word "})
        self.last = self._event({}, usage(prompt_tokens, output_tokens)) + chunk(b"data: [DONE]\n\n")
        self.end = b"0\r\n\r\n"

    @staticmethod
    def _event(delta: dict[str, str], used: dict[str, int] | None = None) -> bytes:
        event: dict[str, Any] = {
            "id": "chatcmpl-0",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "default",
            "choices": [{"index": 0, "delta": delta, "finish_reason": "length" if used else None}],
        }
        return chunk(b"data: " + json.dumps(event | ({"usage": used} if used else {})).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def response(body: bytes) -> bytes:
    """A whole JSON answer."""
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )


class Stats:
    """Open answers, and how they ended."""

    def __init__(self) -> None:
        self.open = 0
        self.reset()

    def reset(self) -> None:
        """Start over; what is open stays open."""
        self.peak = self.open
        self.finished = 0
        self.cut_off = 0

    def began(self) -> None:
        """One more is open."""
        self.open += 1
        self.peak = max(self.peak, self.open)

    def ended(self, *, whole: bool) -> None:
        """One less is open."""
        self.open -= 1
        self.finished += whole
        self.cut_off += not whole


class Connection(asyncio.Protocol):
    """One client connection: requests one after another."""

    def __init__(self, answers: Answers, stats: Stats) -> None:
        self._answers = answers
        self._stats = stats
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._answering = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """It left; an answer under way is cut off."""
        if self._timer is not None:
            self._timer.cancel()
        if self._answering:
            self._answering = False
            self._stats.ended(whole=False)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of the next one while the last is still being answered."""
        self._buffer += data
        if not self._answering:
            self._next()

    def _next(self) -> None:
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._buffer[:head_end])
        begin = head_end + 4
        length = LENGTH.search(head)
        if CHUNKED.search(head):
            end = self._buffer.find(b"0\r\n\r\n", begin)
            if end < 0:
                return
            end += 5
        else:
            end = begin + (int(length[1]) if length else 0)
        if len(self._buffer) < end:
            return
        body = bytes(self._buffer[begin:end])
        del self._buffer[:end]
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if b" /stats" in head[:16]:
            if head.startswith(b"POST"):
                self._stats.reset()
            self._transport.write(response(json.dumps(vars(self._stats)).encode()))
            self._next()
        elif not head.startswith(b"POST"):
            self._transport.write(self._answers.models)
            self._next()
        else:
            self._stats.began()
            self._answering = True
            if STREAM.search(body):
                self._transport.write(self._answers.head)
                self._drip(DRIP_EVENTS if DRIP in body else 2)
            elif hold := HOLD.search(body):
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(int(hold[1]) / 1000, self._finish, self._answers.whole)
            else:
                self._finish(self._answers.whole)

    def _drip(self, events: int) -> None:
        if events == 0:
            self._finish(self._answers.last + self._answers.end)
            return
        self._transport.write(self._answers.event)
        delay_s = DRIP_EVERY_S if events > 2 else 0
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._drip, events - 1)

    def _finish(self, data: bytes) -> None:
        self._timer = None
        self._answering = False
        self._stats.ended(whole=True)
        self._transport.write(data)
        self._next()


async def serve(prompt_tokens: int, output_tokens: int) -> None:
    """Listen on a free port, say which, and serve until standard input closes."""
    answers, stats = Answers(prompt_tokens, output_tokens), Stats()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers, stats), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


class Upstream:
    """A running upstream."""

    def __init__(self, url: str) -> None:
        self.url = url

    def stats(self) -> dict[str, int]:
        """What is open, the most that ever was, and how answers ended."""
        with urllib.request.urlopen(f"{self.url}/stats", timeout=10) as answer:
            stats: dict[str, int] = json.loads(answer.read())
            return stats

    def reset(self) -> None:
        """Start the counts over."""
        request = urllib.request.Request(f"{self.url}/stats", data=b"", method="POST")
        with urllib.request.urlopen(request, timeout=10):
            pass


@contextmanager
def running_upstream(*, prompt_tokens: int, output_tokens: int) -> Iterator[Upstream]:
    """Run the upstream as a process of its own; it says these amounts in every `usage`."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(prompt_tokens), str(output_tokens)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield Upstream(process.stdout.readline().strip())
    finally:
        process.stdin.close()
        process.wait(timeout=10)
        process.stdout.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as main_runner:
        main_runner.run(serve(int(sys.argv[1]), int(sys.argv[2])))
