"""Naming another model in a body that is otherwise left as the client wrote it, byte for byte.

A body is not parsed and written again: numbers, escapes, white space and the order of keys are the client's,
and engines may be particular about them. Only the value of the top-level member `model` is replaced.
"""

from __future__ import annotations

import json
import re

LARGEST_QUOTES = 50_000
"""Bodies with more quotation marks are left alone: walking through their strings would take the event loop longer
than a request may. A conversation of a thousand turns has some ten thousand."""

_SCALAR = re.compile(rb"[^,}\s]+")
_SPACE = b" \t\r\n"


def with_model(raw: bytes, name: str) -> bytes | None:
    """`raw`, a valid JSON object in UTF-8, with the model `name`; `None` if it cannot be rewritten.

    Of duplicate members `model` all are replaced: parsers differ in which one they take. A body cannot be
    rewritten if it has no such member, if one of them holds a list or an object, or if the body has more than
    `LARGEST_QUOTES` quotation marks.
    """
    # Escapes without their meaning and of the same length: then every quotation mark begins or ends a string.
    masked = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if masked.count(b'"') > LARGEST_QUOTES:
        return None
    pieces = masked.split(b'"')  # outside a string, inside, outside, ...
    spans: list[tuple[int, int]] = []
    at = depth = 0
    for index, piece in enumerate(pieces):
        begins = at
        at += len(piece) + 1
        if index % 2 == 0:
            depth += piece.count(b"{") + piece.count(b"[") - piece.count(b"}") - piece.count(b"]")
            continue
        after = pieces[index + 1].lstrip(_SPACE)
        if depth != 1 or not after.startswith(b":") or not _is_model(raw[begins - 1 : at]):
            continue
        span = _value_span(raw, pieces, index + 1, at)
        if span is None:
            return None
        spans.append(span)
    if not spans:
        return None
    value = json.dumps(name).encode()
    parts: list[bytes] = []
    end = 0
    for first, last in spans:
        parts += (raw[end:first], value)
        end = last
    return b"".join((*parts, raw[end:]))


def _is_model(literal: bytes) -> bool:
    """Is this string literal, with its quotation marks, the key that names the model?"""
    return literal == b'"model"' or (b"\\" in literal and json.loads(literal) == "model")


def _value_span(raw: bytes, pieces: list[bytes], index: int, at: int) -> tuple[int, int] | None:
    """Where the value begins and ends whose colon is in the piece `index`, which starts at `at`."""
    piece = pieces[index]
    colon = piece.index(b":") + 1
    rest = piece[colon:].lstrip(_SPACE)
    begins = at + len(piece) - len(rest)
    if not rest:  # a string follows: its first mark is where this piece ends
        return begins, begins + len(pieces[index + 1]) + 2
    scalar = _SCALAR.match(raw, begins)
    if rest[:1] in (b"{", b"[") or scalar is None:
        return None
    return scalar.span()
