"""The figures as Markdown tables; what could not be measured is in them, with its reason."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.bench.peers.measures import PATIENCE_S

OURS = "extproc"
THEIRS = "litellm"
WANTED_RATIO = 30
NO_FIGURE = "-"

Row = Mapping[str, Any]


def page(figures: Row) -> str:
    """Everything."""
    about, peers = figures["about"], figures["peers"]
    parts = [
        introduction(about, peers),
        "### Versions and limits",
        table(("peer", "version", "limit used"), _versions(peers)),
        "### Cost of a request of 300 + 100 tokens that is let in",
        "Least, median and most of the rounds.",
        table(
            (
                "peer",
                "requests/s per core",
                f"{OURS} ÷ it",
                "CPU by part",
                "added p50",
                "added p95",
                "peak memory",
            ),
            _costs(peers),
        ),
        verdict(peers),
        "### Over-admission",
        table(
            (
                "peer",
                "limit 8 in flight, 80 at once: let in",
                "80 more, 2 s later: let in",
                "most in the engine",
                "token budget for 10, 100 English at once: let in",
                "100 Chinese: let in",
            ),
            _over_admission(peers),
        ),
        "### What a refused client gets",
        table(("peer", "limit", "status", "headers", "body"), _refusals(peers)),
        "### Tokens counted before admission ÷ the engine's `usage`",
        table(("peer", "requests", "equal", "least", "median", "most", "all together"), _counts(peers)),
        "### After 200 clients hung up in mid-stream",
        table(
            (
                "peer",
                "streams begun",
                "engine idle after",
                "its own counters as before after",
                "counters then",
                "CPU until then",
                "of 200 new requests let in",
            ),
            _hang_ups(peers),
        ),
    ]
    missing = list(_missing(peers))
    if missing:
        parts += ["### Could not be measured", table(("peer", "measure", "why"), missing)]
    return "\n\n".join(parts) + "\n"


def introduction(about: Row, peers: Row) -> str:
    """When, where, how to do it again, and how quiet the machine was."""
    others = [one["others_cores"] for row in peers.values() for one in good_rounds(row)]
    busy = (
        f" Meanwhile other work took {spread(others, '{:.1f}')} cores of the machine: where that is not nearly 0, "
        "believe CPU and ratios, and no latency."
        if others
        else ""
    )
    return (
        f"Measured {about['date']} by `{about['command']}` on a machine of {about['machine']} (load average "
        f"{about['load_average_before']} before it began), Python {about['python']}, load by {about['client']}.{busy}"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [_line(head), _line(["---"] * len(head))]
    lines.extend(_line([_cell(value) for value in row]) for row in rows)
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    if value is None:
        return NO_FIGURE
    return str(value).replace("|", "\\|").replace("\n", " ")


def measured(row: Row, measure: str) -> Row | None:
    """The figures of a measure, or `None` where there are none."""
    figures: Any = row.get(measure)
    return figures if isinstance(figures, Mapping) and "not_measured" not in figures else None


def good_rounds(row: Row) -> list[Row]:
    """The rounds that gave figures."""
    costs = measured(row, "costs")
    return [] if costs is None else [one for one in costs["rounds"] if "not_measured" not in one]


def spread(values: Sequence[float], form: str = "{:.0f}") -> str:
    """Median (least to most)."""
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def ratios(ours: Row, theirs: Row) -> list[float]:
    """Requests per second of CPU, ours ÷ theirs, round by round."""
    mine = ours["costs"]["rounds"] if measured(ours, "costs") else []
    other = theirs["costs"]["rounds"] if measured(theirs, "costs") else []
    return [
        one["per_core_s"] / two["per_core_s"]
        for one, two in zip(mine, other, strict=False)
        if "not_measured" not in one and "not_measured" not in two
    ]


def verdict(peers: Row) -> str:
    """The target, and whether it is met."""
    found = ratios(peers.get(OURS, {}), peers.get(THEIRS, {}))
    if not found:
        return f"Target: {OURS} ÷ {THEIRS} at least {WANTED_RATIO}; not measured in this run."
    met = "met" if statistics.median(found) >= WANTED_RATIO else "not met"
    return (
        f"Target: {OURS} ÷ {THEIRS} at least {WANTED_RATIO}; measured {spread(found, '{:.1f}')}: **{met}**."
    )


def _versions(peers: Row) -> Iterable[Sequence[object]]:
    for name, row in peers.items():
        version = row["version"]
        yield name, version if isinstance(version, str) else None, row["setting"]


def _costs(peers: Row) -> Iterable[Sequence[object]]:
    for name, row in peers.items():
        rounds = good_rounds(row)
        if not rounds:
            yield name, *[None] * 6
            continue
        parts = {
            part: statistics.median(one["cpu_us"][part] for one in rounds) for part in rounds[0]["cpu_us"]
        }
        found = ratios(peers.get(OURS, {}), row)
        yield (
            name,
            spread([one["per_core_s"] for one in rounds]),
            spread(found, "{:.2f}") if found and name != OURS else None,
            ", ".join(f"{part} {value:.0f} µs" for part, value in parts.items()),
            f"{spread([one['added_p50_ms'] for one in rounds], '{:.1f}')} ms",
            f"{spread([one['added_p95_ms'] for one in rounds], '{:.1f}')} ms",
            f"{row['peak_mb']} MB" if "peak_mb" in row else None,
        )
        if name == OURS:
            service = [1e6 / one["cpu_us"]["service"] for one in rounds]
            yield f"{name}, the service alone", spread(service), *[None] * 5


def _over_admission(peers: Row) -> Iterable[Sequence[object]]:
    for name, row in peers.items():
        inflight, tokens = measured(row, "inflight"), measured(row, "tokens")
        yield (
            name,
            inflight and inflight["let_in"],
            inflight and inflight["let_in_of_second"],
            inflight and inflight["most_open"],
            tokens and tokens["english"]["let_in"],
            tokens and tokens["chinese"]["let_in"],
        )


def _refusals(peers: Row) -> Iterable[Sequence[object]]:
    places: tuple[tuple[str, str, Callable[[Row], Any]], ...] = (
        ("in flight", "inflight", lambda figures: figures.get("refusal")),
        ("in flight, streamed", "inflight", lambda figures: figures.get("stream_refusal")),
        ("tokens", "tokens", lambda figures: figures.get("refusal")),
    )
    for name, row in peers.items():
        for limit, measure, find in places:
            figures = measured(row, measure)
            told = find(figures) if figures is not None else None
            if told is None:
                continue
            if told["status"] is None:
                yield name, limit, "none refused", None, None
                continue
            headers = ", ".join(
                f"`{key}: {value}`" for key, value in told["headers"].items() if key != "content-type"
            )
            body = f"`{short(told['body'])}`" if told["body"].strip() else "empty"
            yield name, limit, told["status"], headers or "no Retry-After", body


def short(body: str, most: int = 160) -> str:
    """The beginning of a body, on one line."""
    line = " ".join(body.replace("`", "'").split())
    return line if len(line) <= most else f"{line[:most]}…"


def _counts(peers: Row) -> Iterable[Sequence[object]]:
    for name, row in peers.items():
        counts = measured(row, "counts")
        if counts is None:
            yield name, *[None] * 6
            continue
        keys = ("least_ratio", "median_ratio", "most_ratio", "sum_ratio")
        yield name, counts["requests"], counts["equal"], *(counts[key] for key in keys)


def _hang_ups(peers: Row) -> Iterable[Sequence[object]]:
    for name, row in peers.items():
        figures = measured(row, "hang_ups")
        if figures is None:
            yield name, *[None] * 6
            continue
        gauges = ", ".join(f"{key} {value:g}" for key, value in figures["gauges_after"].items())
        engine = _seconds(figures["upstream_idle_after_s"])
        if figures["upstream_still_open"]:
            engine = f"{engine}: {figures['upstream_still_open']} answers still open"
        yield (
            name,
            figures["begun"],
            None if figures["upstream_still_open"] is None else engine,
            _seconds(figures["gauges_idle_after_s"]) if figures["gauges_before"] else "it tells none",
            gauges or ("no answer" if figures["gauges_before"] else None),
            f"{figures['cpu_s']} s",
            figures["let_in_again"],
        )


def _seconds(value: float | None) -> str:
    return f"not in {PATIENCE_S:g} s" if value is None else f"{value:g} s"


def _missing(peers: Row) -> Iterable[Sequence[object]]:
    for name, row in peers.items():
        for measure, figures in row.items():
            if isinstance(figures, Mapping) and "not_measured" in figures:
                yield name, measure.replace("_", " "), figures["not_measured"]
        costs = measured(row, "costs") or {"rounds": []}
        for number, one in enumerate(costs["rounds"], start=1):
            if "not_measured" in one:
                yield name, f"cost, round {number}", one["not_measured"]
