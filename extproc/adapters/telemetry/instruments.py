"""Every metric of the service, as data: what is exported, under which name, and by which labels.

One set serves Prometheus and OpenTelemetry. Rows follow the order in which an operator looks: what arrives,
what is decided, what the engines did with it, what is held, and how the service itself is.

Labels are bounded by construction. A label is either a closed set of the domain (`CLOSED_LABELS`) or holds
names that the policy in force gave (`POLICY_LABELS`); whatever else arrives is exported as `other`, and what
is not known of a request as `none`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane

OTHER = "other"
NONE = "none"

CLOSED_LABELS: Mapping[str, frozenset[str]] = {
    "lane": frozenset(map(str, Lane)),
    "decision": frozenset(map(str, Outcome)),
    "reason": frozenset(map(str, Reason)),
    "status": frozenset({"1xx", "2xx", "3xx", "4xx", "5xx"}),
    "direction": frozenset({"input", "output"}),
    "result": frozenset({"ok", "error", "hit", "miss", "timeout", "late", "denied", "refused", "expired"}),
    "event": frozenset(
        {"breaker_opened", "late_grant", "local_grant", "reasserted", "orphaned", "settle_dropped", "failed"}
    ),
    "verb": frozenset(
        {"batch", "reserve", "release", "book", "renew", "reassert", "reclaim", "snapshot", "wait"}
    ),
    "where": frozenset({"inline", "pool"}),
    "posture": frozenset({"normal", "local", "closed", "open"}),
    "signal": frozenset({"traces", "metrics", "logs"}),
}
"""Labels whose values the program itself fixes."""

POLICY_LABELS = frozenset({"model", "pool", "replica", "tier", "tenant", "fallback"})
"""Labels whose values are names in the policy in force."""

FREE_LABELS = frozenset({"version", "python"})
"""Labels of the single-series `_info` metrics, whose values come from the build and the policy's hash."""


class Kind(StrEnum):
    """What may happen to a value: it grows, it goes up and down, or it is a distribution."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """One metric. `per_unit` recorded units make one exported unit, so that recording stays in integers.

    `bounds` are a histogram's upper bounds in recorded units, ascending. The exported name is `name`, which
    ends in the base unit; Prometheus adds `_total` to counters.
    """

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    bounds: tuple[int, ...] = ()
    per_unit: int = 1

    def __post_init__(self) -> None:
        for label in self.labels:
            if label not in POLICY_LABELS and label not in FREE_LABELS and label not in CLOSED_LABELS:
                raise ValueError(f"{self.name}: label {label!r} is not bounded; declare its values")
        if (self.kind is Kind.HISTOGRAM) != bool(self.bounds) or list(self.bounds) != sorted(
            set(self.bounds)
        ):
            raise ValueError(f"{self.name}: histograms, and only they, have ascending bounds")
        if self.unit and not self.name.endswith("_" + self.unit):
            raise ValueError(f"{self.name}: the name must end in its unit {self.unit!r}")


def _counter(name: str, help_: str, *labels: str, unit: str = "", per_unit: int = 1) -> Instrument:
    return Instrument(name=name, kind=Kind.COUNTER, help=help_, labels=labels, unit=unit, per_unit=per_unit)


def _gauge(name: str, help_: str, *labels: str, unit: str = "", per_unit: int = 1) -> Instrument:
    return Instrument(name=name, kind=Kind.GAUGE, help=help_, labels=labels, unit=unit, per_unit=per_unit)


def _seconds(name: str, help_: str, *labels: str, bounds: tuple[int, ...], per_unit: int) -> Instrument:
    return Instrument(
        name=name,
        kind=Kind.HISTOGRAM,
        help=help_,
        unit="seconds",
        labels=labels,
        bounds=bounds,
        per_unit=per_unit,
    )


def _tokens(name: str, help_: str, *labels: str) -> Instrument:
    return Instrument(name=name, kind=Kind.HISTOGRAM, help=help_, unit="tokens", labels=labels, bounds=TOKENS)


TOKENS = (16, 64, 256, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 1_000_000)
SHORT_US = (50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000)
"""The service's own work: microseconds to a second."""
HOLD_US = (
    *(500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000),
)
"""Deciding, including a hold in a queue."""
ANSWER_MS = (25, 50, 100, 150, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000)
"""What engines take."""
WAIT_MS = (250, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000)
SHARE_PERMILLE = (10, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1_000)

