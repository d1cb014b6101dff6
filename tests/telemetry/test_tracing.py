"""Spans: whose child they are, when there are none, what they say, and that they end exactly once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace.status import StatusCode

from extproc.adapters.telemetry import tracing as tracing_module
from extproc.adapters.telemetry.tracing import Tracing
from extproc.domain.contract import CONTRACT
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.trace_context import TraceContext
from tests.telemetry.facts import a_decision, a_settled

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
CALLER = TraceContext(trace_id=TRACE, span_id=SPAN, sampled=True, state="vendor=1")
NOW_NS = 1_700_000_000_000_000_000


class Collected:
    """A tracer whose finished spans are kept, on a clock that the test sets."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.spans: list[ReadableSpan] = []
        self.now_ns = NOW_NS
        self.exemplars: list[tuple[str, str]] = []
        self.tracing = Tracing(
            sampler=sampler or ParentBased(ALWAYS_ON),
            put=self.spans.append,
            resource=Resource.get_empty(),
            exemplify=lambda decision, trace_id: self.exemplars.append((decision.lease_id, trace_id)),
            now_ns=lambda: self.now_ns,
        )

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def test_an_exchange_is_a_child_of_its_callers_span() -> None:
    """The span continues the caller's trace, as a child of the caller's span, with its state."""
    collected = Collected()
    collected.tracing.decided(a_decision(trace=CALLER))
    span = collected.named("extproc.admission")

    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN
    assert span.parent.is_remote
    assert span.context.trace_state.get("vendor") == "1"
    assert span.kind is trace.SpanKind.SERVER
    assert collected.exemplars == [("lease-1", TRACE)]


def test_a_request_without_a_caller_begins_a_trace() -> None:
    """Without a caller the span is a root of a trace of its own, another one each time."""
    collected = Collected()
    collected.tracing.decided(a_decision())
    collected.tracing.decided(a_decision())
    roots = [span for span in collected.spans if span.name == "extproc.admission"]

    assert [span.parent for span in roots] == [None, None]
    assert len({span.context.trace_id for span in roots}) == 2


@pytest.mark.parametrize("sampler", [ParentBased(ALWAYS_ON), ALWAYS_OFF, ParentBased(TraceIdRatioBased(1.0))])
def test_what_the_caller_does_not_sample_is_not_traced(sampler: Sampler) -> None:
    """An unsampled caller gets no span, no exemplar, and nothing that waits for its record."""
    collected = Collected(sampler)
    unsampled = TraceContext(trace_id=TRACE, span_id=SPAN, sampled=False)
    collected.tracing.decided(a_decision(trace=unsampled))
    collected.tracing.settled(a_settled())

    assert (collected.spans, collected.exemplars, collected.tracing.awaited) == ([], [], 0)


def test_an_unsampled_request_costs_no_question() -> None:
    """With a sampler that follows its callers, an unsampled one is not even looked at."""

    class Counting(ParentBased):
        asked = 0

        def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
            self.asked += 1
            return super().should_sample(*args, **kwargs)

    sampler = Counting(ALWAYS_ON)
    collected = Collected(sampler)
    collected.tracing.decided(a_decision(trace=TraceContext(trace_id=TRACE, span_id=SPAN, sampled=False)))
    assert sampler.asked == 0
    collected.tracing.decided(a_decision(trace=CALLER))
    assert sampler.asked == 1


def test_a_sampler_that_does_not_follow_callers_is_asked_all_the_same() -> None:
    """An operator who samples everything gets everything, whatever callers say."""
    collected = Collected(ALWAYS_ON)
    collected.tracing.decided(a_decision(trace=TraceContext(trace_id=TRACE, span_id=SPAN, sampled=False)))
    assert collected.named("extproc.admission").context.trace_flags.sampled


def test_roots_are_sampled_at_the_configured_ratio() -> None:
    """A ratio of a quarter traces about a quarter of the requests that have no caller."""
    random.seed(3)
    collected = Collected(ParentBased(TraceIdRatioBased(0.25)))
    for _ in range(2_000):
        collected.tracing.decided(a_decision(outcome=Outcome.ABANDONED))
    assert 400 < len([span for span in collected.spans if span.name == "extproc.admission"]) < 600


def test_the_span_says_what_was_decided_and_why() -> None:
    """Conventional names where there are some, the admission's own otherwise, and no unknown values."""
    collected = Collected()
    collected.tracing.decided(a_decision(trace=CALLER, predicted_ttft_ms=80))

    assert attributes(collected.named("extproc.admission")) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.operation.name": "chat",
        "extproc.admission.decision": "admitted",
        "extproc.admission.lane": "interactive",
        "extproc.admission.pool": "chat",
        "extproc.admission.replica": "r0",
        "extproc.admission.tenant": "acme",
        "extproc.admission.tier": "gold",
        "extproc.admission.dialect": "openai_chat",
        "extproc.admission.input_tokens": 1_000,
        "extproc.admission.output_tokens": 500,
        "extproc.admission.work_units": 1_500,
        "extproc.admission.reserved_tokens": 1_500,
        "extproc.admission.policy_version": "test",
        "extproc.admission.predicted_ttft_ms": 80,
        "extproc.admission.reservation": "lease-1",
        "extproc.admission.stream": False,
    }


