"""The requests in a file: one body, or JSON Lines with a request in each line.

A line is a body, or a line of an OpenAI batch file: an object whose `body` is the request's and whose `url` is
its path. Lines are read one by one, so a file may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import orjson

LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """One request. `number` counts from 1 and is the line in JSON Lines; `read_bytes` is what it took of the file."""

    number: int
    path: str
    raw: bytes
    read_bytes: int


def requests_of(file: BinaryIO, *, lines: bool, path: str) -> Iterator[SourceRequest]:
    """The requests in `file`; `path` is theirs where they do not say. Blank lines are skipped."""
    if not lines:
        raw = file.read()
        yield SourceRequest(number=1, path=path, raw=raw, read_bytes=len(raw))
        return
    skipped_bytes = 0
    for number, line in enumerate(file, start=1):
        raw = line.strip()
        if not raw:
            skipped_bytes += len(line)
            continue
        url, body = _of_batch(raw, path)
        yield SourceRequest(number=number, path=url, raw=body, read_bytes=skipped_bytes + len(line))
        skipped_bytes = 0


def _of_batch(line: bytes, path: str) -> tuple[str, bytes]:
    """Path and body of a line; a line that is no object of a batch file is the body itself."""
    if b'"body"' in line:
        try:
            entry = orjson.loads(line)
        except ValueError:
            return path, line  # whoever reads it as a body says what is wrong
        if isinstance(entry, dict) and isinstance(entry.get("body"), dict):
            url = entry.get("url")
            return (url if isinstance(url, str) else path), orjson.dumps(entry["body"])
    return path, line
