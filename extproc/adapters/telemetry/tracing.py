"""The observer that traces. Whether to, is decided first; an exchange that is not sampled costs nothing more.

No span is open while a request is in flight, and no context is attached to any task: spans are written down
when the facts are complete, with the times that the facts carry. So they end exactly once on every way out,
and none can leak into another request.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision as SamplingDecision
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

import extproc
from extproc.adapters.telemetry.spans import EXCHANGE, SpanSource
from extproc.domain.decision import Decision, Settled
from extproc.domain.outcome import Outcome
from extproc.domain.trace_context import TraceContext

AWAITED = 10_000
"""Sampled admissions whose record is awaited; beyond that the oldest ones go without an answer's span."""

SAMPLED = TraceFlags(TraceFlags.SAMPLED)

Exemplify = Callable[[Decision, str], None]
"""Told of each sampled decision, with its trace id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Awaited:
    context: SpanContext
    arrived_ns: int
    decided_ns: int


class Tracing:
    """Implements `Observer`: hands finished spans to `put`, which must not block.

    `now_ns` is the wall clock, in nanoseconds since the epoch.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        put: Callable[[ReadableSpan], None],
        resource: Resource,
        exemplify: Exemplify | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._sampler = sampler
        self._put = put
        self._source = SpanSource(
            resource=resource, scope=InstrumentationScope("extproc", extproc.__version__)
        )
        self._exemplify = exemplify
        self._now_ns = now_ns
        self._span_ids = _span_ids()
        self._awaited: OrderedDict[str, _Awaited] = OrderedDict()
        self._follows_callers = isinstance(sampler, ParentBased) and (
            "remoteParentNotSampled:AlwaysOffSampler" in str(sampler.get_description())  # type: ignore[no-untyped-call]
        )

    @property
    def awaited(self) -> int:
        """Sampled admissions whose record has not come yet."""
        return len(self._awaited)

    def decided(self, decision: Decision) -> None:
        """See `Observer.decided`."""
        caller = decision.trace
        if caller is not None and not caller.sampled and self._follows_callers:
            return
        parent = _span_context(caller) if caller is not None else None
        trace_id = parent.trace_id if parent is not None else random.getrandbits(128) or 1
        above = Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
        sampling = self._sampler.should_sample(above, trace_id, EXCHANGE, kind=SpanKind.SERVER)
        if sampling.decision is not SamplingDecision.RECORD_AND_SAMPLE:
            return
        ended_ns = self._now_ns()
        context = SpanContext(
            trace_id,
            next(self._span_ids),
            is_remote=False,
            trace_flags=SAMPLED,
            trace_state=sampling.trace_state,
        )
        self._put(
            self._source.exchange(
                decision,
                context=context,
                parent=parent,
                ended_ns=ended_ns,
                more=dict(sampling.attributes or {}),
            )
        )
        for step in self._source.steps(decision, parent=context, span_ids=self._span_ids, ended_ns=ended_ns):
            self._put(step)
        if decision.outcome is Outcome.ADMITTED:
            self._await(decision, context, ended_ns)
        if self._exemplify is not None:
            self._exemplify(decision, f"{trace_id:032x}")

    def settled(self, settled: Settled) -> None:
        """See `Observer.settled`. A record of another worker's exchange finds nothing here, and adds nothing."""
        awaited = self._awaited.pop(settled.lease_id, None)
        if awaited is None:
            return
        context = SpanContext(
            awaited.context.trace_id, next(self._span_ids), is_remote=False, trace_flags=SAMPLED
        )
        self._put(
            self._source.answer(
                settled,
                context=context,
                parent=awaited.context,
                started_ns=awaited.decided_ns,
                arrived_ns=awaited.arrived_ns,
                ended_ns=max(self._now_ns(), awaited.decided_ns),
            )
        )

    def _await(self, decision: Decision, context: SpanContext, decided_ns: int) -> None:
        self._awaited[decision.lease_id] = _Awaited(
            context=context,
            arrived_ns=decided_ns - decision.decided_us * 1_000,
            decided_ns=decided_ns,
        )
        if len(self._awaited) > AWAITED:
            self._awaited.popitem(last=False)


def _span_context(caller: TraceContext) -> SpanContext:
    return SpanContext(
        int(caller.trace_id, 16),
        int(caller.span_id, 16),
        is_remote=True,
        trace_flags=SAMPLED if caller.sampled else TraceFlags(TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([caller.state]) if caller.state is not None else None,
    )


def _span_ids() -> Iterator[int]:
    """Random span ids; zero is not one."""
    while True:
        yield random.getrandbits(64) or 1
