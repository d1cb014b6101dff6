"""By when must the first token be there? Clients can only shorten what the lane allows.

Official SDKs send their read timeout with every request (`x-stainless-read-timeout`, in seconds), gRPC
clients send `grpc-timeout`, Envoys in front send what they will wait. Each is a deadline for free. A value
that cannot be read is no deadline: it never lengthens, and it never refuses a request by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_MILLISECONDS = re.compile(r"[0-9]{1,9}")
_GRPC_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_GRPC_UNIT_US = {"H": 3_600_000_000, "M": 60_000_000, "S": 1_000_000, "m": 1_000, "u": 1}

LONGEST_CHARS = 16
"""No value that can be read is longer."""


def declared_deadline_ms(headers: Mapping[str, str], *, header: str) -> int | None:
    """The shortest time to the first token that the client declared, in ms; `None` if it declared none.

    `header` is the policy's own deadline header, in milliseconds.
    """
    own: tuple[tuple[str, Callable[[str], int]], ...] = ((header, _milliseconds),)
    declared = [
        deadline_ms
        for name, read in own + _READERS
        if (value := headers.get(name)) is not None
        and len(value) <= LONGEST_CHARS
        and (deadline_ms := read(value))
    ]
    return min(declared, default=None)


# Clients send the same few values over and over, so each is read once. Zero means "no timeout" to those who send it.


@lru_cache(maxsize=256)
def _milliseconds(value: str) -> int:
    return int(value) if _MILLISECONDS.fullmatch(value) else 0


@lru_cache(maxsize=256)
def _seconds(value: str) -> int:
    if not _SECONDS.fullmatch(value):
        return 0
    whole, _, fraction = value.partition(".")
    return int(whole) * 1000 + int((fraction + "000")[:3])


@lru_cache(maxsize=256)
def _grpc(value: str) -> int:
    match = _GRPC_TIMEOUT.fullmatch(value)
    if match is None:
        return 0
    amount, unit = int(match[1]), match[2]
    return amount // 1_000_000 if unit == "n" else amount * _GRPC_UNIT_US[unit] // 1000


_READERS: tuple[tuple[str, Callable[[str], int]], ...] = (
    ("x-envoy-expected-rq-timeout-ms", _milliseconds),
    ("x-stainless-read-timeout", _seconds),
    ("x-stainless-timeout", _seconds),
    ("grpc-timeout", _grpc),
)
"""Headers that declare a deadline, and how each spells it."""
