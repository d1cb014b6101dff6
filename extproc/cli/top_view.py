"""The terminal's view of `/state` and `/recent`. Names are shown as text: nothing in them is markup."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BAR_CELLS = 30
LEVELS = " ▁▂▃▄▅▆▇█"
TENANTS = 8
DECISION_CELLS = (
    *((8, None), (22, 28), (11, None), (6, None), (6, None), (9, None)),
    *((None, 14), (None, 16), (None, 12)),
)
"""Least and most width of the columns of the last decisions: names give way first."""
REASONS = 12


def view(
    state: Mapping[str, Any] | None,
    recent: Mapping[str, Any],
    *,
    trouble: str | None = None,
    rows: int | None = None,
) -> RenderableType:
    """Everything at once; `rows` is the height of the screen, where there is one to fit into."""
    parts: list[RenderableType] = []
    if trouble is not None:
        parts.append(Text(trouble, style="bold red"))
    if state is None:
        return Group(*parts)
    parts.extend(_head(state))
    pools = state.get("pools", [])
    if pools:
        parts += [_titled("Pools", _pools(pools)), _titled("Lanes", _lanes(pools))]
    parts.append(_titled("Decisions, last 10 minutes", _reasons(recent.get("history", {}))))
    tenants = [one for one in state.get("tenants", []) if one["inflight_tokens"] > 0][:TENANTS]
    if tenants:
        total = sum(pool["reserved_tokens"] for pool in pools)
        parts.append(_titled("Tenants by share", _tenants(tenants, total)))
    left = 15 if rows is None else max(3, rows - _used(state, recent) - 3)
    decisions = recent.get("decisions", [])[:left]
    if decisions:
        parts.append(_titled("Last decisions", _decisions(decisions)))
    return Group(*parts)


def printable(value: object) -> str:
    """A name as it may be printed on a terminal: no control characters, and a dash for nothing."""
    if value is None:
        return "-"
    return "".join(char if char.isprintable() else "�" for char in str(value))


def bar(reserved: int, limit: int, guard: int, *, cells: int = BAR_CELLS) -> Text:
    """What is reserved, free and guard band, in proportion; red where more is reserved than may be."""
    whole = max(1, limit + guard)
    guarded = round(cells * guard / whole)
    filled = min(cells, max(1 if reserved > 0 else 0, round(cells * reserved / whole)))
    text = Text("█" * filled, style="red" if reserved > limit else "blue")
    text.append("·" * max(0, cells - filled - guarded), style="dim")
    text.append("░" * min(guarded, cells - filled), style="yellow")
    return text


def spark(counts: Sequence[int]) -> str:
    """A row of blocks, as high as the counts."""
    most = max([1, *counts])
    return "".join(LEVELS[-(-count * (len(LEVELS) - 1) // most)] for count in counts)


def span(milliseconds: int) -> str:
    """A duration, as short as it can be read."""
    if milliseconds < 1_000:
        return f"{milliseconds} ms"
    seconds = milliseconds / 1_000
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _used(state: Mapping[str, Any], recent: Mapping[str, Any]) -> int:
    """Lines that the parts above the last decisions take."""
    pools = state.get("pools", [])
    replicas = sum(len(pool["replicas"]) for pool in pools)
    lanes = sum(len(pool["lanes"]) for pool in pools)
    reasons = min(REASONS, len(recent.get("history", {}).get("counts", {})))
    tenants = min(TENANTS, len(state.get("tenants", [])))
    frames = 3 * 5
    return 3 + replicas + lanes + reasons + tenants + frames


def _head(state: Mapping[str, Any]) -> list[RenderableType]:
    service, policy = state["service"], state["policy"]
    head = Text()
    if service["draining"]:
        head.append("draining", style="bold yellow")
    elif state.get("ledger_error"):
        head.append("ledger not answering", style="bold yellow")
    else:
        head.append("serving", style="bold green")
    for name, value in (
        ("policy", policy["version"]),
        ("streams", f"{service['open_streams']:,}"),
        ("leases", f"{state['leases']:,}" if "leases" in state else "-"),
        ("up", span(service["uptime_s"] * 1_000)),
        ("version", service["version"]),
    ):
        head.append(f"   {name} ", style="dim")
        head.append(printable(value))
    parts: list[RenderableType] = [head]
    for what, problem in (
        ("ledger", state.get("ledger_error")),
        ("policy not taken", policy["last_reload_error"]),
    ):
        if problem:
            parts.append(Text(f"{what}: {printable(problem)}", style="red"))
    return parts


def _titled(title: str, table: Table) -> Panel:
    return Panel(table, title=title, title_align="left", border_style="dim", padding=(0, 1))


def _table(*columns: str) -> Table:
    """A table without lines; columns whose name ends in a dot are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    for column in columns:
        is_number = column.endswith(".")
        table.add_column(column.rstrip("."), justify="right" if is_number else "left", no_wrap=True)
    return table


