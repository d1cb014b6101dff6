"""The law of an exchange, as data: its states, which events are legal in each, and what may follow.

Why there are these states is told where they are lived through, in `machine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from extproc.dialects.body import BodyRead, BodyRefused
from extproc.domain.prompt import AtLeast, Counted, CountFailed
from extproc.domain.reservation import Denied, Granted, Unavailable
from extproc.exchange.events import (
    DrainBegan,
    Event,
    Faulted,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    StreamEnded,
)


class State(Enum):
    """Where an exchange is."""

    START = auto()
    READING = auto()
    PARSING = auto()
    COUNTING = auto()
    RESERVING = auto()
    FORWARDED = auto()
    PASSING = auto()
    REFUSED = auto()
    COUNTING_ALONE = auto()  # nobody waits for the decision; the reader's or the counter's answer is owed
    RESERVING_ALONE = auto()  # nobody waits for the decision; the ledger's answer is owed
    CLOSED = auto()

    __hash__ = object.__hash__  # members are singletons, and the law looks them up all the time


_S = State

TRANSITIONS: Mapping[State, Mapping[type[Event], frozenset[State]]] = {
    state: {event: frozenset(after) for event, after in row.items()}
    for state, row in {
        _S.START: {
            RequestHeaders: {_S.READING, _S.PASSING, _S.REFUSED},
            ResponseHeaders: {_S.PASSING},
            DrainBegan: {_S.START},
            Faulted: {_S.REFUSED},
            StreamEnded: {_S.CLOSED},
        },
        _S.READING: {
            RequestBody: {_S.READING, _S.PARSING, _S.COUNTING, _S.REFUSED},
            RequestTrailers: {_S.PARSING, _S.COUNTING, _S.REFUSED},
            ResponseHeaders: {_S.PASSING},
            DrainBegan: {_S.READING},
            Faulted: {_S.REFUSED},
            StreamEnded: {_S.CLOSED},
        },
        _S.PARSING: {
            BodyRead: {_S.COUNTING},
            BodyRefused: {_S.REFUSED},
            CountFailed: {_S.REFUSED},
            RequestTrailers: {_S.PARSING},
            ResponseHeaders: {_S.COUNTING_ALONE},
            DrainBegan: {_S.PARSING},
            Faulted: {_S.REFUSED},
            StreamEnded: {_S.COUNTING_ALONE},
        },
        _S.COUNTING: {
            # Counting again for a fallback's model, the next fallback follows what does not go.
            Counted: {_S.RESERVING, _S.COUNTING, _S.REFUSED},
            AtLeast: {_S.RESERVING, _S.COUNTING, _S.REFUSED},
            CountFailed: {_S.RESERVING, _S.COUNTING, _S.REFUSED},
            RequestTrailers: {_S.COUNTING},
            ResponseHeaders: {_S.COUNTING_ALONE},
            DrainBegan: {_S.COUNTING},
            Faulted: {_S.REFUSED},
            StreamEnded: {_S.COUNTING_ALONE},
        },
        _S.RESERVING: {
            Granted: {_S.FORWARDED, _S.REFUSED},
            Denied: {_S.RESERVING, _S.COUNTING, _S.REFUSED},
            Unavailable: {_S.FORWARDED, _S.REFUSED},
            RequestTrailers: {_S.RESERVING},
            ResponseHeaders: {_S.RESERVING_ALONE},
            DrainBegan: {_S.REFUSED},
            Faulted: {_S.REFUSED},
            StreamEnded: {_S.RESERVING_ALONE},
        },
        _S.FORWARDED: {
            RequestTrailers: {_S.FORWARDED},
            ResponseHeaders: {_S.FORWARDED},
            ResponseBody: {_S.FORWARDED},
            ResponseTrailers: {_S.FORWARDED},
            DrainBegan: {_S.CLOSED},
            Faulted: {_S.FORWARDED},
            StreamEnded: {_S.CLOSED},
        },
        _S.PASSING: {
            RequestBody: {_S.PASSING},
            RequestTrailers: {_S.PASSING},
            ResponseHeaders: {_S.PASSING},
            ResponseBody: {_S.PASSING},
            ResponseTrailers: {_S.PASSING},
            DrainBegan: {_S.CLOSED},
            Faulted: {_S.PASSING},
            StreamEnded: {_S.CLOSED},
        },
        # What Envoy sent before it saw the refusal, and what the ledger still owed when a fault refused.
        _S.REFUSED: {
            RequestBody: {_S.REFUSED},
            RequestTrailers: {_S.REFUSED},
            ResponseHeaders: {_S.REFUSED},
            ResponseBody: {_S.REFUSED},
            ResponseTrailers: {_S.REFUSED},
            BodyRead: {_S.REFUSED},
            BodyRefused: {_S.REFUSED},
            Counted: {_S.REFUSED},
            AtLeast: {_S.REFUSED},
            CountFailed: {_S.REFUSED},
            Granted: {_S.REFUSED},
            Denied: {_S.REFUSED},
            Unavailable: {_S.REFUSED},
            DrainBegan: {_S.REFUSED},
            Faulted: {_S.REFUSED},
            StreamEnded: {_S.CLOSED},
        },
        _S.COUNTING_ALONE: {
            BodyRead: {_S.CLOSED},
            BodyRefused: {_S.CLOSED},
            Counted: {_S.CLOSED},
            AtLeast: {_S.CLOSED},
            CountFailed: {_S.CLOSED},
            ResponseBody: {_S.COUNTING_ALONE},
            ResponseTrailers: {_S.COUNTING_ALONE},
            DrainBegan: {_S.COUNTING_ALONE},
            Faulted: {_S.COUNTING_ALONE},
            StreamEnded: {_S.COUNTING_ALONE},
        },
        _S.RESERVING_ALONE: {
            Granted: {_S.CLOSED},
            Denied: {_S.CLOSED},
            Unavailable: {_S.CLOSED},
            ResponseBody: {_S.RESERVING_ALONE},
            ResponseTrailers: {_S.RESERVING_ALONE},
            DrainBegan: {_S.RESERVING_ALONE},
            Faulted: {_S.RESERVING_ALONE},
            StreamEnded: {_S.RESERVING_ALONE},
        },
        # A late answer after the end, or the rest of a local reply that outlived its exchange.
        _S.CLOSED: {
            BodyRead: {_S.CLOSED},
            BodyRefused: {_S.CLOSED},
            Counted: {_S.CLOSED},
            AtLeast: {_S.CLOSED},
            CountFailed: {_S.CLOSED},
            Granted: {_S.CLOSED},
            Denied: {_S.CLOSED},
            Unavailable: {_S.CLOSED},
            ResponseBody: {_S.CLOSED},
            ResponseTrailers: {_S.CLOSED},
            DrainBegan: {_S.CLOSED},
            Faulted: {_S.CLOSED},
            StreamEnded: {_S.CLOSED},
        },
    }.items()
}
"""The law: in each state, the events that are legal and the states that may follow."""


class ProtocolViolation(Exception):
    """An event arrived in a state that does not expect it, or led where the law does not allow."""


PASSES: Mapping[State, State] = {
    State.READING: State.PASSING,
    State.PARSING: State.COUNTING_ALONE,
    State.COUNTING: State.COUNTING_ALONE,
    State.RESERVING: State.RESERVING_ALONE,
}
"""Where an exchange goes when Envoy has answered the client itself: it may still send that answer's body."""

LEAVES: Mapping[State, State] = {**PASSES, State.READING: State.CLOSED}
"""Where an exchange goes when its stream ends before the decision."""
