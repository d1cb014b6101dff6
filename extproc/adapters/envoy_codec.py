"""Envoy's messages to events, and answers to Envoy's messages. Protobuf stops here.

Answers leave as bytes. Most of them never change, so they are serialized once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from extproc.adapters.envoy_parts import dynamic_metadata, immediate_response, set_headers
from extproc.exchange.events import (
    Answer,
    BodyMode,
    Continue,
    Echo,
    Event,
    Phase,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
)

_BODY_MODES: Mapping[int, BodyMode] = {
    ProcessingMode.NONE: BodyMode.NONE,
    ProcessingMode.STREAMED: BodyMode.STREAMED,
    ProcessingMode.BUFFERED: BodyMode.BUFFERED,
    ProcessingMode.BUFFERED_PARTIAL: BodyMode.BUFFERED_PARTIAL,
    ProcessingMode.FULL_DUPLEX_STREAMED: BodyMode.FULL_DUPLEX_STREAMED,
}
_MODE_NUMBERS: Mapping[BodyMode, int] = {mode: number for number, mode in _BODY_MODES.items()}

_PHASE_FIELDS: Mapping[Phase, str] = {
    Phase.REQUEST_HEADERS: "request_headers",
    Phase.REQUEST_BODY: "request_body",
    Phase.REQUEST_TRAILERS: "request_trailers",
    Phase.RESPONSE_HEADERS: "response_headers",
    Phase.RESPONSE_BODY: "response_body",
    Phase.RESPONSE_TRAILERS: "response_trailers",
}


class UnknownBodyMode(ValueError):
    """Envoy announced a body mode that this service does not speak; the filter's configuration must change."""


_BODY_TAG = pb.ProcessingRequest.REQUEST_BODY_FIELD_NUMBER << 3 | 2
_DATA_TAG = pb.HttpBody.BODY_FIELD_NUMBER << 3 | 2
_ENDED = bytes((pb.HttpBody.END_OF_STREAM_FIELD_NUMBER << 3, 1))
_LONG_BYTES = 64 * 1024


