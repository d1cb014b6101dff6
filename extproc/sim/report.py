"""The report of a comparison: one HTML file that needs nothing else, and JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import orjson
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from extproc import __version__
from extproc.domain.policy import Lane
from extproc.sim.charts import Axis, Line, line_chart
from extproc.sim.comparison import Compared, Comparison, Role, duration, percent
from extproc.sim.measures import Figures, Measured, Percentiles

STYLES: Mapping[Role, tuple[str, ...]] = {
    Role.POLICY: ("c-policy",),
    Role.OTHER_POLICY: ("c-other",),
    Role.WITHOUT_BULK: ("c-without",),
    Role.NO_CONTROL: ("c-open",),
    Role.REQUEST_LIMIT: ("c-limit-1", "c-limit-2", "c-limit-3"),
}
REASON_STYLES = ("c-policy", "c-limit-1", "c-other", "c-open", "c-limit-3", "c-limit-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with what it shows."""

    title: str
    says: str
    svg: Markup
    legend: tuple[tuple[str, str], ...]  # style, name


Row = tuple[str, tuple[str, ...]]
"""A name, and a cell for each run."""


def to_json(comparison: Comparison) -> bytes:
    """All of it; see `Comparison` and `Measured` for what the fields mean."""
    return orjson.dumps(
        comparison, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    )


def to_html(comparison: Comparison) -> str:
    """The report as a page. It has no scripts and loads nothing."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(files("extproc.sim").joinpath("report.html").read_text())
    styles = styles_of(comparison.runs)
    return template.render(
        version=__version__,
        comparison=comparison,
        names=[run.measured.name for run in comparison.runs],
        styles=styles,
        summary=summary_rows(comparison),
        charts=charts_of(comparison, styles),
        lanes=[
            (
                lane,
                [(tenant, _detail_rows(comparison, lane, tenant)) for tenant in _tenants(comparison, lane)],
            )
            for lane in _lanes(comparison)
        ],
        refusals=refusal_rows(comparison),
        targets=[(lane, duration(comparison.targets.ttft_ms[lane])) for lane in _lanes(comparison)],
    )


def styles_of(runs: Sequence[Compared]) -> tuple[str, ...]:
    """Each run's colour, by what it is: the same in every chart and table."""
    seen: dict[Role, int] = {}
    styles: list[str] = []
    for run in runs:
        position = seen[run.role] = seen.get(run.role, -1) + 1
        choices = STYLES[run.role]
        styles.append(choices[position % len(choices)])
    return tuple(styles)


def summary_rows(comparison: Comparison) -> list[Row]:
    """The figures to look at first."""
    runs = [run.measured for run in comparison.runs]
    rows: list[Row] = []
    for lane in _lanes(comparison):
        rows.extend(
            (f"{lane} TTFT {name}", tuple(duration(_percentile(run, lane, name)) for run in runs))
            for name in ("p50", "p95", "p99")
        )
    rows.append(("good requests / offered", tuple(percent(r.total.goodput_requests_permille) for r in runs)))
    rows.extend(
        (
            f"… {lane}",
            tuple(percent(r.lanes[lane].goodput_requests_permille) if lane in r.lanes else "–" for r in runs),  # noqa: RUF001 - a dash
        )
        for lane in _lanes(comparison)
    )
    rows.append(("good tokens / offered", tuple(percent(run.total.goodput_permille) for run in runs)))
    labels = sorted({label for run in runs for label in run.fallbacks})
    rows.extend(
        (f"sent to {label}", tuple(f"{run.fallbacks.get(label, 0):,}" for run in runs)) for label in labels
    )
    rows.append(("bulk's share of tokens", tuple(percent(run.bulk_share_permille) for run in runs)))
    rows.append(("… while it waits", tuple(percent(run.bulk_waiting_share_permille) for run in runs)))
    rows.extend(
        (
            f"fairness in {lane}",
            tuple(_ratio(run.fairness_permille.get(lane)) for run in runs),
        )
        for lane in _lanes(comparison)
    )
    rows.append(
        ("oldest in line", tuple(duration(max(r.longest_queue_age_ms.values(), default=0)) for r in runs))
    )
    rows.append(("refusals", tuple(f"{sum(run.refusals.values()):,}" for run in runs)))
    rows.append(("hung up for good", tuple(f"{run.total.hung_up_requests:,}" for run in runs)))
    rows.append(("preemptions in engines", tuple(f"{run.preemptions:,}" for run in runs)))
    rows.append(("prefill done in vain", tuple(percent(run.recomputed_prefill_permille) for run in runs)))
    return rows


def refusal_rows(comparison: Comparison) -> list[Row]:
    """Refusals by reason; a request may be refused several times."""
    runs = [run.measured for run in comparison.runs]
    reasons = sorted({reason for run in runs for reason in run.refusals})
    return [(reason, tuple(f"{run.refusals.get(reason, 0):,}" for run in runs)) for reason in reasons]


