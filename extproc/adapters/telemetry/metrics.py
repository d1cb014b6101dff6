"""The observer that counts: facts of exchanges in, families of series out.

`decided` and `settled` run inside every request, so they do nothing but add integers. Everything that has
to look things up, such as the ledger's balances or other parts' own counters, waits for `collect`.
"""

from __future__ import annotations

import asyncio
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import extproc
from extproc.adapters.telemetry import instruments as i
from extproc.adapters.telemetry.accumulators import Cell, Series, Vocabulary, put
from extproc.adapters.telemetry.balances import balance_readings
from extproc.adapters.telemetry.instruments import (
    ANSWER_MS,
    HOLD_US,
    INSTRUMENTS,
    NONE,
    OTHER,
    SHARE_PERMILLE,
    SHORT_US,
    TOKENS,
    WAIT_MS,
    Instrument,
    Kind,
)
from extproc.domain.decision import Decision, Settled
from extproc.domain.policy import Policy
from extproc.domain.snapshot import Snapshot

STATUS_CLASSES = (NONE, "1xx", "2xx", "3xx", "4xx", "5xx")

RECORDED = (
    *(
        i.REQUESTS,
        i.FALLBACKS,
        i.INPUT_TOKENS,
        i.OUTPUT_TOKENS,
        i.READ_SECONDS,
        i.COUNT_SECONDS,
        i.HOLD_SECONDS,
    ),
    *(i.DECISION_SECONDS, i.RETRY_AFTER_SECONDS, i.COMPLETIONS, i.GOODPUT, i.TTFB_SECONDS, i.ANSWER_SECONDS),
    *(i.RESERVED_TOKENS, i.USED_TOKENS, i.OUTPUT_USE, i.USAGE_MISSING),
    *(i.COUNT_CHECKED, i.COUNT_DRIFT, i.COUNT_DRIFT_TOKENS, i.LEDGER_CALL_SECONDS),
)
"""Instruments that are recorded here; the others are read when somebody asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A number that another part of the service keeps: `name` is an instrument's, `value` in recorded units."""

    name: str
    value: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """One value of a bucket, and the trace that it belongs to."""

    value: int
    trace_id: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A histogram cell at one instant: one count per bound and one beyond the last, not cumulative.

    `exemplars` are the last traced values, by bucket.
    """

    total: int
    counts: tuple[int, ...]
    exemplars: Mapping[int, Exemplar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All series of one instrument at one instant, in recorded units."""

    instrument: Instrument
    series: tuple[tuple[tuple[str, ...], int | Buckets], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecisionCells:
    """Where a decision of one kind is recorded."""

    requests: Cell
    input_tokens: Cell
    output_tokens: Cell
    read: Cell
    count: Cell
    hold: Cell
    decision: Cell
    retry_after: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndCells:
    """Where a settled request of one kind is recorded. `deadline_ms` is its lane's."""

    deadline_ms: int
    completions: Cell
    goodput: Cell
    ttfb: Cell
    answer: Cell
    reserved_input: Cell
    reserved_output: Cell
    used_input: Cell
    used_output: Cell
    output_use: Cell
    usage_missing: Cell
    checked: Cell
    drift: Cell
    drift_tokens: Cell


ROWS_LIMIT = 4_096
"""Kinds of decision whose cells are kept at hand; beyond that all are looked up anew."""


Read = dict[str, dict[tuple[str, ...], int]]
"""Values by instrument and labels, in recorded units."""

SLICE_READINGS = 100
"""Readings that are taken before others get their turn."""


class Metrics:
    """Implements `Observer`. Everything runs on the event loop's thread.

    `readings` are asked at every collection for what others count. `top_tenants` is how many tenants are
    exported by name: none unless an operator asks for it.
    """

    def __init__(
        self, *, readings: Iterable[Callable[[], Iterable[Reading]]] = (), top_tenants: int = 0
    ) -> None:
        self._readings = tuple(readings)
        self._top_tenants = top_tenants
        self._vocabulary = Vocabulary()
        self._deadline_ms: Mapping[str, int] = {}
        self._residence_ms: Mapping[str, int] = {}
        self._policy_version = NONE
        self._folded = 0
        self._unknown_readings: set[str] = set()
        self._series = {
            instrument.name: Series(instrument, self._vocabulary, self._fold) for instrument in RECORDED
        }
        self._exemplars: dict[tuple[str, ...], dict[int, Exemplar]] = {}
        self._decisions: dict[tuple[str | None, ...], _DecisionCells] = {}
        self._ends: dict[tuple[str, ...], _EndCells] = {}

    def policy_changed(self, policy: Policy) -> None:
        """From now on `policy` names what may be a label; series with other names are forgotten."""
        everybody = [*policy.tenants.values(), *([policy.anonymous] if policy.anonymous else [])]
        self._vocabulary.learn(
            {
                "model": frozenset(policy.models),
                "pool": frozenset(policy.pools),
                "replica": frozenset(
                    replica.name for pool in policy.pools.values() for replica in pool.replicas
                ),
                "tier": frozenset(tenant.tier.name for tenant in everybody),
                "tenant": frozenset(tenant.id for tenant in everybody),
                "fallback": frozenset(
                    one.label for model in policy.models.values() for one in model.fallbacks
                ),
            }
        )
        self._deadline_ms = {str(lane): row.deadline_ms for lane, row in policy.lanes.items()}
        self._residence_ms = {str(lane): row.residence_ms for lane, row in policy.lanes.items()}
        self._policy_version = policy.version
        self._exemplars.clear()
        self._decisions.clear()
        self._ends.clear()
        for series in self._series.values():
            series.prune()

    def decided(self, decision: Decision) -> None:
        """See `Observer.decided`."""
        key = (decision.lane, decision.outcome, decision.reason, decision.model, decision.pool)
        cells = self._decisions.get(key)
        if cells is None:
            cells = self._decision_cells(key)
        cells.requests[0] += 1
        if decision.fallback is not None:
            self._cell(i.FALLBACKS, decision.lane or NONE, decision.fallback, decision.outcome)[0] += 1
        decided_us, read_us, counted_us = decision.decided_us, decision.read_us, decision.counted_us
        put(cells.decision, HOLD_US, decided_us)
        if read_us is not None:
            put(cells.read, SHORT_US, read_us)
            if counted_us is not None:
                put(cells.count, SHORT_US, counted_us - read_us)
                if decision.work_units is not None:
                    put(cells.hold, HOLD_US, decided_us - counted_us)
        if decision.input_tokens is not None:
            put(cells.input_tokens, TOKENS, decision.input_tokens)
        if decision.output_tokens is not None:
            put(cells.output_tokens, TOKENS, decision.output_tokens)
        if decision.retry_after_ms is not None:
            put(cells.retry_after, WAIT_MS, decision.retry_after_ms)

    def settled(self, settled: Settled) -> None:
        """See `Observer.settled`."""
        hundreds = settled.status // 100
        status = STATUS_CLASSES[hundreds] if 0 <= hundreds < len(STATUS_CLASSES) else OTHER
        key = (settled.lane, settled.pool, settled.model, status)
        cells = self._ends.get(key)
        if cells is None:
            cells = self._end_cells(key)
        cells.completions[0] += 1
        ttfb_ms = settled.ttfb_ms
        if ttfb_ms is not None:
            put(cells.ttfb, ANSWER_MS, ttfb_ms)
            # An answer that was cut short keeps its 200; the flags say that somebody cut it.
            deadline_ms = cells.deadline_ms if settled.deadline_ms is None else settled.deadline_ms
            if hundreds == 2 and ttfb_ms <= deadline_ms and not settled.flags:
                cells.goodput[0] += 1
        if settled.duration_ms is not None:
            put(cells.answer, ANSWER_MS, settled.duration_ms)
        used_input_tokens, used_output_tokens = settled.used_input_tokens, settled.used_output_tokens
        if used_input_tokens is None or used_output_tokens is None:
            cells.usage_missing[0] += 1
            return
        cells.checked[0] += 1
        if used_input_tokens != settled.input_tokens:
            cells.drift[0] += 1
            cells.drift_tokens[0] += abs(used_input_tokens - settled.input_tokens)
        cells.reserved_input[0] += settled.input_tokens
        cells.reserved_output[0] += settled.output_tokens
        cells.used_input[0] += used_input_tokens
        cells.used_output[0] += used_output_tokens
        if settled.output_tokens > 0:
            put(cells.output_use, SHARE_PERMILLE, used_output_tokens * 1000 // settled.output_tokens)

    def ledger_called(self, verb: str, duration_us: int) -> None:
        """A round trip to a shared ledger took `duration_us`."""
        put(self._cell(i.LEDGER_CALL_SECONDS, verb), SHORT_US, duration_us)

    def exemplify(self, decision: Decision, trace_id: str) -> None:
        """A decision that has been recorded is in this trace: where a slow bucket leads to."""
        labels = self._vocabulary.bounded(
            i.DECISION_SECONDS.labels, (decision.lane or NONE, decision.outcome)
        )
        bucket = bisect_left(HOLD_US, decision.decided_us)
        self._exemplars.setdefault(labels, {})[bucket] = Exemplar(
            value=decision.decided_us, trace_id=trace_id, at_s=time.time()
        )

    def _decision_cells(self, key: tuple[str | None, ...]) -> _DecisionCells:
        lane, outcome, reason, model, pool = (value or NONE for value in key)
        cells = _DecisionCells(
            requests=self._cell(i.REQUESTS, lane, outcome, reason, model, pool),
            input_tokens=self._cell(i.INPUT_TOKENS, lane),
            output_tokens=self._cell(i.OUTPUT_TOKENS, lane),
            read=self._cell(i.READ_SECONDS, lane),
            count=self._cell(i.COUNT_SECONDS, lane),
            hold=self._cell(i.HOLD_SECONDS, lane, outcome),
            decision=self._cell(i.DECISION_SECONDS, lane, outcome),
            retry_after=self._cell(i.RETRY_AFTER_SECONDS, lane),
        )
        if len(self._decisions) < ROWS_LIMIT:
            self._decisions[key] = cells
        return cells

    def _end_cells(self, key: tuple[str, ...]) -> _EndCells:
        lane, pool, model, status = (value or NONE for value in key)
        cells = _EndCells(
            deadline_ms=self._deadline_ms.get(lane, 0),
            completions=self._cell(i.COMPLETIONS, lane, pool, status),
            goodput=self._cell(i.GOODPUT, lane, model),
            ttfb=self._cell(i.TTFB_SECONDS, lane, pool),
            answer=self._cell(i.ANSWER_SECONDS, lane, pool),
            reserved_input=self._cell(i.RESERVED_TOKENS, lane, pool, "input"),
            reserved_output=self._cell(i.RESERVED_TOKENS, lane, pool, "output"),
            used_input=self._cell(i.USED_TOKENS, lane, pool, "input"),
            used_output=self._cell(i.USED_TOKENS, lane, pool, "output"),
            output_use=self._cell(i.OUTPUT_USE, lane),
            usage_missing=self._cell(i.USAGE_MISSING, pool, status),
            checked=self._cell(i.COUNT_CHECKED, model),
            drift=self._cell(i.COUNT_DRIFT, model),
            drift_tokens=self._cell(i.COUNT_DRIFT_TOKENS, model),
        )
        if len(self._ends) < ROWS_LIMIT:
            self._ends[key] = cells
        return cells

    def _cell(self, instrument: Instrument, *labels: str) -> Cell:
        return self._series[instrument.name].cell(labels)

    async def read(self, snapshot: Snapshot | None = None) -> Read:
        """What others count, and what the ledger says right now: `None` when it cannot be asked.

        Gives others their turn in between.
        """
        read: Read = {}
        for number, reading in enumerate(self._all_readings(snapshot), start=1):
            self._take(read, reading.name, reading.labels, reading.value)
            if number % SLICE_READINGS == 0:
                await asyncio.sleep(0)
        if snapshot is not None:
            number = 0
            async for name, labels, value in balance_readings(snapshot, top_tenants=self._top_tenants):
                self._take(read, name, labels, value)
                number += 1
                if number % SLICE_READINGS == 0:
                    await asyncio.sleep(0)
        return read

    def collect(self, read: Read) -> Iterator[Family]:
        """Every family that has series, in the order of `INSTRUMENTS`; `read` is what `read()` found."""
        for name, instrument in INSTRUMENTS.items():
            series: tuple[tuple[tuple[str, ...], int | Buckets], ...]
            recorded = self._series.get(name)
            if recorded is None:
                series = tuple(read.get(name, {}).items())
            elif instrument.kind is Kind.HISTOGRAM:
                series = tuple(
                    (labels, self._buckets(instrument, labels, cell))
                    for labels, cell in recorded.cells.items()
                )
            else:
                series = tuple((labels, cell[0]) for labels, cell in recorded.cells.items())
            if series:
                yield Family(instrument=instrument, series=series)

    def _buckets(self, instrument: Instrument, labels: tuple[str, ...], cell: Cell) -> Buckets:
        exemplars = self._exemplars.get(labels, {}) if instrument is i.DECISION_SECONDS else {}
        return Buckets(total=cell[0], counts=tuple(cell[1:]), exemplars=dict(exemplars))

    @property
    def series(self) -> int:
        """How many label sets are kept."""
        return sum(len(series.cells) for series in self._series.values())

    @property
    def unknown_readings(self) -> frozenset[str]:
        """Names that a source of readings gave and that no instrument has: a mistake in the program."""
        return frozenset(self._unknown_readings)

    def _take(self, read: Read, name: str, labels: tuple[str, ...], value: int) -> None:
        instrument = INSTRUMENTS.get(name)
        if instrument is None or name in self._series or len(instrument.labels) != len(labels):
            self._unknown_readings.add(name)
            return
        series = read.setdefault(name, {})
        bounded = self._vocabulary.bounded(instrument.labels, labels)
        series[bounded] = series.get(bounded, 0) + value

    def _all_readings(self, snapshot: Snapshot | None) -> Iterator[Reading]:
        yield Reading(
            name=i.BUILD_INFO.name, value=1, labels=(extproc.__version__, platform.python_version())
        )
        yield Reading(name=i.POLICY_INFO.name, value=1, labels=(self._policy_version,))
        for lane, deadline_ms in self._deadline_ms.items():
            yield Reading(name=i.LANE_DEADLINE.name, labels=(lane,), value=deadline_ms)
        for lane, residence_ms in self._residence_ms.items():
            yield Reading(name=i.LANE_RESIDENCE.name, labels=(lane,), value=residence_ms)
        yield Reading(name=i.UNKNOWN_READINGS.name, value=len(self._unknown_readings))
        yield Reading(name=i.SERIES_FOLDED.name, value=self._folded)
        yield Reading(name=i.LEDGER_UP.name, value=int(snapshot is not None))
        for source in self._readings:
            yield from source()

    def _fold(self) -> None:
        self._folded += 1
