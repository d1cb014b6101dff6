"""The facts of an exchange, for those who watch: one when it is decided, one when it is settled."""

from __future__ import annotations

from extproc.domain.contract import Refusal
from extproc.domain.frozen import frozen
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane
from extproc.domain.trace_context import TraceContext


@frozen
class Decision:
    """The one fact of an exchange, for metrics, traces and access logs. Every text in it is the policy's.

    `trace` is the caller's span, checked: the only thing in it that came from outside.
    `lease_id` is the reservation id that the access log carries back. `waited_ms` is how long the request
    was held for want of room, `None` if the ledger was never asked. `fallback` is the label of the fallback that
    it was sent to. `deadline_ms` is how long the first token may take: what the client declared, or its lane's if
    that is less. Durations in microseconds are from the arrival of the request's head.
    """

    outcome: Outcome
    lease_id: str
    reason: Reason | None = None
    tenant: str | None = None
    tier: str | None = None
    model: str | None = None
    lane: Lane | None = None
    pool: str | None = None
    replica: str | None = None
    dialect: str | None = None
    stream: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None
    work_units: int | None = None
    deadline_ms: int | None = None
    retry_after_ms: int | None = None
    predicted_ttft_ms: int | None = None
    waited_ms: int | None = None
    fallback: str | None = None
    policy_version: str = ""
    read_us: int | None = None
    counted_us: int | None = None
    decided_us: int = 0
    refusal: Refusal | None = None
    trace: TraceContext | None = None


@frozen
class Settled:
    """What an access-log record says about a decided exchange.

    The reserved amounts come back with the record, from Envoy's dynamic metadata; the used amounts are the
    engine's own, `None` when the answer carried no usage. Times are Envoy's: `ttfb_ms` from the request's
    first byte to the response's first byte, `duration_ms` to its last. `engine_failed` is whether the engine is to
    blame for how it ended; `None` if that cannot be told. `deadline_ms` is the decision's, `None` if the record has
    none.
    """

    lease_id: str
    tenant: str
    model: str
    lane: str
    pool: str
    replica: str
    status: int
    flags: str
    input_tokens: int
    output_tokens: int
    work_units: int
    used_input_tokens: int | None
    used_output_tokens: int | None
    ttfb_ms: int | None
    duration_ms: int | None
    engine_failed: bool | None = None
    deadline_ms: int | None = None