def test_the_steps_fill_the_span_without_gaps() -> None:
    """Reading, counting and reserving are children that follow each other from arrival to decision."""
    collected = Collected()
    collected.tracing.decided(a_decision(trace=CALLER))
    whole = collected.named("extproc.admission")
    steps = [collected.named(name) for name in ("extproc.read", "extproc.count", "extproc.reserve")]

    assert whole.end_time == NOW_NS
    assert whole.start_time == NOW_NS - 1_400_000
    edges = [whole.start_time, *(span.end_time for span in steps)]
    assert edges == [NOW_NS - 1_400_000, NOW_NS - 1_300_000, NOW_NS - 1_000_000, NOW_NS]
    assert [span.start_time for span in steps] == edges[:-1]
    for span in steps:
        assert span.parent is not None
        assert span.parent.span_id == whole.context.span_id
        assert span.context.trace_id == whole.context.trace_id
    assert not [span for span in collected.spans if span.name == "extproc.hold"]


def test_a_hold_is_a_step_of_its_own() -> None:
    """A request that waited for room shows the wait after its reservation was asked for, to the decision."""
    collected = Collected()
    collected.tracing.decided(a_decision(trace=CALLER, decided_us=901_400, waited_ms=900))
    reserve, hold = collected.named("extproc.reserve"), collected.named("extproc.hold")

    assert reserve.end_time == hold.start_time == NOW_NS - 900_000_000
    assert hold.end_time == NOW_NS
    assert attributes(hold)["extproc.admission.waited_ms"] == 900
    assert attributes(collected.named("extproc.admission"))["extproc.admission.waited_ms"] == 900


@pytest.mark.parametrize("reason", list(Reason))
def test_refusals_are_not_errors_and_faults_are(reason: Reason) -> None:
    """Only a failure of the service itself marks its span as failed."""
    collected = Collected()
    collected.tracing.decided(a_decision(trace=CALLER, outcome=Outcome.REFUSED, reason=reason))
    span = collected.named("extproc.admission")

    failed = reason is Reason.INTERNAL_ERROR
    assert (span.status.status_code is StatusCode.ERROR) is failed
    assert attributes(span)["http.response.status_code"] == CONTRACT[reason].status
    assert attributes(span)["extproc.admission.reason"] == str(reason)
    assert "extproc.admission.reserved_tokens" not in attributes(span)
    assert ("error.type" in attributes(span)) is failed


def test_the_record_adds_the_answer_to_the_same_trace() -> None:
    """When the access log tells the end, a child says how long the answer took and what it used."""
    collected = Collected()
    collected.tracing.decided(a_decision(trace=CALLER))
    collected.now_ns += 2_000_000_000
    collected.tracing.settled(a_settled())
    answer, whole = collected.named("extproc.answer"), collected.named("extproc.admission")

    assert answer.parent == whole.context
    assert (answer.start_time, answer.end_time) == (NOW_NS, NOW_NS + 2_000_000_000)
    assert attributes(answer)["gen_ai.usage.input_tokens"] == 1_000
    assert attributes(answer)["gen_ai.usage.output_tokens"] == 100
    assert attributes(answer)["http.response.status_code"] == 200
    (first_byte,) = answer.events
    assert first_byte.timestamp == NOW_NS - 1_400_000 + 120_000_000


def test_records_of_strangers_and_repeated_ones_add_nothing() -> None:
    """A record is the end of one exchange of this worker's, once."""
    collected = Collected()
    collected.tracing.decided(a_decision(trace=CALLER))
    collected.tracing.settled(a_settled(lease_id="another workers"))
    collected.tracing.settled(a_settled())
    collected.tracing.settled(a_settled())

    assert [span.name for span in collected.spans].count("extproc.answer") == 1
    assert collected.tracing.awaited == 0


def test_records_that_never_come_are_not_waited_for_in_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a record is bounded: the oldest is given up."""
    monkeypatch.setattr(tracing_module, "AWAITED", 10)
    collected = Collected()
    for number in range(25):
        collected.tracing.decided(a_decision(trace=CALLER, lease_id=f"lease-{number}"))
    assert collected.tracing.awaited == 10
    collected.tracing.settled(a_settled(lease_id="lease-3"))
    assert not [span for span in collected.spans if span.name == "extproc.answer"]
    collected.tracing.settled(a_settled(lease_id="lease-24"))
    assert collected.named("extproc.answer").parent is not None


decisions = st.builds(
    a_decision,
    outcome=st.sampled_from([Outcome.ADMITTED, Outcome.REFUSED, Outcome.ABANDONED]),
    reason=st.none() | st.sampled_from(list(Reason)),
    read_us=st.none() | st.integers(0, 500),
    counted_us=st.none() | st.integers(500, 900),
    decided_us=st.integers(900, 5_000_000),
    work_units=st.none() | st.integers(1, 10_000),
    waited_ms=st.none() | st.integers(0, 10_000),
    model=st.none() | st.just("tiny"),
    dialect=st.none() | st.sampled_from(["openai_chat", "tgi"]),
    trace=st.none() | st.just(CALLER),
)


@given(st.lists(decisions, max_size=5))
def test_every_decision_is_one_finished_span(walk: Sequence[Any]) -> None:
    """On every way out there is exactly one span, it is finished, and its children lie within it."""
    collected = Collected()
    for decision in walk:
        collected.tracing.decided(decision)
    spans = [span for span in collected.spans if span.name == "extproc.admission"]

    assert len(spans) == len(walk)
    wholes = {span.context.span_id: span for span in spans}
    for span in collected.spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
        if span.name != "extproc.admission":
            assert span.parent is not None
            whole = wholes[span.parent.span_id]
            assert whole.start_time is not None
            assert whole.end_time is not None
            assert whole.start_time <= span.start_time
            assert span.end_time <= whole.end_time
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert dict(otel_context.get_current()) == {}