# Arrivals and decisions.
REQUESTS = _counter(
    "extproc_requests",
    "Inference requests by what was decided; the sum over decisions is the offered load.",
    *("lane", "decision", "reason", "model", "pool"),
)
FALLBACKS = _counter(
    "extproc_fallbacks",
    "Requests without room at their first choice that went elsewhere: admitted there, or sent to a region.",
    *("lane", "fallback", "decision"),
)
INPUT_TOKENS = _tokens("extproc_input_tokens", "Input tokens of counted requests.", "lane")
OUTPUT_TOKENS = _tokens(
    "extproc_requested_output_tokens", "Output tokens that a request may use, over all its choices.", "lane"
)
READ_SECONDS = _seconds(
    "extproc_read_seconds", "From the request's head to its whole body.", "lane", bounds=SHORT_US,
    per_unit=1_000_000,
)  # fmt: skip
COUNT_SECONDS = _seconds(
    "extproc_count_seconds", "Decoding the body and counting its tokens.", "lane", bounds=SHORT_US,
    per_unit=1_000_000,
)  # fmt: skip
HOLD_SECONDS = _seconds(
    "extproc_hold_seconds", "From the count to the decision: the ledger's answer and any hold in a queue.",
    "lane", "decision", bounds=HOLD_US, per_unit=1_000_000,
)  # fmt: skip
DECISION_SECONDS = _seconds(
    "extproc_decision_seconds", "From the request's head to the decision.", "lane", "decision",
    bounds=HOLD_US, per_unit=1_000_000,
)  # fmt: skip
RETRY_AFTER_SECONDS = _seconds(
    "extproc_retry_after_seconds", "Waits that refused clients were told.", "lane", bounds=WAIT_MS,
    per_unit=1_000,
)  # fmt: skip

# What became of admitted requests, from Envoy's access log.
COMPLETIONS = _counter(
    "extproc_completions",
    "Admitted requests that ended, by the status class the client saw.",
    *("lane", "pool", "status"),
)
GOODPUT = _counter(
    "extproc_goodput_requests",
    "Admitted requests answered 2xx whose first byte came within the client's, or else their lane's, deadline.",
    *("lane", "model"),
)
TTFB_SECONDS = _seconds(
    "extproc_ttfb_seconds", "From the request's first byte to the answer's first byte.", "lane", "pool",
    bounds=ANSWER_MS, per_unit=1_000,
)  # fmt: skip
ANSWER_SECONDS = _seconds(
    "extproc_answer_seconds", "From the request's first byte to the answer's last byte.", "lane", "pool",
    bounds=ANSWER_MS, per_unit=1_000,
)  # fmt: skip
RESERVED_TOKENS = _counter(
    "extproc_settled_reserved_tokens",
    "Tokens that were reserved for ended requests whose usage is known.",
    *("lane", "pool", "direction"), unit="tokens",
)  # fmt: skip
USED_TOKENS = _counter(
    "extproc_settled_used_tokens",
    "Tokens that those requests used; beside the reserved ones, the over-reservation.",
    *("lane", "pool", "direction"), unit="tokens",
)  # fmt: skip
OUTPUT_USE = Instrument(
    name="extproc_output_use_ratio",
    kind=Kind.HISTOGRAM,
    help="Used over reserved output tokens, per ended request.",
    unit="ratio",
    labels=("lane",),
    bounds=SHARE_PERMILLE,
    per_unit=1_000,
)
USAGE_MISSING = _counter(
    "extproc_usage_missing",
    "Ended requests whose record carries no usage: the reserved amount stays booked.",
    *("pool", "status"),
)
COUNT_CHECKED = _counter(
    "extproc_count_checked", "Ended requests whose count could be held against the engine's.", "model"
)
COUNT_DRIFT = _counter(
    "extproc_count_drift", "Of those, the ones where the engine counted another number of input tokens.",
    "model",
)  # fmt: skip
COUNT_DRIFT_TOKENS = _counter(
    "extproc_count_drift_tokens", "Sum of the absolute differences.", "model", unit="tokens"
)