def _pools(pools: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "pool", "replica", "reserved · free ░ guard", "reserved.", "limit.", "requests.", "to read.", "engine"
    )
    for pool in pools:
        for replica in pool["replicas"]:
            table.add_row(
                Text(printable(pool["pool"]), style="bold"),
                Text(printable(replica["replica"])),
                bar(replica["reserved_tokens"], replica["limit_tokens"], replica["guard_band_tokens"]),
                f"{replica['reserved_tokens']:,}",
                f"{replica['limit_tokens']:,}",
                f"{replica['requests']:,}/{replica['request_cap']:,}",
                f"{replica['prefill_backlog_tokens']:,}",
                _engine(replica.get("engine")),
            )
    return table


def _engine(engine: Mapping[str, Any] | None) -> Text:
    """What an engine tells of itself, as short as it can be: waiting, running, and used cache."""
    if engine is None:
        return Text("-")
    if engine["breaker"] == "open":
        return Text(f"gone, {span(engine['breaker_wait_ms'])}", style="bold red")
    if engine["breaker"] == "half_open":
        return Text("tried again", style="yellow")
    if not engine["is_probed"]:
        return Text("not asked", style="dim")
    if engine["is_stale"]:
        return Text("unknown", style="yellow")
    waiting, running, used = (
        engine[name] for name in ("waiting_requests", "running_requests", "kv_used_permille")
    )
    parts = [
        *([] if waiting is None else [f"{waiting:,} wait"]),
        *([] if running is None else [f"{running:,} run"]),
        *([] if used is None else [f"KV {used / 10:.0f} %"]),
    ]
    return Text(", ".join(parts), style="yellow" if waiting else "")


def _lanes(pools: Sequence[Mapping[str, Any]]) -> Table:
    table = _table(
        "pool", "lane", "share of its limit", "reserved.", "limit.", "requests.", "waiting.", "oldest."
    )
    for pool in pools:
        for lane in pool["lanes"]:
            queued = lane["queued_requests"]
            table.add_row(
                Text(printable(pool["pool"]), style="bold"),
                Text(f"{printable(lane['lane'])}, suspended", style="yellow")
                if lane.get("suspended")
                else Text(printable(lane["lane"])),
                bar(lane["reserved_tokens"], lane["limit_tokens"], 0),
                f"{lane['reserved_tokens']:,}",
                f"{lane['limit_tokens']:,}",
                f"{lane['requests']:,}",
                Text(f"{queued:,}", style="yellow" if queued else ""),
                span(lane["oldest_queued_ms"]) if queued else "-",
            )
    return table


def _reasons(history: Mapping[str, Any]) -> Table:
    table = _table("what", "count.", "share.", "over time")
    counts: Mapping[str, Sequence[int]] = history.get("counts", {})
    refusals = set(history.get("refusals", ()))
    totals = {name: sum(one) for name, one in counts.items()}
    everything = sum(totals.values())
    order = sorted(counts, key=lambda name: (name in refusals, -totals[name], name))
    for name in order[:REASONS]:
        if totals[name]:
            style = "red" if name in refusals else "green" if name == "admitted" else "yellow"
            table.add_row(
                Text(printable(name).replace("_", " "), style=style),
                f"{totals[name]:,}",
                f"{100 * totals[name] / everything:.1f} %",
                Text(spark(counts[name]), style=style),
            )
    if not everything:
        table.add_row(Text("no requests", style="dim"))
    return table


def _tenants(tenants: Sequence[Mapping[str, Any]], total: int) -> Table:
    table = _table("tenant", "tier", "share of tokens in flight", "share.", "tokens.", "requests.")
    for tenant in tenants:
        held = tenant["inflight_tokens"]
        table.add_row(
            Text(printable(tenant["tenant"])),
            Text(printable(tenant["tier"])),
            bar(held, max(total, held), 0),
            f"{100 * held / max(total, held):.1f} %",
            f"{held:,}",
            f"{tenant['inflight_requests']:,}",
        )
    return table


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("when", "decision", "lane", "input.", "output.", "took.", "tenant", "model", "replica")
    table.padding = (0, 1, 0, 0)
    for column, cells in zip(table.columns, DECISION_CELLS, strict=True):
        column.min_width, column.max_width = cells
    styles = {"admitted": "green", "refused": "red", "abandoned": "yellow"}
    for one in decisions:
        what = (one["reason"] or one["decision"]).replace("_", " ")
        if one["retry_after_ms"]:
            what += f", retry in {span(one['retry_after_ms'])}"
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(one["at_ms"] / 1_000)),
            Text(printable(what), style=styles.get(one["decision"], "")),
            printable(one["lane"]),
            _tokens(one["input_tokens"]),
            _tokens(one["output_tokens"]),
            f"{one['decided_us'] / 1_000:.1f} ms",
            Text(printable(one["tenant"])),
            Text(printable(one["model"])),
            Text(printable(one["replica"] or one["pool"])),
        )
    return table


def _tokens(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