def charts_of(comparison: Comparison, styles: Sequence[str]) -> list[Chart]:
    """Everything that has a course over time."""
    runs = comparison.runs
    interval_s = runs[0].measured.series.interval_s

    def chart(title: str, says: str, axis: Axis, lines: Sequence[Line]) -> Chart:
        shown = [line for line in lines if any(value is not None for value in line.values)]
        return Chart(
            title=title,
            says=says,
            svg=Markup(line_chart(shown, interval_s=interval_s, axis=axis, described=title)),  # noqa: S704 - ours
            legend=tuple((line.style, line.name) for line in shown),
        )

    def of_runs(values: Sequence[Sequence[int | None]]) -> list[Line]:
        return [
            Line(name=run.measured.name, style=style, values=one)
            for run, style, one in zip(runs, styles, values, strict=True)
        ]

    times, shares = Axis(say=duration, logarithmic=True), Axis(say=_whole_percent, most=1000)
    counts = Axis(say=lambda value: f"{value:,}")
    series = [run.measured.series for run in runs]
    charts: list[Chart] = []
    for lane in _lanes(comparison):
        charts.extend(
            chart(
                f"TTFT {name}, {lane}",
                "of requests that came in the interval, from their first attempt; logarithmic",
                times,
                of_runs([getattr(one, f"ttft_{name}_ms").get(lane, []) for one in series]),
            )
            for name in ("p50", "p99")
        )
    for group in ("all", *map(str, _lanes(comparison))):
        of = "" if group == "all" else f", {group}"
        charts.append(
            chart(
                f"Goodput over offered{of}",
                "requests finished within their lane's targets, of those that came in the interval",
                shares,
                of_runs([one.goodput_permille.get(group, []) for one in series]),
            )
        )
    charts.append(
        chart(
            "Bulk's share of the tokens let through",
            f"its floor is {percent(comparison.bulk_floor_permille)} while it waits",
            shares,
            of_runs([one.bulk_share_permille for one in series]),
        )
    )
    for lane in _lanes(comparison):
        charts.append(
            chart(
                f"Fairness between tenants, {lane}",
                "Jain's index of good work against weighted max-min shares, in percent",
                shares,
                of_runs([one.fairness_permille.get(lane, []) for one in series]),
            )
        )
        charts.append(
            chart(
                f"Age of the oldest in line, {lane}",
                "requests that wait at the gateway; without a policy nobody waits there",
                Axis(say=duration),
                of_runs([one.queue_age_ms.get(lane, []) for one in series]),
            )
        )
    charts.append(
        chart(
            "Refusals",
            "per interval, all reasons",
            counts,
            of_runs([[sum(some) for some in zip(*one.refusals.values(), strict=True)] for one in series]),
        )
    )
    charts.extend(
        chart(
            f"Refusals by reason, {run.measured.name}",
            "per interval",
            counts,
            [
                Line(name=reason, style=style, values=values)
                for (reason, values), style in zip(
                    run.measured.series.refusals.items(), REASON_STYLES, strict=False
                )
            ],
        )
        for run in runs
        if run.role in {Role.POLICY, Role.OTHER_POLICY} and run.measured.series.refusals
    )
    charts.append(
        chart(
            "Waiting inside the engines",
            "requests; what a gateway cannot reorder any more",
            counts,
            of_runs([one.engine_waiting for one in series]),
        )
    )
    charts.append(
        chart(
            "KV cache in use",
            "mean of the engines, highest in the interval",
            shares,
            of_runs([one.kv_permille for one in series]),
        )
    )
    return [one for one in charts if one.legend]


def _detail_rows(comparison: Comparison, lane: Lane, tenant: str | None) -> list[Row]:
    """A lane's figures, or one tenant's in it."""
    found: list[Figures | None] = [
        run.measured.lanes.get(lane) if tenant is None else run.measured.tenants.get(lane, {}).get(tenant)
        for run in comparison.runs
    ]

    return [
        (name, tuple("–" if one is None else say(one) for one in found))  # noqa: RUF001 - a dash in a table
        for name, say in _DETAILS
    ]


def _lost(figures: Figures) -> str:
    return f"{figures.hung_up_requests:,} / {figures.unfinished_requests:,}"


def _three(values: Percentiles) -> str:
    three = (values.p50, values.p95, values.p99)
    if any(value is None or value >= 1_000 for value in three):
        return " / ".join("–" if value is None else f"{value / 1_000:.2f}" for value in three) + " s"  # noqa: RUF001 - a dash
    return " / ".join(f"{value}" for value in three) + " ms"


_DETAILS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("requests offered", lambda one: f"{one.offered_requests:,}"),
    ("served", lambda one: f"{one.served_requests:,}"),
    ("good", lambda one: f"{one.good_requests:,}"),
    ("good / offered", lambda one: percent(one.goodput_requests_permille)),
    ("… in tokens", lambda one: percent(one.goodput_permille)),
    ("refused for good", lambda one: f"{one.refused_requests:,}"),
    ("hung up / unfinished", _lost),
    ("attempts", lambda one: f"{one.attempts:,}"),
    ("TTFT p50 / p95 / p99", lambda one: _three(one.ttft_ms)),
    ("ITL p50 / p95 / p99", lambda one: _three(one.itl_ms)),
    ("in line p50 / p95 / p99", lambda one: _three(one.held_ms)),
)


def _lanes(comparison: Comparison) -> list[Lane]:
    return [lane for lane in Lane if any(lane in run.measured.lanes for run in comparison.runs)]


def _tenants(comparison: Comparison, lane: Lane) -> list[str | None]:
    names = {name for run in comparison.runs for name in run.measured.tenants.get(lane, {})}
    return [None, *sorted(names)]


def _percentile(run: Measured, lane: Lane, name: str) -> int | None:
    figures = run.lanes.get(lane)
    if figures is None:
        return None
    value: int | None = getattr(figures.ttft_ms, name)
    return value


def _ratio(permille: int | None) -> str:
    return "–" if permille is None else f"{permille / 1000:.3f}"  # noqa: RUF001 - a dash in a table


def _whole_percent(permille: int) -> str:
    return f"{permille / 10:g} %"
