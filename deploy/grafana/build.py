"""Builds `dashboard.json`: python deploy/grafana/build.py

The rows follow the order in which overload happens and in which an operator looks: what arrives, what is decided,
who waits, what engines do, whose it is, the ledger, and the service itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parent / "dashboard.json"

WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

# Selected workers, lanes and pools. Balances of a shared ledger are the largest over workers, never the sum.
LANE = 'instance=~"$instance", lane=~"$lane"'
POOL = 'instance=~"$instance", pool=~"$pool"'
BOTH = 'instance=~"$instance", lane=~"$lane", pool=~"$pool"'
ALL = 'instance=~"$instance"'
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A graph: `queries` are pairs of expression and legend, `unit` is one of Grafana's."""

    title: str
    queries: Sequence[tuple[str, str]]
    help: str
    unit: str = "short"
    width: int = 8
    stacked: bool = False
    largest: float | None = None
    limit: float | None = None


def quantile(share: float, name: str, labels: str, by: str) -> str:
    """A quantile of one of our histograms, by `by`."""
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({name}_bucket{{{labels}}}[{RATE}])))"


def rate(name: str, labels: str, by: str) -> str:
    """A counter's rate, summed by `by`."""
    return f"sum by ({by}) (rate({name}{{{labels}}}[{RATE}]))"


def ratio(part: str, whole: str) -> str:
    """One counter's rate over another's, where the other moves."""
    return f"sum(rate({part}[{RATE}])) / (sum(rate({whole}[{RATE}])) > 0)"


def held(name: str, labels: str, by: str, of: str = "replica") -> str:
    """A balance: the largest over workers of each `of`, summed by `by`."""
    return f"sum by ({by}) (max by ({by}, {of}) ({name}{{{labels}}}))"