# What is held, from the ledger. Every worker that shares a ledger reports the same numbers.
REPLICA_CEILING = _gauge(
    "extproc_replica_ceiling_tokens", "What a replica may hold, guard band included.", "pool", "replica",
    unit="tokens",
)  # fmt: skip
REPLICA_GUARD = _gauge(
    "extproc_replica_guard_band_tokens", "Part of the ceiling that is never reserved.", "pool", "replica",
    unit="tokens",
)  # fmt: skip
REPLICA_LIMIT = _gauge(
    "extproc_replica_limit_tokens", "Ceiling less guard band.", "pool", "replica", unit="tokens"
)
REPLICA_RESERVED = _gauge(
    "extproc_replica_reserved_tokens", "Tokens held on a replica.", "pool", "replica", unit="tokens"
)
REPLICA_HEADROOM = _gauge(
    "extproc_replica_headroom_tokens", "Limit less reserved, never negative.", "pool", "replica",
    unit="tokens",
)  # fmt: skip
REPLICA_REQUESTS = _gauge("extproc_replica_requests", "Requests on a replica.", "pool", "replica")
REPLICA_REQUEST_CAP = _gauge(
    "extproc_replica_request_cap", "Requests that a replica may have.", "pool", "replica"
)
REPLICA_PREFILL = _gauge(
    "extproc_replica_prefill_backlog_tokens", "Input tokens a replica has yet to read.", "pool", "replica",
    unit="tokens",
)  # fmt: skip
LANE_LIMIT = _gauge(
    "extproc_lane_limit_tokens", "What a lane may hold of a pool.", "pool", "lane", unit="tokens"
)
LANE_RESERVED = _gauge(
    "extproc_lane_reserved_tokens", "What a lane holds of a pool.", "pool", "lane", unit="tokens"
)
LANE_HEADROOM = _gauge(
    "extproc_lane_headroom_tokens", "Limit less reserved, never negative.", "pool", "lane", unit="tokens"
)
LANE_REQUESTS = _gauge("extproc_lane_requests", "Requests that a lane has in a pool.", "pool", "lane")
QUEUE_REQUESTS = _gauge("extproc_queue_requests", "Requests that wait.", "pool", "lane")
QUEUE_TOKENS = _gauge(
    "extproc_queue_prefill_tokens", "Input tokens of the requests that wait.", "pool", "lane", unit="tokens"
)
QUEUE_AGE = _gauge(
    "extproc_queue_oldest_seconds", "How long the oldest waiting request has waited.", "pool", "lane",
    unit="seconds", per_unit=1_000,
)  # fmt: skip
TIER_TOKENS = _gauge(
    "extproc_tier_inflight_tokens", "Tokens in flight of all tenants of a tier.", "tier", unit="tokens"
)
TIER_REQUESTS = _gauge(
    "extproc_tier_inflight_requests", "Requests in flight of all tenants of a tier.", "tier"
)
TIER_TENANTS = _gauge("extproc_tier_active_tenants", "Tenants of a tier with anything in flight.", "tier")
TENANT_TOKENS = _gauge(
    "extproc_tenant_inflight_tokens", "Tokens in flight of the largest tenants, where asked for.",
    "tenant", "tier", unit="tokens",
)  # fmt: skip
LANE_DEADLINE = _gauge(
    "extproc_lane_deadline_seconds",
    "The lane's objective: the time to the first token that its requests may take.",
    "lane", unit="seconds", per_unit=1_000,
)  # fmt: skip
LANE_RESIDENCE = _gauge(
    "extproc_lane_residence_seconds", "How long the lane may make a request wait.", "lane",
    unit="seconds", per_unit=1_000,
)  # fmt: skip
LEASES = _gauge("extproc_leases", "Leases that are held.")
ORPHANS = _gauge(
    "extproc_orphaned_leases", "Leases whose holder is gone: held until their record or their grace."
)
UNBOOKED_LEASES = _gauge("extproc_unbooked_leases", "Released leases that wait for their access-log record.")

# The ledger itself.
LEDGER_UP = _gauge("extproc_ledger_up", "Whether the ledger answered when this page was made.")
LEDGER_CALLS = _counter("extproc_ledger_calls", "Calls to the shared ledger.", "verb", "result")
LEDGER_CALL_SECONDS = _seconds(
    "extproc_ledger_call_seconds", "Round trips to the shared ledger.", "verb", bounds=SHORT_US,
    per_unit=1_000_000,
)  # fmt: skip
LEDGER_OPERATIONS = _counter(
    "extproc_ledger_operations", "Operations that were sent; over the calls, the batch size."
)
LEDGER_EVENTS = _counter(
    "extproc_ledger_events", "What should be rare with a shared ledger, by kind; see the runbook.", "event"
)
LEDGER_POSTURE = _gauge(
    "extproc_ledger_posture", "1 for what this worker does about its ledger right now.", "posture"
)
LEDGER_BREAKER = _gauge("extproc_ledger_breaker_open", "Whether the ledger's breaker is open.")
LEASES_RECLAIMED = _counter(
    "extproc_leases_reclaimed", "Leases of holders that were gone, taken back when their grace ended."
)
LEASES_UNBOOKED = _counter(
    "extproc_leases_unbooked", "Leases whose access-log record never came: the reserved amount stays booked."
)

