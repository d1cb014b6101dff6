"""The spans of one exchange, written down after the fact.

A span per exchange, from the arrival of its head to the decision; below it what the time went into: reading
the body, counting its tokens, getting a reservation, and being held for want of room. When the access log
tells how the answer ended, one more child tells about the answer.

Names of attributes are OpenTelemetry's (`gen_ai.*`, `http.*`) where its conventions have one, and
`extproc.admission.*` otherwise. Every text is the policy's or a closed set's: nothing a client typed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.trace.status import Status, StatusCode

from extproc.domain.contract import CONTRACT, REDIRECT_STATUS
from extproc.domain.decision import Decision, Settled
from extproc.domain.outcome import Outcome, Reason

Attributes = dict[str, str | int | bool]

EXCHANGE = "extproc.admission"
READ = "extproc.read"
COUNT = "extproc.count"
RESERVE = "extproc.reserve"
HOLD = "extproc.hold"
ANSWER = "extproc.answer"

OPERATIONS: Mapping[str, str] = {
    "openai_chat": "chat",
    "openai_responses": "chat",
    "anthropic_messages": "chat",
    "openai_embeddings": "embeddings",
}
"""`gen_ai.operation.name` by dialect; every other dialect completes text."""

INTERNAL_FAULTS = frozenset({Reason.INTERNAL_ERROR})
"""A refusal is what this service is for. Only these are failures of the service itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSource:
    """What all spans of this process have in common."""

    resource: Resource
    scope: InstrumentationScope

    def exchange(
        self,
        decision: Decision,
        *,
        context: SpanContext,
        parent: SpanContext | None,
        ended_ns: int,
        more: Mapping[str, str | int | bool],
    ) -> ReadableSpan:
        """The span of the exchange itself; `more` are attributes that sampling adds."""
        fault = decision.reason in INTERNAL_FAULTS
        return self._span(
            EXCHANGE,
            context=context,
            parent=parent,
            kind=SpanKind.SERVER,
            started_ns=ended_ns - decision.decided_us * 1_000,
            ended_ns=ended_ns,
            attributes={**decision_attributes(decision), **more},
            status=Status(StatusCode.ERROR, str(decision.reason)) if fault else UNSET,
        )

    def steps(
        self, decision: Decision, *, parent: SpanContext, span_ids: Iterator[int], ended_ns: int
    ) -> Iterator[ReadableSpan]:
        """The children of the exchange's span, for the steps it got through."""
        arrived_ns = ended_ns - decision.decided_us * 1_000
        for name, from_us, to_us, attributes in _steps(decision):
            yield self._span(
                name,
                context=SpanContext(
                    parent.trace_id, next(span_ids), is_remote=False, trace_flags=parent.trace_flags
                ),
                parent=parent,
                kind=SpanKind.INTERNAL,
                started_ns=arrived_ns + from_us * 1_000,
                ended_ns=arrived_ns + to_us * 1_000,
                attributes=attributes,
            )

    def answer(
        self,
        settled: Settled,
        *,
        context: SpanContext,
        parent: SpanContext,
        started_ns: int,
        arrived_ns: int,
        ended_ns: int,
    ) -> ReadableSpan:
        """What became of an admitted request: from its admission to its record, with what it used."""
        events = []
        if settled.ttfb_ms is not None:
            at_ns = arrived_ns + settled.ttfb_ms * 1_000_000
            events.append(Event("first_byte", timestamp=min(max(at_ns, started_ns), ended_ns)))
        attributes: Attributes = {
            "http.response.status_code": settled.status,
            "extproc.admission.usage_known": settled.used_output_tokens is not None,
            "extproc.admission.reserved_tokens": settled.input_tokens + settled.output_tokens,
        }
        if settled.used_input_tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = settled.used_input_tokens
        if settled.used_output_tokens is not None:
            attributes["gen_ai.usage.output_tokens"] = settled.used_output_tokens
        if settled.ttfb_ms is not None:
            attributes["extproc.admission.ttfb_ms"] = settled.ttfb_ms
        if settled.flags:
            attributes["extproc.admission.response_flags"] = settled.flags
        return self._span(
            ANSWER,
            context=context,
            parent=parent,
            kind=SpanKind.INTERNAL,
            started_ns=started_ns,
            ended_ns=ended_ns,
            attributes=attributes,
            events=tuple(events),
        )

    def _span(
        self,
        name: str,
        *,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        started_ns: int,
        ended_ns: int,
        attributes: Attributes,
        events: tuple[Event, ...] = (),
        status: Status | None = None,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self.resource,
            attributes=attributes,
            events=events,
            kind=kind,
            status=status or UNSET,
            start_time=started_ns,
            end_time=ended_ns,
            instrumentation_scope=self.scope,
        )