def told(name: str) -> str:
    """What is known of each replica: the largest over workers, each of which asks by itself."""
    return f"max by (pool, replica) ({name}{{{POOL}}})"


ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Arrivals",
        (
            Panel(
                title="Offered requests",
                queries=[(rate("extproc_requests_total", LANE, "lane"), "{{lane}}")],
                help="Everything that asked, refused or not. A jump here explains most of what follows below.",
                unit="reqps",
                stacked=True,
            ),
            Panel(
                title="Offered tokens to read",
                queries=[(rate("extproc_input_tokens_sum", LANE, "lane"), "{{lane}}")],
                help="Input tokens per second. Load is tokens, not requests.",
                unit="short",
                stacked=True,
            ),
            Panel(
                title="Prompt size",
                queries=[
                    (quantile(0.5, "extproc_input_tokens", LANE, "lane"), "p50 {{lane}}"),
                    (quantile(0.99, "extproc_input_tokens", LANE, "lane"), "p99 {{lane}}"),
                ],
                help="Median and largest prompts in tokens.",
            ),
        ),
    ),
    (
        "Admission",
        (
            Panel(
                title="Decisions",
                queries=[(rate("extproc_requests_total", LANE, "decision"), "{{decision}}")],
                help="Admitted, refused, abandoned by the client before an answer.",
                unit="reqps",
                stacked=True,
            ),
            Panel(
                title="Refusals by reason",
                queries=[
                    (rate("extproc_requests_total", LANE + ', decision="refused"', "reason"), "{{reason}}")
                ],
                help="The reason is what the client was told. See the runbook for what each one asks of you.",
                unit="reqps",
                stacked=True,
            ),
            Panel(
                title="Refused for want of capacity",
                queries=[("lane:extproc_capacity_refusals:ratio_rate5m", "{{lane}}")],
                help="Share of the offered load. The alert fires at a tenth.",
                unit="percentunit",
                limit=0.1,
            ),
            Panel(
                title="Sent elsewhere",
                queries=[(rate("extproc_fallbacks_total", LANE, "fallback"), "{{fallback}}")],
                help="Without room at their first choice: served by the policy's fallback, or sent to a region.",
                unit="reqps",
                stacked=True,
            ),
            Panel(
                title="Goodput over offered load",
                queries=[("lane:extproc_goodput:ratio_rate5m", "{{lane}}")],
                help="Answered well and in time, over everything that was asked.",
                unit="percentunit",
                largest=1.0,
            ),
            Panel(
                title="Time to decide",
                queries=[
                    (quantile(0.5, "extproc_decision_seconds", LANE, "lane"), "p50 {{lane}}"),
                    (quantile(0.99, "extproc_decision_seconds", LANE, "lane"), "p99 {{lane}}"),
                ],
                help="From the request's head to the decision, a hold in the queue included.",
                unit="s",
            ),
            Panel(
                title="Time to count tokens",
                queries=[
                    (quantile(0.5, "extproc_count_seconds", LANE, "lane"), "p50 {{lane}}"),
                    (quantile(0.99, "extproc_count_seconds", LANE, "lane"), "p99 {{lane}}"),
                ],
                help="Decoding and counting: the service's own work.",
                unit="s",
            ),
        ),
    ),
    (
        "Queue",
        (
            Panel(
                title="Waiting requests",
                queries=[(f"max by (pool, lane) (extproc_queue_requests{{{BOTH}}})", "{{lane}} in {{pool}}")],
                help="Requests that are held, by lane.",
                stacked=True,
            ),
            Panel(
                title="Oldest waiting request",
                queries=[
                    (f"max by (pool, lane) (extproc_queue_oldest_seconds{{{BOTH}}})", "{{lane}} in {{pool}}"),
                    (f"max by (lane) (extproc_lane_residence_seconds{{{LANE}}}) > 0", "longest, {{lane}}"),
                ],
                help="Beside how long the lane may make anybody wait.",
                unit="s",
            ),
            Panel(
                title="Hold before admission",
                queries=[
                    (
                        quantile(0.95, "extproc_hold_seconds", LANE + ', decision="admitted"', "lane"),
                        "p95 {{lane}}",
                    )
                ],
                help="Ledger and queue together, for requests that got in.",
                unit="s",
            ),
            Panel(
                title="Waiting tokens to read",
                queries=[
                    (f"max by (pool, lane) (extproc_queue_prefill_tokens{{{BOTH}}})", "{{lane}} in {{pool}}")
                ],
                help="Prefill work that is still in the queue.",
                stacked=True,
            ),
            Panel(
                title="Waits that refused clients are told",
                queries=[(quantile(0.5, "extproc_retry_after_seconds", LANE, "lane"), "p50 {{lane}}")],
                help="A growing median means that the estimate of drain grows.",
                unit="s",
            ),
        ),
    ),
    (
        "Engine",
        (
            Panel(
                title="Reserved over limit",
                queries=[("pool:extproc_reserved:ratio", "{{pool}}")],
                help="1 means that a pool is full. Guard bands are not part of the limit.",
                unit="percentunit",
                largest=1.0,
            ),
            Panel(
                title="Headroom",
                queries=[(held("extproc_replica_headroom_tokens", POOL, "pool"), "{{pool}}")],
                help="Tokens that could still be reserved.",
            ),
            Panel(
                title="Reserved by replica",
                queries=[
                    (
                        f"max by (pool, replica) (extproc_replica_reserved_tokens{{{POOL}}})",
                        "{{replica}} of {{pool}}",
                    )
                ],
                help="Replicas of a pool should move together.",
            ),
            Panel(
                title="Reserved by lane",
                queries=[
                    (f"max by (pool, lane) (extproc_lane_reserved_tokens{{{BOTH}}})", "{{lane}} in {{pool}}")
                ],
                help="Who holds the pool.",
                stacked=True,
            ),
            Panel(
                title="Prefill backlog",
                queries=[(held("extproc_replica_prefill_backlog_tokens", POOL, "pool"), "{{pool}}")],
                help="Input tokens that admitted requests have yet to have read.",
            ),
            Panel(
                title="Requests on replicas",
                queries=[(held("extproc_replica_requests", POOL, "pool"), "{{pool}}")],
                help="Beside the tokens: many small requests can fill the request cap first.",
            ),
            Panel(
                title="Time to first byte",
                queries=[
                    (quantile(0.5, "extproc_ttfb_seconds", BOTH, "lane, pool"), "p50 {{lane}} in {{pool}}"),
                    (quantile(0.95, "extproc_ttfb_seconds", BOTH, "lane, pool"), "p95 {{lane}} in {{pool}}"),
                ],
                help="As clients see it. Slower at the same load: a slow engine. Slower with load: past the knee.",
                unit="s",
            ),
            Panel(
                title="Completions by status",
                queries=[(rate("extproc_completions_total", BOTH, "status"), "{{status}}")],
                help="What became of admitted requests. none: the client left.",
                unit="reqps",
                stacked=True,
            ),
            Panel(
                title="Over-reservation",
                queries=[("pool:extproc_over_reservation:ratio_rate30m", "{{pool}}")],
                help="Output tokens reserved for each one used. Large values: room that clients' max_tokens waste.",
            ),
            Panel(
                title="Count drift",
                queries=[("model:extproc_count_drift:ratio_rate30m", "{{model}}")],
                help="Share of requests where the engine counted another number of input tokens. Should be nothing.",
                unit="percentunit",
            ),
            Panel(
                title="Answers without usage",
                queries=[
                    (rate("extproc_usage_missing_total", POOL, "pool, status"), "{{status}} of {{pool}}")
                ],
                help="Charged as reserved.",
                unit="reqps",
            ),
        ),
    ),
    (
        "Engine signals",
        (
            Panel(
                title="Waiting in engines",
                queries=[(told("extproc_engine_waiting_requests"), "{{replica}} of {{pool}}")],
                help="As engines tell. More than admission let through: somebody else uses them, too.",
            ),
            Panel(
                title="Running in engines",
                queries=[(told("extproc_engine_running_requests"), "{{replica}} of {{pool}}")],
                help="As engines tell. At their batch limit, with others waiting: that engine is full.",
            ),
            Panel(
                title="KV cache used",
                queries=[(told("extproc_engine_kv_used_ratio"), "{{replica}} of {{pool}}")],
                help="As vLLM and SGLang tell. Near 1 they throw answers out of the batch and begin anew.",
                unit="percentunit",
                largest=1.0,
            ),
            Panel(
                title="Suspended lanes",
                queries=[(f"max by (pool, lane) (extproc_lane_suspended{{{BOTH}}})", "{{lane}} in {{pool}}")],
                help="1: refused until the engines have caught up. Only pools whose policy has overload control.",
                largest=1.0,
            ),
            Panel(
                title="Open breakers",
                queries=[(told("extproc_breaker_open"), "{{replica}} of {{pool}}")],
                help="1: the replica gets no requests.",
                largest=1.0,
            ),
            Panel(
                title="Probes",
                queries=[(rate("extproc_probes_total", POOL, "result"), "{{result}}")],
                help="How asking engines for their load ended. refused: nobody listens. miss: unknown numbers only.",
                unit="reqps",
                stacked=True,
            ),
            Panel(
                title="Age of load signals",
                queries=[(told("extproc_signal_age_seconds"), "{{replica}} of {{pool}}")],
                help="How old the last good reading of each replica is. Stale means unknown.",
                unit="s",
            ),
        ),
    ),
    (
        "Tenants",
        (
            Panel(
                title="Tokens in flight by tier",
                queries=[(f"max by (tier) (extproc_tier_inflight_tokens{{{ALL}}})", "{{tier}}")],
                help="Tenants are exported by name only where the operator asks for the largest ones.",
                stacked=True,
                width=8,
            ),
            Panel(
                title="Active tenants by tier",
                queries=[(f"max by (tier) (extproc_tier_active_tenants{{{ALL}}})", "{{tier}}")],
                help="Tenants with anything in flight.",
                stacked=True,
            ),
            Panel(
                title="Refused for a tenant's own quota",
                queries=[
                    (
                        rate(
                            "extproc_requests_total",
                            LANE + ', reason=~"tenant_rate|tenant_inflight|exceeds_quota"',
                            "reason",
                        ),
                        "{{reason}}",
                    )
                ],
                help="Not a lack of capacity: somebody is over what was agreed.",
                unit="reqps",
                stacked=True,
            ),
        ),
    ),
    (
        "Ledger",
        (
            Panel(
                title="Call time",
                queries=[(quantile(0.99, "extproc_ledger_call_seconds", ALL, "verb"), "p99 {{verb}}")],
                help="Round trips to the shared store. Empty with the in-memory ledger.",
                unit="s",
            ),
            Panel(
                title="Calls",
                queries=[(rate("extproc_ledger_calls_total", ALL, "verb, result"), "{{verb}} {{result}}")],
                help="By outcome.",
                unit="reqps",
            ),
            Panel(
                title="Operations per call",
                queries=[
                    (
                        ratio(
                            f"extproc_ledger_operations_total{{{ALL}}}",
                            f'extproc_ledger_calls_total{{{ALL}, result="ok"}}',
                        ),
                        "batch",
                    )
                ],
                help="How many operations share a round trip.",
            ),
            Panel(
                title="Ledger events",
                queries=[
                    (
                        f"sum by (event) (increase(extproc_ledger_events_total{{{ALL}}}[{RATE}]))",
                        "{{event}}",
                    )
                ],
                help="Late and local grants, leases re-asserted or orphaned, settles dropped: rare, or a symptom.",
            ),
            Panel(
                title="Posture",
                queries=[
                    (f"count by (posture) (extproc_ledger_posture{{{ALL}}} == 1)", "{{posture}}"),
                    (f"sum(extproc_ledger_breaker_open{{{ALL}}})", "breakers open"),
                ],
                help="How many workers decide how. Everything but normal wants attention.",
                stacked=True,
            ),
            Panel(
                title="Leases",
                queries=[
                    (f"max(extproc_leases{{{ALL}}})", "held"),
                    (f"max(extproc_orphaned_leases{{{ALL}}})", "of workers that are gone"),
                    (f"max(extproc_unbooked_leases{{{ALL}}})", "waiting for their record"),
                ],
                help="Held leases follow the open streams.",
            ),
            Panel(
                title="Leases taken back",
                queries=[
                    (f"sum(increase(extproc_leases_reclaimed_total{{{ALL}}}[{RATE}]))", "reclaimed"),
                    (f"sum(increase(extproc_leases_unbooked_total{{{ALL}}}[{RATE}]))", "without a record"),
                ],
                help="Should be nothing.",
            ),
        ),
    ),
    (
        "Service",
        (
            Panel(
                title="CPU per worker",
                queries=[("instance:extproc_cpu_per_worker:rate5m", "{{instance}}")],
                help="One worker is one core.",
                unit="percentunit",
                limit=0.9,
            ),
            Panel(
                title="Event loop lag",
                queries=[(f"max by (instance) (extproc_event_loop_lag_seconds{{{ALL}}})", "{{instance}}")],
                help="The largest delay lately. Decisions wait at least this long.",
                unit="s",
                limit=0.05,
            ),
            Panel(
                title="Memory",
                queries=[(f"max by (instance) (process_resident_memory_bytes{{{ALL}}})", "{{instance}}")],
                help="Resident memory per worker.",
                unit="bytes",
            ),
            Panel(
                title="Open streams",
                queries=[(f"max by (instance) (extproc_open_streams{{{ALL}}})", "{{instance}}")],
                help="One per request that is in flight. Should be spread evenly.",
            ),
            Panel(
                title="Prompts counted",
                queries=[
                    (rate("extproc_tokenizer_prompts_total", ALL, "where"), "{{where}}"),
                    (f"sum(rate(extproc_tokenizer_overloaded_total{{{ALL}}}[{RATE}]))", "too much to do"),
                ],
                help="At once, or in threads.",
                unit="reqps",
            ),
            Panel(
                title="Count cache",
                queries=[
                    (
                        ratio(
                            f'extproc_tokenizer_pieces_total{{{ALL}, result="hit"}}',
                            f"extproc_tokenizer_pieces_total{{{ALL}}}",
                        ),
                        "hits",
                    )
                ],
                help="Share of pieces whose count was known.",
                unit="percentunit",
                largest=1.0,
            ),
            Panel(
                title="Policy versions",
                queries=[(f"count by (version) (extproc_policy_info{{{ALL}}})", "{{version}}")],
                help="Workers by the policy they decide by. More than one only while it is rolled out.",
                stacked=True,
            ),
            Panel(
                title="Policy reloads",
                queries=[
                    (
                        f"sum by (result) (increase(extproc_policy_reloads_total{{{ALL}}}[{RATE}]))",
                        "{{result}}",
                    )
                ],
                help="Errors keep the old policy.",
            ),
            Panel(
                title="Telemetry dropped",
                queries=[
                    (rate("extproc_telemetry_dropped_total", ALL, "signal"), "{{signal}}"),
                    (f"sum(rate(extproc_observer_faults_total{{{ALL}}}[{RATE}]))", "faults"),
                ],
                help="What the collector did not take. Requests are not affected.",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for name, row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": name,
                "id": len(panels) + 1,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
            }
        )
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + 8
            panels.append(_graph(panel, len(panels) + 1, {"h": 8, "w": panel.width, "x": x, "y": y}))
            x += panel.width
        y += 8
    return {
        "title": "Token-aware admission",
        "uid": "extproc-admission",
        "tags": ["extproc", "llm"],
        "description": "Rows follow the order of diagnosis: arrivals, admission, queue, engine, tenants, ledger.",
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                _variable("instance", "Worker", "label_values(extproc_build_info, instance)"),
                _variable("lane", "Lane", "label_values(extproc_requests_total, lane)"),
                _variable("pool", "Pool", "label_values(extproc_replica_limit_tokens, pool)"),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Policy",
                    "datasource": SOURCE,
                    "enable": True,
                    "iconColor": "blue",
                    "expr": "changes(max(extproc_policy_loaded_timestamp_seconds)[1m:]) > 0",
                    "titleFormat": "Policy changed",
                }
            ]
        },
        "links": [],
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 5,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
        custom["thresholdsStyle"] = {"mode": "line"}
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": custom,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.largest is not None:
        defaults["max"] = panel.largest
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
                "exemplar": "_bucket" in expression,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    """Write the file."""
    DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
