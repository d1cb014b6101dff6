"""By when must the first token be there? Clients can only shorten what the lane allows.

Official SDKs send their read timeout with every request (`x-stainless-read-timeout`, in seconds), gRPC
clients send `grpc-timeout`, Envoys in front send what they will wait. Each is a deadline for free. A value
that cannot be read is no deadline: it never lengthens, and it never refuses a request by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_MILLISECONDS = re.compile(r"[0-9]{1,9}")
_GRPC_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_GRPC_UNIT_US = {"H": 3_600_000_000, "M": 60_000_000, "S": 1_000_000, "m": 1_000, "u": 1}

SECONDS_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")


def declared_deadline_ms(headers: Mapping[str, str], *, header: str) -> int | None:
    """The shortest time to the first token that the client declared, in ms; `None` if it declared none.

    `header` is the policy's own deadline header, in milliseconds.
    """
    declared: list[int] = []
    for name in (header, "x-envoy-expected-rq-timeout-ms"):
        value = headers.get(name)
        if value is not None and _MILLISECONDS.fullmatch(value):
            declared.append(int(value))
    for name in SECONDS_HEADERS:
        value = headers.get(name)
        if value is not None and _SECONDS.fullmatch(value):
            whole, _, fraction = value.partition(".")
            declared.append(int(whole) * 1000 + int((fraction + "000")[:3]))
    value = headers.get("grpc-timeout")
    if value is not None and (match := _GRPC_TIMEOUT.fullmatch(value)):
        amount, unit = int(match[1]), match[2]
        declared.append(amount // 1_000_000 if unit == "n" else amount * _GRPC_UNIT_US[unit] // 1000)
    # Zero means "no timeout" to those who send it.
    return min((deadline_ms for deadline_ms in declared if deadline_ms > 0), default=None)
