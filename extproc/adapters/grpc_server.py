"""The ext_proc service: one task per stream that reads, and writes whatever its exchange has to say.

Reading never waits for a decision: while a request is counted, reserved or held, the stream's task sits in
`read()`, so a hang-up or a local reply of Envoy's is seen at once. Answers that are ready when a message has
been handled are written by the same task; later ones by a task of their own that lives for the write.

However a stream ends (end of file, cancellation, an exception), the one `finally` tells its exchange.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio

from extproc.adapters.envoy_codec import bytes_of, event_of, message_of
from extproc.adapters.envoy_names import EXT_PROC_SERVICE, MESSAGE_TIMEOUT_HEADER
from extproc.domain.trace_context import TRACEPARENT, TRACESTATE, TraceContext, trace_context
from extproc.driver import Driver
from extproc.exchange.events import Answer, DrainBegan, RequestHeaders, StreamEnded

log = logging.getLogger(__name__)

_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # missing from the stubs

HEADROOM_BYTES = 256 * 1024
"""What a message may hold beyond the body: headers, attributes, framing."""

_STREAM_HEADERS = frozenset((MESSAGE_TIMEOUT_HEADER, TRACEPARENT, TRACESTATE))

MOST_STREAMS = 16_384
"""Every answer that is open is a stream, and so is everybody who waits."""

NewDriver = Callable[[Callable[[Answer], None], Callable[[bool], None]], Driver]
"""Makes the driver of one exchange, given how to send an answer and how to close the stream."""


def server_options(body_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments that Envoy needs; grpc's defaults break large bodies and kept-alive connections."""
    return [
        ("grpc.max_receive_message_length", body_bytes + HEADROOM_BYTES),
        ("grpc.max_send_message_length", body_bytes + HEADROOM_BYTES),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        # Beyond 1,000 streams that no handler has taken yet, gRPC cancels newcomers at random: a burst must not
        # be answered by chance.
        ("grpc.server.max_pending_requests", MOST_STREAMS),
        ("grpc.server.max_pending_requests_hard_limit", MOST_STREAMS),
        # Every open answer is a stream: a connection closed for "too many pings" would cut them all.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
    ]


class ExternalProcessor:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor`."""

    def __init__(
        self, new_driver: NewDriver, *, on_message_timeout: Callable[[int], None] | None = None
    ) -> None:
        self._new_driver = new_driver
        self._streams: set[_Stream] = set()
        self._on_message_timeout = on_message_timeout
        self._message_timeout_ms: int | None = None

    @property
    def open_streams(self) -> int:
        """Streams that are open right now."""
        return len(self._streams)

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What a `grpc.aio` server is given. Answers are serialized already, so their serializer does nothing."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=message_of,
            response_serializer=None,
        )
        return grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": process})

    async def drain(self, timeout_ms: int) -> None:
        """Tell every exchange that the service is about to stop, and wait until their streams have ended."""
        for stream in list(self._streams):
            stream.driver.receive(DrainBegan())
        deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        while self._streams and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait(
                [stream.task for stream in self._streams],
                timeout=deadline - asyncio.get_running_loop().time(),
            )

    async def _process(self, _requests: Any, context: aio.ServicerContext[Any, Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        said = _said_by_envoy(context)
        message_timeout_ms = _message_timeout_ms(said.get(MESSAGE_TIMEOUT_HEADER))
        if message_timeout_ms is not None and message_timeout_ms != self._message_timeout_ms:
            self._message_timeout_ms = message_timeout_ms
            if self._on_message_timeout is not None:
                self._on_message_timeout(message_timeout_ms)
        trace = trace_context(said) if TRACEPARENT in said else None
        stream = _Stream(context, task, self._new_driver, message_timeout_ms, trace)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            # Stream and driver know each other. Left to the collector, ended streams would make it walk through all
            # that are open, and nobody is served meanwhile.
            del stream.driver


def _said_by_envoy(context: aio.ServicerContext[Any, Any]) -> dict[str, str]:
    """What the stream's Envoy told when it opened the stream: its patience, and the span it did so from."""
    return {
        name: value
        for name, value in context.invocation_metadata() or ()
        if name in _STREAM_HEADERS and isinstance(value, str)
    }


def _message_timeout_ms(value: str | None) -> int | None:
    """The patience in milliseconds; anything but a plain number says nothing."""
    return int(value[:9]) if value is not None and value.isascii() and value.isdecimal() else None


class _Stream:
    """One stream: its reader, its outbox, and the only writer at a time."""

    def __init__(
        self,
        context: aio.ServicerContext[Any, Any],
        task: asyncio.Task[Any],
        new_driver: NewDriver,
        message_timeout_ms: int | None,
        trace: TraceContext | None,
    ) -> None:
        self.task = task
        self._message_timeout_ms = message_timeout_ms
        self._trace = trace
        self._context = context
        self._outbox: deque[bytes] = deque()
        self._writing = False
        self._handling = False
        self._flusher: asyncio.Task[None] | None = None
        self._closing: bool | None = None
        self.driver = new_driver(self._send, self._close)

    async def run(self) -> None:
        try:
            while True:
                message = await self._context.read()
                if message is _EOF:
                    return
                self._handling = True
                event = event_of(message, message_timeout_ms=self._message_timeout_ms)
                if self._trace is not None and isinstance(event, RequestHeaders):
                    event = replace(event, stream_trace=self._trace)
                if event is not None:
                    self.driver.receive(event)
                self._handling = False
                if self._outbox:
                    await self._flush()
                if self._closing is not None:
                    break
        except asyncio.CancelledError:
            # Either Envoy ended the stream, or `_close` woke us: only then is there something left to say.
            if self._closing is None:
                raise
        finally:
            self._handling = True  # whatever is sent from here on has nobody to read it
            self.driver.receive(StreamEnded())
        if self._closing:
            await self._context.abort(grpc.StatusCode.INTERNAL, "the exchange failed before it was decided")

    def _send(self, answer: Answer) -> None:
        self._outbox.append(bytes_of(answer))
        if not self._handling and not self._writing:
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    def _close(self, failed: bool) -> None:
        self._closing = failed
        if not self._handling:
            self.task.cancel()

    async def _flush(self) -> None:
        if self._writing:
            return
        self._writing = True
        try:
            while self._outbox:
                await self._context.write(self._outbox.popleft())
        except (aio.BaseError, asyncio.InvalidStateError, grpc.RpcError):
            # The stream ended under the write; the reader sees the same end and settles it.
            self._outbox.clear()
        finally:
            self._writing = False
