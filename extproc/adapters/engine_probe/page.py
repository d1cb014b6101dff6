"""Reads an engine's metrics page as it arrives: a few numbers out of hundreds of lines, within bounds.

Nothing of a page is kept but these numbers, and nothing in it is believed that cannot be: what is negative, not
finite or absurd is as good as not told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set as AbstractSet

from extproc.adapters.engine_probe.names import ALL_NAMES, MODEL_LABEL, NAMES, RANK_LABELS, Told
from extproc.domain.signals import EngineSignal

LARGEST_LINE_BYTES = 64 * 1024
LARGEST_PAGE_BYTES = 4 * 1024 * 1024
MOST_SERIES = 1_024
"""Series of one name: more than there are ranks in any engine."""

LARGEST_COUNT = 1_000_000
"""More requests than that are in no engine."""

LARGEST_SHARE = 1.1
"""A little over 1 is rounding, and full. Much more is not a share: what it means is unknown."""

_WANTED = re.compile(
    rb"^(%s)(?:\{([^\n]*)\})?[ \t]+([^ \t\r\n]+)" % b"|".join(re.escape(name.encode()) for name in ALL_NAMES),
    re.MULTILINE,
)
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

_Key = tuple[bytes | None, ...]


class PageError(Exception):
    """This is no metrics page, or none that can be read. The text names no part of it."""


class PageReader:
    """Takes a page in pieces of any size. `models` are the names that the pool's engines may serve under."""

    def __init__(self, models: AbstractSet[str]) -> None:
        self._models = {name.encode() for name in models}
        self._rest = b""
        self._bytes = 0
        self._series: dict[str, dict[_Key, float]] = {}

    def feed(self, piece: bytes) -> None:
        """The next piece. Raises `PageError` when a bound is passed."""
        self._bytes += len(piece)
        if self._bytes > LARGEST_PAGE_BYTES:
            raise PageError("the page is too large")
        whole, newline, rest = piece.rpartition(b"\n")
        if not newline:
            self._rest += piece
        else:
            self._read(self._rest + whole + newline)
            self._rest = rest
        if len(self._rest) > LARGEST_LINE_BYTES:
            raise PageError("a line is too long")

    def signal(self, at_ms: int) -> EngineSignal | None:
        """What the whole page told; `None` if it told none of the numbers. Raises `PageError` if it was cut off."""
        if self._rest:
            raise PageError("the page was cut off")
        for names in NAMES.values():
            waiting = self._count(names.of(Told.WAITING))
            running = self._count(names.of(Told.RUNNING))
            kv_used = self._share(names.of(Told.KV_USED))
            if waiting is not None or running is not None or kv_used is not None:
                return EngineSignal(
                    waiting_requests=waiting,
                    running_requests=running,
                    kv_used_permille=kv_used,
                    at_ms=at_ms,
                )
        return None

    def _read(self, lines: bytes) -> None:
        for match in _WANTED.finditer(lines):
            name, labels, text = match.groups()
            try:
                value = float(text)
            except ValueError:
                continue
            if not math.isfinite(value) or value < 0:
                continue
            found = dict(_LABEL.findall(labels)) if labels else {}
            key = tuple(found.get(label.encode()) for label in RANK_LABELS)
            series = self._series.setdefault(name.decode(), {})
            series[key] = max(value, series.get(key, value))
            if len(series) > MOST_SERIES:
                raise PageError("there are too many series")

    def _values(self, names: tuple[str, ...]) -> list[float]:
        """The values of the first name that is there, one per rank: those of the pool's models, if any are."""
        series = next((self._series[name] for name in names if name in self._series), {})
        model = RANK_LABELS.index(MODEL_LABEL)
        ours = [value for key, value in series.items() if key[model] in self._models]
        return ours or list(series.values())

    def _count(self, names: tuple[str, ...]) -> int | None:
        """Requests of all ranks together."""
        values = self._values(names)
        total = sum(values)
        return int(total) if values and total <= LARGEST_COUNT else None

    def _share(self, names: tuple[str, ...]) -> int | None:
        """The fullest rank, in thousandths: the next request may land there."""
        values = self._values(names)
        fullest = max(values, default=0.0)
        return min(1000, round(fullest * 1000)) if values and fullest <= LARGEST_SHARE else None
