"""A policy and its problems, as people and programs read them on a terminal."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from extproc.adapters.policy_file import (
    CheckedPolicy,
    PolicyError,
    Problem,
    effective_document,
    without_key_digests,
)
from extproc.domain.policy import (
    ApiKeyIdentity,
    HeaderIdentity,
    Identity,
    Lane,
    LanePolicy,
    Policy,
    Pool,
    Tier,
)

PLAIN_WIDTH = 150
"""Columns when the output is a file or a pipe: wide enough for every table."""

MOST_PROBLEMS = 200
"""Beyond this, a list helps nobody."""


def as_json(checked: CheckedPolicy) -> str:
    """The effective policy, its version and its warnings; of key digests only their first characters."""
    document = {
        "version": checked.policy.version,
        "policy": without_key_digests(effective_document(checked.policy)),
        "warnings": [_problem_values(warning) for warning in checked.warnings],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def problems_as_json(error: PolicyError) -> str:
    """What is wrong with a policy, for programs."""
    document = {"problems": [_problem_values(problem) for problem in error.problems]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def show_problems(error: PolicyError) -> None:
    """List on standard error everything that is wrong with a policy."""
    console = _console(stderr=True)
    count = len(error.problems)
    head = f"{error.source or 'policy'}: {count} problem{'' if count == 1 else 's'}"
    console.print(Text(head, style="bold red"))
    _list(console, error.problems, style="red")


def show_warnings(warnings: Sequence[Problem]) -> None:
    """List on standard error what is likely not meant."""
    if warnings:
        console = _console(stderr=True)
        count = len(warnings)
        console.print(Text(f"{count} warning{'' if count == 1 else 's'}", style="bold yellow"))
        _list(console, warnings, style="yellow")


def show_policy(policy: Policy, counted: Mapping[str, str] | None = None) -> None:
    """Show a policy as tables, and its version; `counted` says for each model how its tokens are counted."""
    console = _console(stderr=False)
    for table in (
        _models(policy),
        _lanes(policy),
        _pools(policy),
        _engines(policy),
        _capacity(policy),
        _tiers(policy),
    ):
        console.print(table)
    for name, how in (counted or {}).items():
        console.print(Text(f"Tokens of {name} are counted {how}."))
    anonymous = "refused" if policy.anonymous is None else f"counted as {policy.anonymous.id}"
    limits, headers = policy.limits, policy.request_headers
    console.print(
        Text.assemble(
            f"Tenants are known by {_identity(policy.identity)}; unknown callers are {anonymous}.\n"
            f"Bodies up to {limits.body_bytes} bytes, {limits.json_depth} levels deep; "
            f"a prompt token costs {_ratio(limits.prefill_weight_permille)} of an output token; "
            f"leases last {_time(limits.lease_ttl_ms)}, orphans {_time(limits.orphan_grace_ms)}.\n"
            f"Clients lower their lane with {headers.intent} and shorten their deadline with "
            f"{headers.deadline_ms}.\n"
            f"Envoy's message timeout must be longer than {_time(policy.longest_residence_ms)}.\n\n",
            ("policy version ", "bold"),
            (policy.version, "bold green"),
        )
    )


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream,
        width=None if stream.isatty() else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


def _list(console: Console, problems: Sequence[Problem], *, style: str) -> None:
    for problem in problems[:MOST_PROBLEMS]:
        where = "" if problem.line is None else f"line {problem.line}  "
        value = "" if problem.value is None else f" = {problem.value}"
        console.print(
            Text.assemble("  ", (where, "dim"), (problem.path or "(the file)", style), value, overflow="fold")
        )
        console.print(Padding(Text(problem.message), (0, 0, 0, 6), expand=False))
    if len(problems) > MOST_PROBLEMS:
        console.print(f"  and {len(problems) - MOST_PROBLEMS} more")


def _problem_values(problem: Problem) -> dict[str, str | int | None]:
    return {
        "line": problem.line,
        "path": problem.path,
        "value": problem.value,
        "message": problem.message,
    }


def _table(title: str, columns: Iterable[str], *, numbers: frozenset[str] = frozenset()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in numbers else "left", overflow="fold", no_wrap=False
        )
    return table


def _models(policy: Policy) -> Table:
    columns = ("model", "also", "window", "default output", "cost", "lanes")
    table = _table("Models", columns, numbers=frozenset({"window", "default output", "cost"}))
    for model in policy.models.values():
        default = model.default_output_tokens
        table.add_row(
            _text(model.name),
            _text(", ".join(model.aliases)),
            _amount(model.context_tokens),
            "what the window leaves" if default is None else _amount(default),
            _ratio(model.cost_factor_permille),
            _text(", ".join(f"{lane} → {model.lanes[lane]}" for lane in Lane if lane in model.lanes)),
        )
    return table


def _lanes(policy: Policy) -> Table:
    columns = (
        "lane", "input", "output", "deadline", "held", "share", "queue", "queue tokens", "floor", "prefill", "spare",
        "ledger down",
    )  # fmt: skip
    table = _table("Lanes", columns, numbers=frozenset(columns[1:-1]))
    for lane in policy.lanes.values():
        table.add_row(
            lane.lane,
            _cap(lane, lane.max_input_tokens),
            _cap(lane, lane.max_output_tokens),
            _time(lane.deadline_ms),
            _time(lane.residence_ms),
            _percent(lane.share_permille),
            _amount(lane.queue_requests),
            _amount(lane.queue_tokens),
            _percent(lane.floor_permille),
            _percent(lane.prefill_share_permille),
            _amount(lane.spare_replicas),
            lane.posture,
        )
    return table


def _pools(policy: Policy) -> Table:
    columns = (
        "pool",
        "cluster",
        "replicas",
        "usable tokens",
        "guard band",
        "requests",
        "prefill/s",
        "decode/s",
        "window",
    )
    table = _table("Pools", columns, numbers=frozenset(columns[2:]))
    for pool in policy.pools.values():
        table.add_row(
            _text(pool.name),
            _text(pool.cluster),
            _amount(len(pool.replicas)),
            _amount(sum(pool.usable_tokens(replica) for replica in pool.replicas)),
            _percent(pool.guard_band_permille),
            _amount(pool.request_cap * len(pool.replicas)),
            _amount(pool.prefill_tokens_per_s),
            _amount(pool.decode_tokens_per_s),
            _time(pool.prefill_window_ms),
        )
    return table


def _engines(policy: Policy) -> Table:
    columns = (
        "pool",
        "asked",
        "believed for",
        "failures in a row",
        "failed",
        "pause",
        "suspends at",
        "goes on",
    )
    table = _table("Engines", columns, numbers=frozenset())
    for pool in policy.pools.values():
        breaker, overload = pool.breaker, pool.overload
        asked = sum(replica.address is not None for replica in pool.replicas)
        thresholds = []
        if overload is not None and overload.waiting_requests is not None:
            thresholds.append(f"{_amount(overload.waiting_requests)} waiting")
        if overload is not None and overload.kv_used_permille is not None:
            thresholds.append(f"{_percent(overload.kv_used_permille)} of KV cache")
        table.add_row(
            _text(pool.name),
            f"{asked}, every {_time(pool.probe.interval_ms)}" if asked else "-",
            _time(pool.probe.stale_ms) if asked else "-",
            _amount(breaker.failures),
            f"{_percent(breaker.error_permille)} of {_amount(breaker.least_requests)} or more",
            _time(breaker.open_ms),
            " or ".join(thresholds) or "never",
            "-" if overload is None else f"below {_percent(overload.leave_permille)} of it",
        )
    return table


def _capacity(policy: Policy) -> Table:
    columns = ("pool", "lane", "tokens at once", "largest request", "longest prompt in time")
    table = _table("Capacity", columns, numbers=frozenset(columns[2:]))
    for name, lane in _routes(policy):
        pool, lane_policy = policy.pools[name], policy.lanes[lane]
        lane_tokens = pool.lane_limit_tokens(lane_policy.share_permille)
        largest = _largest_request_tokens(policy, pool, lane_policy)
        in_time = lane_policy.deadline_ms * pool.prefill_tokens_per_s // 1000
        table.add_row(
            _text(name),
            lane,
            _amount(lane_tokens),
            _amount(largest),
            _amount(min(largest, in_time, lane_policy.max_input_tokens)),
        )
    return table


def _tiers(policy: Policy) -> Table:
    columns = (
        "tier",
        "tenants",
        "tokens/min",
        "burst",
        "requests/min",
        "tokens in flight",
        "requests in flight",
        "weight",
        "lanes",
    )
    table = _table("Tiers", columns, numbers=frozenset(columns[1:-1]))
    tiers: dict[str, Tier] = {}
    sizes: Counter[str] = Counter()
    for tenant in policy.tenants.values():
        tiers[tenant.tier.name] = tenant.tier
        sizes[tenant.tier.name] += 1
    for name, tier in tiers.items():
        quota = tier.quota
        table.add_row(
            _text(name),
            _amount(sizes[name]),
            *(
                "-" if limit is None else _amount(limit)
                for limit in (
                    quota.tokens_per_minute,
                    quota.burst_tokens,
                    quota.requests_per_minute,
                    quota.inflight_tokens,
                    quota.inflight_requests,
                )
            ),
            _amount(tier.weight),
            ", ".join(lane for lane in Lane if lane in tier.lanes),
        )
    return table


def _routes(policy: Policy) -> list[tuple[str, Lane]]:
    routes = {(pool, lane) for model in policy.models.values() for lane, pool in model.lanes.items()}
    order = {name: position for position, name in enumerate(policy.pools)}
    return sorted(routes, key=lambda route: (order[route[0]], list(Lane).index(route[1])))


def _largest_request_tokens(policy: Policy, pool: Pool, lane: LanePolicy) -> int:
    """What one request of the lane may hold in the pool, by every limit but its tenant's."""
    windows = [
        model.context_tokens for model in policy.models.values() if model.lanes.get(lane.lane) == pool.name
    ]
    return min(
        lane.max_input_tokens + lane.max_output_tokens,
        pool.largest_usable_tokens,
        pool.lane_limit_tokens(lane.share_permille),
        max(windows),
    )


def _identity(identity: Identity) -> str:
    if isinstance(identity, HeaderIdentity):
        return f"the header {identity.header}, which a trusted filter must set"
    if isinstance(identity, ApiKeyIdentity):
        return f"the API key in {identity.header}"
    return f"the metadata {identity.namespace} at {' → '.join(identity.path)}"


def _text(text: str) -> Text:
    return Text(text)


def _amount(amount: int) -> str:
    return f"{amount:_}"


def _cap(lane: LanePolicy, tokens: int) -> str:
    return "any" if lane.lane is Lane.OVERFLOW else _amount(tokens)


def _ratio(permille: int) -> str:
    return f"{permille / 1000:g}"


def _percent(permille: int) -> str:
    return f"{permille / 10:g} %"


def _time(duration_ms: int) -> str:
    for unit_ms, unit in ((3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if duration_ms >= unit_ms and duration_ms % unit_ms == 0:
            return f"{duration_ms // unit_ms} {unit}"
    return f"{duration_ms} ms"
