"""What can happen to an exchange, and what it asks for in return. Frozen values; no protobuf, no await."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum, auto
from typing import Any

from extproc.dialects.body import Body, BodyRead, BodyRefused
from extproc.domain.decision import Decision
from extproc.domain.frozen import frozen
from extproc.domain.prompt import AtLeast, Counted, CountFailed, Prompt
from extproc.domain.reservation import Denied, Granted, Reservation, Unavailable
from extproc.domain.trace_context import TraceContext


class BodyMode(Enum):
    """How Envoy announced that it will send a body (`protocol_config`)."""

    NONE = auto()
    STREAMED = auto()
    BUFFERED = auto()
    BUFFERED_PARTIAL = auto()
    FULL_DUPLEX_STREAMED = auto()

    __hash__ = object.__hash__  # members are singletons


# Events: what happened on the stream.


@frozen
class RequestHeaders:
    """The request's head. Header names are lower-case; repeated headers are joined by a comma.

    `body_unasked` is true when body messages follow without waiting for the answer to this one.
    `metadata` is Envoy's dynamic metadata by namespace. `observe_only`: Envoy ignores all answers.
    `message_timeout_ms` is how long Envoy waits for the answer to one message, if it is known.
    `stream_trace` is the span of Envoy's own from which it calls us, where it traces.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    end_of_stream: bool
    body_mode: BodyMode = BodyMode.BUFFERED
    response_body_mode: BodyMode = BodyMode.NONE
    body_unasked: bool = False
    observe_only: bool = False
    message_timeout_ms: int | None = None
    metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stream_trace: TraceContext | None = None


@frozen
class RequestBody:
    """A piece of the request's body, or all of it."""

    data: bytes
    end_of_stream: bool


@frozen
class RequestTrailers:
    """The request has trailers; its body is complete."""


@frozen
class ResponseHeaders:
    """A response begins: the engine's, or a local reply of Envoy's own, at any time."""

    full_duplex: bool = False


@frozen
class ResponseBody:
    """A piece of the response's body (only seen where somebody configured Envoy to send it)."""

    data: bytes
    end_of_stream: bool


@frozen
class ResponseTrailers:
    """The response has trailers."""


@frozen
class StreamEnded:
    """The stream is gone, for whatever reason: answered, client left, Envoy left. Comes last."""


@frozen
class DrainBegan:
    """The service is about to stop."""


@frozen
class Faulted:
    """Something failed that should not have. `detail` names the fault, never its data."""

    detail: str


Event = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | StreamEnded
    | DrainBegan
    | Faulted
    | BodyRead
    | BodyRefused
    | Counted
    | AtLeast
    | CountFailed
    | Granted
    | Denied
    | Unavailable
)


# Answers: messages to Envoy, each the answer to one of its own.


class Phase(Enum):
    """The message of Envoy's that an answer belongs to."""

    REQUEST_HEADERS = auto()
    REQUEST_BODY = auto()
    REQUEST_TRAILERS = auto()
    RESPONSE_HEADERS = auto()
    RESPONSE_BODY = auto()
    RESPONSE_TRAILERS = auto()

    __hash__ = object.__hash__  # members are singletons


@frozen
class Continue:
    """Go on unchanged. `ask_body` asks Envoy to buffer the request's body and to keep the stream open.

    `response_body_mode` restates the announced mode, because body modes in an override are absolute.
    """

    phase: Phase
    ask_body: bool = False
    response_body_mode: BodyMode = BodyMode.NONE


@frozen
class Route:
    """Send the request to a pool: the answer to `phase` sets and removes headers and re-routes.

    `body` replaces the body that this answer answers; `None` leaves it as it is.
    """

    phase: Phase
    set_headers: tuple[tuple[str, str], ...]
    remove_headers: tuple[str, ...]
    endpoint: str | None
    decision: Decision
    body: bytes | None = None


@frozen
class Echo:
    """Give a piece of a full-duplex body back, as it must be."""

    phase: Phase
    data: bytes
    end_of_stream: bool


@frozen
class Refuse:
    """Answer the client from here. Nothing is sent on the stream after it."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: Mapping[str, Any]
    decision: Decision


Answer = Continue | Route | Echo | Refuse


# Effects: what the shell must do.


@frozen
class Send:
    """Send one answer to Envoy, in the order of the effects."""

    answer: Answer


@frozen
class ReadBody:
    """Read a body that is too long to be read at once, and understand it.

    The answer is an event, even if the stream ends meanwhile: what it asks for, that it is refused, or, where it
    could not be read for want of time, a `CountFailed`.
    """

    body: Body
    tenant: str


@frozen
class CountTokens:
    """Ask the token counter. Its answer is an event, even if the stream ends meanwhile."""

    model: str
    prompt: Prompt
    limit_tokens: int
    tenant: str


@frozen
class Reserve:
    """Ask the ledger. Its answer is an event, at once or after a wait, even if the stream ends meanwhile."""

    reservation: Reservation


@frozen
class Withdraw:
    """Nobody waits for the ledger's answer any more: give up the place in line. The answer still comes, soon."""

    lease_id: str


@frozen
class Release:
    """Give the lease back: its stream has ended. If it is `unused` no engine has seen it, so nothing is owed."""

    lease_id: str
    unused: bool = False


@frozen
class CloseStream:
    """End the stream. Cleanly, Envoy goes on with the request as it is; failed, it does not."""

    failed: bool = False


@frozen
class Observe:
    """Tell whoever watches what was decided."""

    decision: Decision


Effect = Send | ReadBody | CountTokens | Reserve | Withdraw | Release | CloseStream | Observe
