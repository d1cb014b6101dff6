"""Envoy's side of ext_proc: builds the messages that Envoy sends and drives exchanges against a server.

Messages are serialized once and sent as bytes, so that the generator costs as little as it can: what is
measured is the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

from extproc.adapters.envoy_names import LOG_BATCH_BYTES, LOG_BATCH_MS

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

IMMEDIATE = b"\x3a"
"""How a `ProcessingResponse` with an immediate response begins: its field 7. Envoy ends the stream after it."""

START_TIMEOUT_S = 240
"""Two workers that load a large vocabulary on a core that others use as well take their time."""

_REQUEST_IDS = itertools.count()


def chat_body(
    prompt: str,
    *,
    model: str = "tiny",
    max_tokens: int = 100,
    stream: bool = False,
    seed: int | None = None,
) -> bytes:
    """A chat completion request with one user turn. Another `seed` makes another body of the same prompt."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    if seed is not None:
        fields["seed"] = seed
    return json.dumps(fields).encode()


def conversation_body(said: Sequence[str], *, model: str = "tiny", max_tokens: int = 100) -> bytes:
    """A chat completion request with the turns of user and assistant that were said so far."""
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(said)
    ]
    return json.dumps({"model": model, "messages": messages, "max_tokens": max_tokens}).encode()


def head_message(
    body_bytes: int,
    *,
    path: str = "/v1/chat/completions",
    tenant: str = "acme",
    more: Mapping[str, str] | None = None,
) -> bytes:
    """The request_headers message of a POST, with the headers that a browser-facing Envoy forwards.

    `more` adds headers, or puts others in their place.
    """
    message = pb.ProcessingRequest()
    headers = {
        ":authority": "llm.example.com",
        ":path": path,
        ":method": "POST",
        ":scheme": "https",
        "accept": "application/json",
        "content-type": "application/json",
        "content-length": str(body_bytes),
        "user-agent": "OpenAI/Python 3.57.0",
        "x-tenant": tenant,
        "x-stainless-retry-count": "0",
        "x-stainless-read-timeout": "600",
        "x-forwarded-for": "10.0.0.1",
        "x-forwarded-proto": "https",
        "x-request-id": f"9f1c8a52-0000-4000-8000-{next(_REQUEST_IDS):012x}",
    } | dict(more or {})
    message.request_headers.headers.headers.extend(
        HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()
    )
    message.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    serialized: bytes = message.SerializeToString()
    return serialized


def body_message(body: bytes) -> bytes:
    """The request_body message of a buffered body."""
    message = pb.ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = True
    serialized: bytes = message.SerializeToString()
    return serialized


def access_log_message(answer: bytes, *, output_tokens: int) -> bytes | None:
    """The access-log record of an exchange whose last answer was `answer`; `None` if it was not admitted."""
    response = pb.ProcessingResponse.FromString(answer)
    if not response.HasField("request_body") or not response.HasField("dynamic_metadata"):
        return None
    message = als_pb2.StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    entry.response.response_code.value = 200
    metadata = entry.common_properties.metadata.filter_metadata
    for namespace, value in response.dynamic_metadata.fields.items():
        metadata[namespace].CopyFrom(value.struct_value)
    usage = metadata["extproc.usage"].fields
    admission = metadata["extproc.admission"].fields
    usage["input_tokens"].number_value = admission["input_tokens"].number_value
    usage["output_tokens"].number_value = output_tokens
    serialized: bytes = message.SerializeToString()
    return serialized


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """How one exchange went: microseconds from the last message's sending to its answer, when it came, and it."""

    decision_us: int
    answered_s: float
    answer: bytes

    @property
    def refused(self) -> bool:
        """Whether the client was answered instead of the request being let through."""
        return self.answer.startswith(IMMEDIATE)


class EnvoySide:
    """A client that speaks as Envoy does: one stream per request, and one stream of access logs."""

    def __init__(self, target: str) -> None:
        options = [
            ("grpc.max_send_message_length", 64 << 20),
            ("grpc.max_receive_message_length", 64 << 20),
            # A server that is still starting is asked again soon, not after gRPC's minutes.
            ("grpc.min_reconnect_backoff_ms", 200),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        self._channel = aio.insecure_channel(target, options=options)
        self._process: Any = self._channel.stream_stream(PROCESS, None, None)
        self._access_logs: Any = self._channel.stream_unary(ACCESS_LOGS, None, None)
        self._log_stream: Any = None
        self._log_turn = asyncio.Lock()
        self._records = bytearray()
        self._flushing: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until the server listens."""
        await asyncio.wait_for(self._channel.channel_ready(), timeout=START_TIMEOUT_S)

    async def exchange(
        self, head: bytes, body: bytes, *, until: Callable[[], Awaitable[object]] | None = None
    ) -> Exchanged:
        """One request from head to the end of its stream; `until` keeps the stream open meanwhile."""
        call = self._process()
        started_s = time.perf_counter()
        await call.write(head)
        answer = await call.read()
        if not answer.startswith(IMMEDIATE):
            started_s = time.perf_counter()
            await call.write(body)
            answer = await call.read()
        answered_s = time.perf_counter()
        if until is not None:
            await until()
        await call.done_writing()
        while await call.read() is not aio.EOF:  # type: ignore[attr-defined]
            pass
        return Exchanged(
            decision_us=int((answered_s - started_s) * 1e6), answered_s=answered_s, answer=answer
        )

    async def log(self, record: bytes) -> None:
        """Send an access-log record as Envoy does: with others, on the stream that stays open."""
        self._records += record  # messages one behind the other merge, and so do their lists of records
        if len(self._records) >= LOG_BATCH_BYTES:
            await self._send_records()
        elif self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_soon())

    async def _flush_soon(self) -> None:
        await asyncio.sleep(LOG_BATCH_MS / 1000)
        self._flushing = None
        await self._send_records()

    async def _send_records(self) -> None:
        async with self._log_turn:
            if not self._records:
                return
            if self._log_stream is None:
                self._log_stream = self._access_logs()
            batch, self._records = bytes(self._records), bytearray()
            await self._log_stream.write(batch)

    async def close(self) -> None:
        """End everything."""
        if self._flushing is not None:
            await self._flushing
        if self._log_stream is not None:
            await self._log_stream.done_writing()
            await self._log_stream
        await self._channel.close(None)


def await_listening(target: str) -> None:
    """Wait until a server listens, for clients that cannot."""

    async def run() -> None:
        side = EnvoySide(target)
        await side.ready()
        await side.close()

    asyncio.run(run())
