"""Where in a distributed trace a request stands, as W3C Trace Context (level 1) says it in two headers.

Both headers are typed by clients. What is not exactly as the standard has it is treated as if it were not
there: a new trace then begins, and nothing fails.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

STATE_CHARS = 512
"""The length up to which the standard asks that a trace state is passed on."""

_SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The caller's span: hexadecimal ids, whether it is recorded, and what vendors have added to it."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str | None = None


def trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """The trace context in `headers` (lower-case names), or `None` where there is no valid one."""
    value = headers.get(TRACEPARENT)
    if value is None or len(value) > 256:
        return None
    found = _SHAPE.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(
        trace_id=trace_id,
        span_id=span_id,
        sampled=bool(int(flags, 16) & 1),
        state=_state(headers.get(TRACESTATE)),
    )


def nearest(request: TraceContext | None, stream: TraceContext | None) -> TraceContext | None:
    """The closest caller: `request` came with the request, `stream` with the proxy's own call to us.

    A proxy that traces calls us from a span of its own within the request's trace, so that span is the closer
    one. A stream of another trace says nothing about this request.
    """
    if request is None or (stream is not None and stream.trace_id == request.trace_id):
        return stream
    return request


def _state(value: str | None) -> str | None:
    if value is None or not 0 < len(value) <= STATE_CHARS or not value.isascii() or not value.isprintable():
        return None
    return value
