"""A stand-in for an engine whose metrics page behaves as badly as a test wants, and pages to put on it."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from extproc.adapters.engine_probe.page import PageReader
from extproc.domain.signals import EngineSignal

RECORDED = Path(__file__).parents[1] / "data" / "engine_metrics"


def recorded(name: str) -> bytes:
    """A page of a real engine."""
    return (RECORDED / f"{name}.txt").read_bytes()


def read(page: bytes | str, *models: str, piece_bytes: int = 1 << 20) -> EngineSignal | None:
    """What a page tells, read in pieces. Raises `PageError`."""
    raw = page.encode() if isinstance(page, str) else page
    reader = PageReader(frozenset(models))
    for start in range(0, len(raw), piece_bytes):
        reader.feed(raw[start : start + piece_bytes])
    return reader.signal(7)


def told(page: bytes | str, *models: str) -> tuple[int | None, int | None, int | None]:
    """Waiting, running and used cache of a page that tells something."""
    signal = read(page, *models)
    assert signal is not None
    return signal.waiting_requests, signal.running_requests, signal.kv_used_permille


GOOD = "vllm:num_requests_waiting 3\nvllm:num_requests_running 4\nvllm:kv_cache_usage_perc 0.5\n"

MOODS = (
    *("well", "hangs", "drips", "fails", "lost", "cut", "floods", "long line", "garbage", "empty"),
    *("compressed", "redirects", "closes", "stops halfway"),
)


@dataclass(kw_only=True)
class BadEngine:
    """Answers on `address` in its `mood`. `asked` counts requests."""

    mood: str = "well"
    page: str = GOOD
    address: str = ""
    asked: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for as many requests as come."""
        self._writers.add(writer)
        try:
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /metrics "):
                self.asked += 1
                await self._say(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _say(self, writer: asyncio.StreamWriter) -> None:
        body = self.page.encode()
        match self.mood:
            case "hangs":
                await self._gone.wait()
            case "drips":
                writer.write(head(len(body)))
                for byte in body:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.2)
            case "fails":
                writer.write(head(0, status="500 Internal Server Error"))
            case "lost":
                writer.write(head(0, status="404 Not Found"))
            case "redirects":
                writer.write(head(0, "location: /elsewhere", status="302 Found"))
            case "cut":
                writer.write(head(len(body)) + body[:30])
                writer.close()
            case "stops halfway":
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + body[:26])
                writer.close()
            case "closes":
                writer.close()
            case "floods":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b"vllm:num_requests_waiting 0\n" * 4_000)
                    await writer.drain()
            case "long line":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\nvllm:num_requests_waiting{" + b"x" * 200_000 + b"} 1\n")
                writer.close()
            case "garbage":
                writer.write(b"\xff\x00" * 400)
                writer.close()
            case "empty":
                writer.write(head(0))
            case "compressed":
                packed = gzip.compress(body)
                writer.write(head(len(packed), "content-encoding: gzip") + packed)
            case _:
                writer.write(head(len(body)) + body)

    def hang_up(self) -> None:
        """Close every connection; what hung hangs no longer."""
        self._gone.set()
        self._gone = asyncio.Event()
        for writer in list(self._writers):
            writer.close()


def head(length: int, *lines: str, status: str = "200 OK") -> bytes:
    """The head of an answer."""
    return "\r\n".join((f"HTTP/1.1 {status}", f"content-length: {length}", *lines, "", "")).encode()


@asynccontextmanager
async def bad_engine(mood: str = "well", *, port: int = 0) -> AsyncIterator[BadEngine]:
    """An engine for as long as the block lasts."""
    engine = BadEngine(mood=mood)
    server = await asyncio.start_server(engine.answer, "127.0.0.1", port)
    engine.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()
        engine.hang_up()
        with suppress(TimeoutError):
            await asyncio.wait_for(server.wait_closed(), timeout=1)