UNSET = Status(StatusCode.UNSET)


def _steps(decision: Decision) -> Iterator[tuple[str, int, int, Attributes]]:
    """Name, begin and end in microseconds from the arrival, and what the step found."""
    read_us, counted_us = decision.read_us, decision.counted_us
    if read_us is None:
        return
    yield READ, 0, read_us, {}
    if counted_us is None:
        return
    counted: Attributes = {}
    if decision.input_tokens is not None:
        counted["extproc.admission.input_tokens"] = decision.input_tokens
    yield COUNT, read_us, counted_us, counted
    if decision.work_units is None:
        return
    decided_us = decision.decided_us
    held_us = max(counted_us, decided_us - (decision.waited_ms or 0) * 1_000)
    reserved: Attributes = {"extproc.admission.work_units": decision.work_units}
    if decision.replica is not None:
        reserved["extproc.admission.replica"] = decision.replica
    if decision.reason is not None:
        reserved["extproc.admission.reason"] = str(decision.reason)
    yield RESERVE, counted_us, held_us, reserved
    if held_us < decided_us:
        yield HOLD, held_us, decided_us, {"extproc.admission.waited_ms": decision.waited_ms or 0}


def decision_attributes(decision: Decision) -> Attributes:
    """What a decision says, as span attributes. What is not known is left out."""
    refused = decision.outcome is Outcome.REFUSED
    named: dict[str, str | int | bool | None] = {
        "extproc.admission.decision": str(decision.outcome),
        "extproc.admission.reason": None if decision.reason is None else str(decision.reason),
        "extproc.admission.lane": None if decision.lane is None else str(decision.lane),
        "extproc.admission.pool": decision.pool,
        "extproc.admission.replica": decision.replica,
        "extproc.admission.fallback": decision.fallback,
        "extproc.admission.tenant": decision.tenant,
        "extproc.admission.tier": decision.tier,
        "extproc.admission.dialect": decision.dialect,
        "extproc.admission.input_tokens": decision.input_tokens,
        "extproc.admission.output_tokens": decision.output_tokens,
        "extproc.admission.work_units": decision.work_units,
        "extproc.admission.policy_version": decision.policy_version,
        "extproc.admission.predicted_ttft_ms": decision.predicted_ttft_ms,
        "extproc.admission.waited_ms": decision.waited_ms,
        "extproc.admission.retry_after_ms": decision.retry_after_ms,
        "extproc.admission.reservation": decision.lease_id,
        "extproc.admission.stream": decision.stream,
        "gen_ai.request.model": decision.model,
        "gen_ai.operation.name": (
            OPERATIONS.get(decision.dialect, "text_completion") if decision.dialect is not None else None
        ),
        "http.response.status_code": (
            None
            if not refused or decision.reason is None
            else REDIRECT_STATUS
            if decision.fallback is not None
            else CONTRACT[decision.reason].status
        ),
        "error.type": str(decision.reason) if decision.reason in INTERNAL_FAULTS else None,
    }
    if decision.outcome is Outcome.ADMITTED and decision.work_units is not None:
        tokens = (decision.input_tokens or 0) + (decision.output_tokens or 0)
        named["extproc.admission.reserved_tokens"] = tokens
    return {name: value for name, value in named.items() if value is not None}
