"""Counts on a terminal, and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from extproc.cli.tokens_bench import BenchFigures
from extproc.cli.tokens_counting import Tally

PLAIN_WIDTH = 150
"""Columns when the output is a file or a pipe."""

MOST_ROWS = 40
"""Beyond this, only what needs attention has a row; the summary stands for the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One request: our count, and the engine's if it was asked. `trouble` is why the engine's is missing."""

    tally: Tally
    engine_tokens: int | None = None
    trouble: str | None = None

    @property
    def is_mismatch(self) -> bool:
        """Do the two counts differ?"""
        ours = self.tally.input_tokens
        return ours is not None and self.engine_tokens is not None and ours != self.engine_tokens

    @property
    def needs_attention(self) -> bool:
        """Is it not counted, not compared, or different?"""
        return self.is_mismatch or self.trouble is not None or self.tally.problem is not None

    def as_values(self) -> dict[str, Any]:
        """For programs; nothing of the prompt is in it."""
        values = {key: value for key, value in asdict(self.tally).items() if value is not None}
        if self.engine_tokens is not None:
            values |= {"engine_tokens": self.engine_tokens, "equal": not self.is_mismatch}
        if self.trouble is not None:
            values["trouble"] = self.trouble
        return values


@dataclass(slots=True, kw_only=True)
class Summary:
    """All requests together, and the rows that are shown."""

    requests: int = 0
    counted: int = 0
    refused: int = 0
    compared: int = 0
    mismatches: int = 0
    unanswered: int = 0
    input_tokens: int = 0
    largest_tokens: int = 0
    count_us: int = 0
    rows: list[Compared] = field(default_factory=list)

    def add(self, compared: Compared) -> None:
        """Take one more request in."""
        tally = compared.tally
        self.requests += 1
        if tally.input_tokens is None:
            self.refused += 1
        else:
            self.counted += 1
            self.input_tokens += tally.input_tokens
            self.largest_tokens = max(self.largest_tokens, tally.input_tokens)
            self.count_us += tally.count_us
        self.compared += compared.engine_tokens is not None
        self.mismatches += compared.is_mismatch
        self.unanswered += compared.trouble is not None
        if len(self.rows) < MOST_ROWS:
            self.rows.append(compared)
        elif compared.needs_attention:
            self._make_room(compared)

    def _make_room(self, compared: Compared) -> None:
        """Replace the last row that is as it should be; if there is none, the list is long enough."""
        for at in range(len(self.rows) - 1, -1, -1):
            if not self.rows[at].needs_attention:
                del self.rows[at]
                self.rows.append(compared)
                return

    @property
    def is_good(self) -> bool:
        """Is every request counted and, where an engine was asked, equal?"""
        return self.requests > 0 and not (self.refused or self.mismatches or self.unanswered)

    def as_values(self) -> dict[str, Any]:
        """For programs."""
        values = {key: value for key, value in asdict(self).items() if key != "rows"}
        return {"summary": values}


def show(summary: Summary, *, compared: bool) -> None:
    """The rows and the summary."""
    console = _console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("request", "dialect", "model"):
        table.add_column(name)
    for name in ("sequences", "input tokens", "output ceiling", "µs"):
        table.add_column(name, justify="right")
    if compared:
        table.add_column("engine", justify="right")
    table.add_column("")
    for row in summary.rows:
        tally = row.tally
        cells = [str(tally.number), tally.dialect or "-", tally.model or "-"]
        if tally.input_tokens is None:
            cells += ["", "", "", ""]
        else:
            cells += [f"{tally.sequences}", f"{tally.input_tokens:_}", _ceiling(tally), f"{tally.count_us:_}"]
        if compared:
            cells.append("" if row.engine_tokens is None else f"{row.engine_tokens:_}")
        table.add_row(*cells, _remark(row), style="bold red" if row.needs_attention else None)
    console.print(table)
    if summary.requests > len(summary.rows):
        console.print(f"… and {summary.requests - len(summary.rows):_} more")
    if summary.requests != 1 or not summary.is_good:
        console.print(_in_words(summary, compared=compared))


def show_bench(figures: BenchFigures) -> None:
    """The ways beside each other."""
    console = _console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("way")
    for name in ("µs per request", "tokens/s", "times as fast"):
        table.add_column(name, justify="right")
    for row in figures.as_rows():
        table.add_row(
            row["way"], f"{row['us_per_request']:_}", f"{row['tokens_per_s']:_}", f"{row['times_as_fast']:_}"
        )
    console.print(table)
    skipped = f"; {figures.skipped:_} without anything to encode, or refused" if figures.skipped else ""
    console.print(
        f"{figures.requests:_} requests, {figures.tokens:_} tokens, {figures.unequal:_} counted otherwise by one "
        f"of the ways{skipped}. Processor time of one thread."
    )


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    return console


def _ceiling(tally: Tally) -> str:
    one = "window" if tally.output_limit_tokens is None else f"{tally.output_limit_tokens:_}"
    return one if tally.choices == 1 else f"{tally.choices} x {one}"


def _remark(row: Compared) -> str:
    tally = row.tally
    if tally.problem is not None:
        return f"{tally.reason}: {tally.problem}"
    if row.trouble is not None:
        return row.trouble
    if row.is_mismatch:
        assert row.engine_tokens is not None
        assert tally.input_tokens is not None
        return f"differs by {tally.input_tokens - row.engine_tokens:+_}"
    return ""


def _in_words(summary: Summary, *, compared: bool) -> str:
    parts: Sequence[str] = (
        f"{summary.requests:_} requests",
        f"{summary.input_tokens:_} input tokens, at most {summary.largest_tokens:_} in one",
        f"{summary.count_us / max(summary.counted, 1):_.0f} µs each",
        f"{summary.refused:_} refused",
    )
    if compared:
        parts = (
            *parts,
            f"{summary.compared:_} compared",
            f"{summary.mismatches:_} different",
            f"{summary.unanswered:_} without an answer",
        )
    return "; ".join(parts) + "."
