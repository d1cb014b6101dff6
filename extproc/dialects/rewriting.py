"""Naming another model in a body that is otherwise left as the client wrote it, byte for byte.

A body is not parsed and written again: numbers, escapes, white space and the order of keys are the client's,
and engines may be particular about them. Only the value of the top-level member `model` is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

LARGEST_WALKED_BYTES = 256 * 1024
LARGEST_WALKED_QUOTES = 5_000
"""A body in which a plain search does not find the member is walked through, string by string. That holds the event
loop up, so larger ones are left alone."""

LARGEST_CHANGED_BYTES = 2 * 1024 * 1024
"""A larger body stays what it is: to search it, to copy it and to send it back takes 1.3 ms of the event loop's time
for every MiB."""

_KEY = b'"model"'
_ESCAPED_LETTER = rb"\u006"
"""How each letter of the key begins when it is written as an escape."""

_SPACE = b" \t\r\n"
_TO_STRING = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(?=\")")
_SCALAR = re.compile(rb"[^,}\s]+")

Span = tuple[int, int]


def with_model(raw: bytes, name: str) -> bytes | None:
    """`raw`, with the model `name`; it is a valid JSON object in UTF-8 whose member `model` is a string.

    Of duplicate members `model` all are replaced: parsers differ in which one they take. `None` if it is not
    done: `raw` is too large, a duplicate holds a list or an object, or `"model"` is at several places of a body that
    is too large to be walked through.
    """
    if len(raw) > LARGEST_CHANGED_BYTES:
        return None
    spans = _only_span(raw) or _walked_spans(raw)
    if spans is None:
        return None
    value = json.dumps(name).encode()
    return b"".join(_spliced(raw, spans, value))


def _only_span(raw: bytes) -> list[Span] | None:
    """The value, if the key is at one place only: then it is the member itself that is there."""
    if raw.count(_KEY) != 1 or _ESCAPED_LETTER in raw:
        return None
    start = _TO_STRING.match(raw, raw.index(_KEY) + len(_KEY))
    if start is None:
        return None
    begins = ends = start.end()
    while True:
        ends = raw.index(b'"', ends + 1)
        before = raw[begins + 1 : ends]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return [(begins, ends + 1)]


def _walked_spans(raw: bytes) -> list[Span] | None:
    if len(raw) > LARGEST_WALKED_BYTES:
        return None
    # Escapes without their meaning and of the same length: then every quotation mark begins or ends a string.
    masked = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    pieces = masked.split(b'"')  # outside a string, inside, outside, ...
    if len(pieces) > LARGEST_WALKED_QUOTES:
        return None
    spans: list[Span] = []
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
    return spans or None


def _spliced(raw: bytes, spans: Iterable[Span], value: bytes) -> Iterable[bytes]:
    end = 0
    for first, last in spans:
        yield raw[end:first]
        yield value
        end = last
    yield raw[end:]


def _is_model(literal: bytes) -> bool:
    """Is this string literal, with its quotation marks, the key that names the model?"""
    return literal == _KEY or (b"\\" in literal and json.loads(literal) == "model")


def _value_span(raw: bytes, pieces: list[bytes], index: int, at: int) -> Span | None:
    """Where the value begins and ends whose colon is in the piece `index`, which starts at `at`."""
    piece = pieces[index]
    rest = piece[piece.index(b":") + 1 :].lstrip(_SPACE)
    begins = at + len(piece) - len(rest)
    if not rest:  # a string follows: its first mark is where this piece ends
        return begins, begins + len(pieces[index + 1]) + 2
    scalar = _SCALAR.match(raw, begins)
    if rest[:1] in (b"{", b"[") or scalar is None:
        return None
    return scalar.span()