# Counting.
TOKENIZER_PIECES = _counter("extproc_tokenizer_pieces", "Pieces looked up in the count cache.", "result")
TOKENIZER_PROMPTS = _counter(
    "extproc_tokenizer_prompts", "Prompts counted at once, or given to the threads.", "where"
)
TOKENIZER_FAILED = _counter("extproc_tokenizer_failed", "Prompts that have no count.")
TOKENIZER_OVERLOADED = _counter(
    "extproc_tokenizer_overloaded", "Prompts that were not counted because there was too much to do."
)
TOKENIZER_CACHE = _gauge("extproc_tokenizer_cache_entries", "Entries of the count cache.")
TOKENIZER_QUEUE = _gauge("extproc_tokenizer_queue_prompts", "Prompts in the counting threads' hands.")

# Signals from the engines.
SIGNAL_AGE = _gauge(
    "extproc_signal_age_seconds", "Age of the last good reading of a replica.", "pool", "replica",
    unit="seconds", per_unit=1_000,
)  # fmt: skip
SIGNAL_STALE = _gauge(
    "extproc_signal_stale", "1 where the reading is too old to be believed.", "pool", "replica"
)
LANE_SUSPENDED = _gauge(
    "extproc_lane_suspended", "1 where overload control has suspended a lane.", "pool", "lane"
)
BREAKER_OPEN = _gauge(
    "extproc_breaker_open", "1 where a replica's breaker is open: it gets no requests.", "pool", "replica"
)
BREAKER_OPENED = _counter(
    "extproc_breaker_opened", "How often a replica's breaker opened.", "pool", "replica"
)
PROBES = _counter(
    "extproc_probes", "Times that an engine was asked for its load, by how that ended.",
    "pool", "replica", "result",
)  # fmt: skip
ENGINE_WAITING = _gauge(
    "extproc_engine_waiting_requests", "Requests that wait in an engine, as it tells.", "pool", "replica"
)
ENGINE_RUNNING = _gauge(
    "extproc_engine_running_requests", "Requests that an engine runs, as it tells.", "pool", "replica"
)
ENGINE_KV_USED = _gauge(
    "extproc_engine_kv_used_ratio", "Used part of an engine's KV cache, as it tells.", "pool", "replica",
    unit="ratio", per_unit=1_000,
)  # fmt: skip

# The service.
OPEN_STREAMS = _gauge("extproc_open_streams", "ext_proc streams that are open: one per request in flight.")
DRAINING = _gauge("extproc_draining", "1 while this worker is about to stop.")
LOOP_LAG = _gauge(
    "extproc_event_loop_lag_seconds", "Largest delay of the event loop in the last half minute.",
    unit="seconds", per_unit=1_000_000,
)  # fmt: skip
ENVOY_DISAGREES = _gauge(
    "extproc_envoy_disagrees", "1 while Envoy's message_timeout is too short for the holds of the policy."
)
POLICY_RELOADS = _counter("extproc_policy_reloads", "Policy files that were read.", "result")
POLICY_LOADED_AT = _gauge(
    "extproc_policy_loaded_timestamp_seconds", "When the policy in force was loaded.", unit="seconds",
    per_unit=1_000,
)  # fmt: skip
POLICY_INFO = _gauge("extproc_policy_info", "Always 1; the version of the policy in force.", "version")
BUILD_INFO = _gauge("extproc_build_info", "Always 1; what is running.", "version", "python")
TELEMETRY_DROPPED = _counter(
    "extproc_telemetry_dropped", "Items that could not be exported and were dropped.", "signal"
)
OBSERVER_FAULTS = _counter("extproc_observer_faults", "Faults of the telemetry itself: none is expected.")
UNKNOWN_READINGS = _gauge(
    "extproc_unknown_readings",
    "Names that parts of the service count under and that are no metric: a mistake.",
)
SERIES_FOLDED = _counter(
    "extproc_metric_series_folded", "Times that a series over its metric's limit was counted as `other`."
)

INSTRUMENTS: Mapping[str, Instrument] = {
    instrument.name: instrument
    for instrument in list(globals().values())
    if isinstance(instrument, Instrument)
}
"""All of them by name, in the order in which they are exported."""
