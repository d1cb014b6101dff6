"""Traffic traces: when requests came and how long they were.

Three shapes of file are understood, each plain or compressed with gzip, told apart by their columns:

    TIMESTAMP, ContextTokens, GeneratedTokens    CSV; times are dates (Azure's LLM inference traces)
    timestamp, input_length, output_length       JSON lines; times in ms (Mooncake's traces)
    arrival_ms, input_tokens, output_tokens      CSV or JSON lines; times in ms

Other columns are ignored. Arrivals are counted from the first row's.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

_US_PER_MS = 1_000
_DATE_CHARS = 26  # microseconds; some traces have one digit more


class TraceUnreadable(ValueError):
    """The file is no trace that we know. The message names file, line and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request: when it came, counted from the first one, and what it held."""

    at_us: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    time: str
    input: str
    output: str
    time_us: Callable[[Any], int]


def _date_us(text: Any) -> int:
    moment = datetime.fromisoformat(str(text)[:_DATE_CHARS])
    since = moment.replace(tzinfo=None) - datetime(1970, 1, 1)  # noqa: DTZ001 - only differences matter
    return since.days * 86_400_000_000 + since.seconds * 1_000_000 + since.microseconds


def _ms_us(value: Any) -> int:
    return round(float(value) * _US_PER_MS)


_SHAPES = (
    _Shape(time="TIMESTAMP", input="ContextTokens", output="GeneratedTokens", time_us=_date_us),
    _Shape(time="timestamp", input="input_length", output="output_length", time_us=_ms_us),
    _Shape(time="arrival_ms", input="input_tokens", output="output_tokens", time_us=_ms_us),
)


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """All rows in order of arrival. A count of 0 is read as 1: an engine has no smaller request.

    Raises OSError if the file cannot be read, TraceUnreadable if it is no trace.
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    try:
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as error:
        raise TraceUnreadable(f"{path} is not text: {error}") from None
    rows: list[TraceRow] = []
    shape: _Shape | None = None
    for number, record in _records(lines, path):
        if shape is None:
            shape = _shape_of(record, path)
        try:
            rows.append(
                TraceRow(
                    at_us=shape.time_us(record[shape.time]),
                    input_tokens=max(1, int(record[shape.input])),
                    output_tokens=max(1, int(record[shape.output])),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceUnreadable(f"{path}, line {number}: {error!r}; remove or repair the line") from None
    if not rows:
        raise TraceUnreadable(f"{path} has no requests")
    rows.sort(key=lambda row: row.at_us)
    first_us = rows[0].at_us
    return tuple(
        TraceRow(at_us=row.at_us - first_us, input_tokens=row.input_tokens, output_tokens=row.output_tokens)
        for row in rows
    )


def _records(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if numbered and numbered[0][1].lstrip().startswith("{"):
        for number, line in numbered:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TraceUnreadable(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise TraceUnreadable(f"{path}, line {number} is not a JSON object")
            yield number, record
        return
    reader = csv.DictReader(line for _, line in numbered)
    for record in reader:
        yield numbered[reader.line_num - 1][0], record


def _shape_of(record: Mapping[str, Any], path: Path) -> _Shape:
    for shape in _SHAPES:
        if {shape.time, shape.input, shape.output} <= record.keys():
            return shape
    known = "; ".join(f"{shape.time}, {shape.input}, {shape.output}" for shape in _SHAPES)
    found = ", ".join(str(name) for name in list(record)[:8])
    raise TraceUnreadable(f"{path} has the columns {found}; it needs one of these sets: {known}")
