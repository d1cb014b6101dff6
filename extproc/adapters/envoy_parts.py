"""Parts of answers to Envoy, serialized one by one, so that parts which many answers share are made once.

A serialized protobuf message is nothing but its fields one after the other, and messages that are concatenated
merge (https://protobuf.dev/programming-guides/encoding/#last-one-wins). So an answer is the parts that never
change, made by protobuf, followed by these: headers to set, and the decision as dynamic metadata. Field numbers
come from the descriptors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from extproc.adapters.envoy_names import ADMISSION_NAMESPACE, DESTINATION_KEY, DESTINATION_NAMESPACE
from extproc.domain.decision import Decision

SCHEMA_VERSION = 1
"""Version of the decision's fields in dynamic metadata (`protos/extproc/admission/v1`)."""

_LENGTH_DELIMITED = 2
_ONE_BYTE = 0x80


def _tag(message: Any, field: str) -> bytes:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return _varint(number << 3 | _LENGTH_DELIMITED)


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number >= _ONE_BYTE:
        groups.append(number & 0x7F | _ONE_BYTE)
        number >>= 7
    groups.append(number)
    return bytes(groups)


_SIZES = tuple(_varint(size) for size in range(1024))


def _field(tag: bytes, payload: bytes) -> bytes:
    size = len(payload)
    return tag + (_SIZES[size] if size < len(_SIZES) else _varint(size)) + payload


_SET_HEADERS = _tag(pb.HeaderMutation, "set_headers")
_HEADER = _tag(HeaderValueOption, "header")
_KEY = _tag(HeaderValue, "key")
_RAW_VALUE = _tag(HeaderValue, "raw_value")
_HEADER_MUTATION = _tag(pb.CommonResponse, "header_mutation")
_RESPONSES = {
    "request_headers": (_tag(pb.ProcessingResponse, "request_headers"), _tag(pb.HeadersResponse, "response")),
    "request_body": (_tag(pb.ProcessingResponse, "request_body"), _tag(pb.BodyResponse, "response")),
}


@lru_cache(maxsize=4096)
def _header(name: str, value: str) -> bytes:
    # Envoy drops `value` and ignores `append_action`: raw bytes, and the default, which overwrites.
    pair = _field(_KEY, name.encode()) + _field(_RAW_VALUE, value.encode())
    return _field(_SET_HEADERS, _field(_HEADER, pair))


def _mutation(headers: Iterable[tuple[str, str]]) -> bytes:
    return b"".join([_header(name, value) for name, value in headers])


def set_headers(phase_field: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """The part of a `ProcessingResponse` that sets request headers, in the answer to the named message."""
    answer, common = _RESPONSES[phase_field]
    return _field(answer, _field(common, _field(_HEADER_MUTATION, _mutation(headers))))


@lru_cache(maxsize=256)
def _local_reply(status: int, details: str) -> bytes:
    immediate = pb.ImmediateResponse(details=details)
    immediate.status.code = status
    serialized: bytes = immediate.SerializeToString()
    return serialized


def immediate_response(
    status: int, headers: Iterable[tuple[str, str]], body: bytes, *, details: str
) -> bytes:
    """The part of a `ProcessingResponse` that answers the client from here."""
    reply = _local_reply(status, details)
    reply += _field(_REPLY_HEADERS, _mutation(headers)) + _field(_REPLY_BODY, body)
    return _field(_IMMEDIATE_RESPONSE, reply)


_IMMEDIATE_RESPONSE = _tag(pb.ProcessingResponse, "immediate_response")
_REPLY_HEADERS = _tag(pb.ImmediateResponse, "headers")
_REPLY_BODY = _tag(pb.ImmediateResponse, "body")
_DYNAMIC_METADATA = _tag(pb.ProcessingResponse, "dynamic_metadata")
_FIELDS = _tag(struct_pb2.Struct, "fields")
_MAP_KEY, _MAP_VALUE = b"\x0a", b"\x12"  # of every map entry
_STRING_VALUE = _tag(struct_pb2.Value, "string_value")
_STRUCT_VALUE = _tag(struct_pb2.Value, "struct_value")


def _text(name: str, text: str) -> bytes:
    value = _field(_STRING_VALUE, text.encode())
    return _field(_FIELDS, _field(_MAP_KEY, name.encode()) + _field(_MAP_VALUE, value))


_TEXTS = (
    *("decision", "reason", "tenant", "tier", "model", "lane", "pool", "replica", "dialect", "fallback"),
    "policy_version",
)
_texts_of = attrgetter("outcome", *_TEXTS[1:])


@lru_cache(maxsize=4096)
def _texts(texts: tuple[str | None, ...]) -> bytes:
    return b"".join([_text(name, text) for name, text in zip(_TEXTS, texts, strict=True) if text is not None])


@lru_cache(maxsize=64)
def _number_prefix(name: str) -> bytes:
    """All of a number's entry but its last eight bytes, which are the number."""
    entry = _field(_MAP_KEY, name.encode())
    entry += _field(_MAP_VALUE, struct_pb2.Value(number_value=0.0).SerializeToString())
    return _field(_FIELDS, entry)[:-8]


_double = struct.Struct("<d").pack


@lru_cache(maxsize=4096)
def _destination(address: str) -> bytes:
    values = struct_pb2.Struct()
    values.fields[DESTINATION_NAMESPACE].struct_value.fields[DESTINATION_KEY].string_value = address
    return values.SerializeToString()


def dynamic_metadata(decision: Decision, address: str | None) -> bytes:
    """The part of a `ProcessingResponse` that carries the decision, and where the request should go.

    The decision is `extproc.admission.v1.Decision` in its JSON form with proto field names.
    """
    reserved_tokens = None
    if decision.input_tokens is not None and decision.output_tokens is not None:
        reserved_tokens = decision.input_tokens + decision.output_tokens
    parts = [_texts(_texts_of(decision)), _text("reservation", decision.lease_id)]
    parts += [
        _number_prefix(name) + _double(number)
        for name, number in (
            ("schema_version", SCHEMA_VERSION),
            ("input_tokens", decision.input_tokens),
            ("output_tokens", decision.output_tokens),
            ("reserved_tokens", reserved_tokens),
            ("work_units", decision.work_units),
            ("deadline_ms", decision.deadline_ms),
            ("predicted_ttft_ms", decision.predicted_ttft_ms),
            ("retry_after_ms", decision.retry_after_ms),
            ("waited_ms", decision.waited_ms),
        )
        if number is not None
    ]
    struct_value = _field(_STRUCT_VALUE, b"".join(parts))
    namespace = _field(_FIELDS, _ADMISSION_KEY + _field(_MAP_VALUE, struct_value))
    if address is not None:
        namespace += _destination(address)
    return _field(_DYNAMIC_METADATA, namespace)


_ADMISSION_KEY = _field(_MAP_KEY, ADMISSION_NAMESPACE.encode())
