"""The `BodyReader` of a server: long bodies are read in the threads that count, within the same bounds.

Whoever sends many long bodies waits for them by turns with others, and what cannot be read in time is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

from extproc.adapters.json_body import read_json, read_short, read_steps
from extproc.dialects.body import Body, BodyRead, BodyRefused, refused, understood
from extproc.dialects.reading import BadRequest
from extproc.domain.outcome import Reason
from extproc.domain.policy import Limits
from extproc.domain.prompt import CountFailed

log = logging.getLogger(__name__)

READING_NS_PER_BYTE = 20
WALKING_NS_PER_BYTE = 10
"""About twice what is measured for the most expensive bodies: lists of short texts, and thousands of messages."""

MOST_EXPANSION = 20
"""How much larger than it came a compressed body is taken to be, before anybody knows."""

Answer = BodyRead | BodyRefused | CountFailed
Steps = Generator[int, None, Answer]


class Threads(Protocol):
    """Where long work is done by turns."""

    def run(
        self,
        steps: Steps,
        *,
        next_step_us: int,
        work_us: int,
        tenant: str,
        deliver: Callable[[Any], None],
    ) -> bool:
        """Run `steps` to their end, and deliver what they return, or a `CountFailed`, on the event loop."""
        ...


class ThreadedBodyReader:
    """Reads bodies for the exchanges of one event loop; see `extproc.ports.BodyReader`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def read(self, body: Body, *, tenant: str, deliver: Callable[[Answer], None]) -> None:
        """See `extproc.ports.BodyReader.read`."""
        limit_bytes = body.policy.limits.body_bytes
        coded = "content-encoding" in body.headers
        size = min(limit_bytes, len(body.raw) * MOST_EXPANSION) if coded else len(body.raw)
        walk_us = size * WALKING_NS_PER_BYTE // 1_000
        self._threads.run(
            _steps(body, walk_us),
            next_step_us=0,
            work_us=walk_us + size * READING_NS_PER_BYTE // 1_000,
            tenant=tenant,
            deliver=deliver,
        )


def _steps(body: Body, walk_us: int) -> Steps:
    headers = body.headers
    try:
        value = yield from read_steps(
            body.raw,
            content_encoding=headers.get("content-encoding"),
            content_type=headers.get("content-type"),
            limits=body.policy.limits,
        )
        yield walk_us
        return understood(body, value)
    except BadRequest as bad:
        return refused(bad)
    except Exception:
        log.exception("body not read")
        return CountFailed(
            reason=Reason.INTERNAL_ERROR,
            detail="The admission service failed on this request; nothing was reserved.",
        )


def read_here(raw: bytes, headers: Mapping[str, str], limits: Limits) -> Mapping[str, Any] | None:
    """The JSON object in a short body; `None` for a long one. Raises `BadRequest`."""
    return read_short(
        raw,
        content_encoding=headers.get("content-encoding"),
        content_type=headers.get("content-type"),
        limits=limits,
    )


def read_whole(raw: bytes, headers: Mapping[str, str], limits: Limits) -> Mapping[str, Any]:
    """The JSON object in a body of any length, for tools that have nobody waiting. Raises `BadRequest`."""
    return read_json(
        raw,
        content_encoding=headers.get("content-encoding"),
        content_type=headers.get("content-type"),
        limits=limits,
    )