def message_of(data: bytes) -> Any:
    """What Envoy sent: a `ProcessingRequest`, or the event itself where it is a long body and nothing else.

    Protobuf copies a body twice until it is there, and every megabyte takes the event loop's time.
    """
    if len(data) > _LONG_BYTES and data[0] == _BODY_TAG:
        body_bytes, start = _varint(data, 1)
        if data[start] == _DATA_TAG and start + body_bytes == len(data):
            data_bytes, start = _varint(data, start + 1)
            end = start + data_bytes
            if end == len(data) or (end + len(_ENDED) == len(data) and data.endswith(_ENDED)):
                return RequestBody(data=data[start:end], end_of_stream=end < len(data))
    return pb.ProcessingRequest.FromString(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this place, of at most five bytes, and where it ends; 0 if it is none."""
    number = 0
    for index in range(5):
        number |= (data[at + index] & 0x7F) << 7 * index
        if data[at + index] < 0x80:
            return number, at + index + 1
    return 0, at


def event_of(message: Any, *, message_timeout_ms: int | None = None) -> Event | None:
    """The event that a `ProcessingRequest` reports; `None` for a message of a kind that is not known.

    `message_timeout_ms` is what the stream's Envoy has said about itself, if it has. Raises `UnknownBodyMode`.
    """
    if type(message) is RequestBody:
        return message
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        return _request_headers(message, message_timeout_ms)
    if kind == "request_body":
        body = message.request_body
        return RequestBody(data=body.body, end_of_stream=body.end_of_stream)
    if kind == "request_trailers":
        return RequestTrailers()
    if kind == "response_headers":
        full_duplex = message.HasField("protocol_config") and (
            message.protocol_config.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
        )
        return ResponseHeaders(full_duplex=full_duplex)
    if kind == "response_body":
        body = message.response_body
        return ResponseBody(data=body.body, end_of_stream=body.end_of_stream)
    if kind == "response_trailers":
        return ResponseTrailers()
    return None


def _request_headers(message: Any, message_timeout_ms: int | None) -> RequestHeaders:
    head = message.request_headers
    headers: dict[str, str] = {}
    for header in head.headers.headers:
        # Envoy fills raw_value; value is for the older protocol and for tools.
        raw = header.raw_value
        value = raw.decode("utf-8", "surrogateescape") if raw else header.value
        key = header.key
        if key in headers:
            value = f"{headers[key]},{value}"
        headers[key] = value
    body_mode = response_body_mode = BodyMode.BUFFERED
    body_unasked = False
    if message.HasField("protocol_config"):
        config = message.protocol_config
        body_mode = _body_mode(config.request_body_mode)
        response_body_mode = _body_mode(config.response_body_mode)
        body_unasked = config.send_body_without_waiting_for_header_response and body_mode is BodyMode.STREAMED
    else:
        response_body_mode = BodyMode.NONE
    metadata: dict[str, Any] = {}
    if message.HasField("metadata_context"):
        for namespace, struct in message.metadata_context.filter_metadata.items():
            metadata[namespace] = _plain(struct)
    return RequestHeaders(
        method=headers.get(":method", ""),
        path=headers.get(":path", ""),
        headers=headers,
        end_of_stream=head.end_of_stream,
        body_mode=body_mode,
        response_body_mode=response_body_mode,
        body_unasked=body_unasked,
        observe_only=message.observability_mode,
        message_timeout_ms=message_timeout_ms,
        metadata=metadata,
    )


def _body_mode(number: int) -> BodyMode:
    mode = _BODY_MODES.get(number)
    if mode is None:
        raise UnknownBodyMode(
            f"processing_mode.request_body_mode {number} is not supported; use BUFFERED in the ext_proc filter"
        )
    return mode


def _plain(struct: Any) -> Any:
    """A protobuf Struct or Value as plain Python values."""
    if isinstance(struct, struct_pb2.Struct):
        return {key: _plain(value) for key, value in struct.fields.items()}
    kind = struct.WhichOneof("kind")
    if kind == "struct_value":
        return _plain(struct.struct_value)
    if kind == "list_value":
        return [_plain(value) for value in struct.list_value.values]
    return None if kind in (None, "null_value") else getattr(struct, kind)


def bytes_of(answer: Answer) -> bytes:
    """The `ProcessingResponse` that says `answer`, serialized."""
    match answer:
        case Continue(phase=phase, ask_body=ask_body, response_body_mode=mode):
            return _continue(phase, ask_body, mode)
        case Route():
            return _route(answer)
        case Echo():
            return _echo(answer)
        case Refuse():
            return _refuse(answer)


@lru_cache(maxsize=64)
def _continue(phase: Phase, ask_body: bool, response_body_mode: BodyMode) -> bytes:
    response = pb.ProcessingResponse()
    getattr(response, _PHASE_FIELDS[phase]).SetInParent()
    if ask_body:
        mode = response.mode_override
        mode.request_body_mode = ProcessingMode.BUFFERED
        # Body modes in an override are absolute: what is not restated is switched off.
        mode.response_body_mode = _MODE_NUMBERS[response_body_mode]
        # Response trailers keep the stream open until the HTTP stream ends, in every Envoy since 1.36; request
        # trailers tell where the body ends if Envoy does not buffer it.
        mode.response_trailer_mode = ProcessingMode.SEND
        mode.request_trailer_mode = ProcessingMode.SEND
    serialized: bytes = response.SerializeToString()
    return serialized


@lru_cache(maxsize=16)
def _rerouted(phase_field: str) -> bytes:
    response = pb.ProcessingResponse()
    # Without this the route that was matched before the decision stays.
    getattr(response, phase_field).response.clear_route_cache = True
    serialized: bytes = response.SerializeToString()
    return serialized


def _route(route: Route) -> bytes:
    phase_field = _PHASE_FIELDS[route.phase]
    parts = [
        _rerouted(phase_field),
        set_headers(phase_field, route.set_headers),
        dynamic_metadata(route.decision, route.endpoint),
    ]
    if route.remove_headers or route.body is not None:
        response = pb.ProcessingResponse()
        common = getattr(response, phase_field).response
        common.header_mutation.remove_headers.extend(route.remove_headers)
        if route.body is not None:
            common.body_mutation.body = route.body
        parts.append(response.SerializeToString())
    return b"".join(parts)


def _echo(echo: Echo) -> bytes:
    response = pb.ProcessingResponse()
    streamed = getattr(response, _PHASE_FIELDS[echo.phase]).response.body_mutation.streamed_response
    streamed.body = echo.data
    streamed.end_of_stream = echo.end_of_stream
    serialized: bytes = response.SerializeToString()
    return serialized


def _refuse(refuse: Refuse) -> bytes:
    details = f"extproc_{refuse.decision.reason}"
    return immediate_response(
        refuse.status, refuse.headers, orjson.dumps(refuse.body), details=details
    ) + dynamic_metadata(refuse.decision, None)
