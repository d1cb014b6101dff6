"""Where numbers add up between two scrapes: integers in small lists, and nothing else.

Recording is on every request's path, so whoever records keeps the cells of a label set and only adds to
them. What makes that safe is done once, where a label set is first seen: its values are held against what
is known, and the number of label sets of one metric is capped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

from extproc.adapters.telemetry.instruments import CLOSED_LABELS, FREE_LABELS, NONE, OTHER, Instrument

Cell = list[int]
"""A counter's cell is its one count. A histogram's is the sum of its values, then one count per bucket, the
last of which is unbounded."""

SERIES_LIMIT = 2_000
"""Label sets of one metric. Nobody reads more of them series by series, whatever the policy's size."""


def put(cell: Cell, bounds: tuple[int, ...], value: int) -> None:
    """Record one value in a histogram's cell."""
    cell[0] += value
    cell[bisect_left(bounds, value) + 1] += 1


class Vocabulary:
    """Which label values are exported as they are. Everything else is `other`."""

    def __init__(self) -> None:
        self._known: dict[str, frozenset[str]] = dict(CLOSED_LABELS)

    def learn(self, names: Mapping[str, frozenset[str]]) -> None:
        """From now on these are the policy's names, by label; those of before are forgotten."""
        self._known = {**CLOSED_LABELS, **names}

    def knows(self, label: str, value: str) -> bool:
        """Whether `value` is exported as it is."""
        return value in (NONE, OTHER) or label in FREE_LABELS or value in self._known.get(label, ())

    def bounded(self, labels: tuple[str, ...], values: tuple[str, ...]) -> tuple[str, ...]:
        """The values to export for what arrived."""
        return tuple(
            str(value) if self.knows(label, value) else OTHER
            for label, value in zip(labels, values, strict=True)
        )


class Series:
    """All cells of one counter or histogram, by label values."""

    def __init__(self, instrument: Instrument, vocabulary: Vocabulary, folded: Callable[[], None]) -> None:
        self.instrument = instrument
        self.cells: dict[tuple[str, ...], Cell] = {}
        self._empty = [0] * (len(instrument.bounds) + 2 if instrument.bounds else 1)
        self._vocabulary = vocabulary
        self._folded = folded
        if not instrument.labels:
            self.cell(())

    def cell(self, labels: tuple[str, ...]) -> Cell:
        """The cell of these label values, or the one that stands for all the unknown and surplus ones."""
        cell = self.cells.get(labels)
        if cell is not None:
            return cell
        key = self._vocabulary.bounded(self.instrument.labels, labels)
        if key not in self.cells and len(self.cells) >= SERIES_LIMIT:
            self._folded()
            key = (OTHER,) * len(key)
        return self.cells.setdefault(key, self._empty.copy())

    def prune(self) -> None:
        """Forget the series with a name that the vocabulary no longer knows. Cells kept elsewhere are void."""
        labels = self.instrument.labels
        self.cells = {
            key: cell
            for key, cell in self.cells.items()
            if all(self._vocabulary.knows(label, value) for label, value in zip(labels, key, strict=True))
        }
