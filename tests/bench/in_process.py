"""A whole worker in this process, fed as `grpc.aio` feeds it, but without gRPC.

The handlers that the server would be given are called with a context whose `read` and `write` cost next to
nothing. So everything that is ours runs, deserializers and the stream's task included, and nothing else does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpc import aio

from extproc.app import SWITCH_INTERVAL_S, Worker, settle_collector
from extproc.settings import Settings
from tests.bench.envoy_side import ACCESS_LOGS, PROCESS

EOF: Any = aio.EOF  # type: ignore[attr-defined]  # missing from the stubs


class Stream:
    """One stream's context: gives messages, takes answers, and ends when every message has been answered."""

    def __init__(
        self, messages: Sequence[bytes], deserialize: Callable[[bytes], Any], serialize: Any, *, answers: int
    ) -> None:
        self.answers: list[bytes] = []
        self._left = list(reversed(messages))
        self._deserialize = deserialize
        self._serialize = serialize
        self._wanted = answers
        self._answered: asyncio.Event | None = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What Envoy's own stream carries."""
        return (("user-agent", "envoy"), ("x-request-id", "1"))

    async def read(self) -> Any:
        """The next message as an object; when there is none left, wait for the answers that are due."""
        if self._left:
            return self._deserialize(self._left.pop())
        while len(self.answers) < self._wanted:
            self._answered = asyncio.Event()
            await self._answered.wait()
        return EOF

    async def write(self, answer: Any) -> None:
        """Take an answer."""
        self.answers.append(answer if self._serialize is None else self._serialize(answer))
        if self._answered is not None:
            self._answered.set()

    async def abort(self, code: Any, details: str) -> None:
        """Nothing measured here may fail."""
        raise AssertionError(f"the stream was aborted: {code} {details}")


class InProcess:
    """A worker that has loaded what it counts with and listens nowhere."""

    def __init__(self, policy: Path) -> None:
        self.worker = Worker(Settings(policy=policy, admin_port=0))
        self._process = _method(self.worker._processor.handler(), PROCESS)
        self._access_logs = _method(self.worker._access_log.handler(), ACCESS_LOGS)
        self.deserialize: Callable[[bytes], Any] = self._process.request_deserializer
        self.deserialize_record: Callable[[bytes], Any] = self._access_logs.request_deserializer

    def load(self) -> None:
        """Load the tokenizers and settle the interpreter, as a worker does before it serves."""
        worker = self.worker
        worker._counter.replace_models(worker._tokenizers.load(worker.current))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        settle_collector()

    async def exchange(self, head: bytes, body: bytes) -> bytes:
        """One exchange from its head to the end of its stream; the last answer."""
        stream = Stream((head, body), self.deserialize, self._process.response_serializer, answers=2)
        await self._process.stream_stream(None, stream)
        return stream.answers[-1]

    async def settle(self, records: Sequence[bytes]) -> None:
        """The access-log records, on one stream."""
        stream = Stream(records, self.deserialize_record, None, answers=0)
        await self._access_logs.stream_unary(None, stream)

    def close(self) -> None:
        """Stop the threads."""
        self.worker._counter.close()


def _method(handler: Any, name: str) -> Any:
    """What the server would find for a call of the method `name`."""
    return handler.service(SimpleNamespace(method=name, invocation_metadata=()))
