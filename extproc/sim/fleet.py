"""One run: clients, a gate and engines in virtual time, and a record of what became of every request.

A client that is refused comes back when it was told to, if it is one of those that obey, and as an impatient
library does if not: after half a second, doubled each time, whatever it was told. Both stop at an answer that
no library retries, and when their attempts are used up. A client whose first token is not there in time hangs
up and counts that as an attempt, too.

Arrivals end with the workload; the run goes on until every request has come to an end, or `drain_us` longer.
Nothing here depends on a clock or on chance: the same requests give the same records.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import partial

from extproc.domain.contract import CONTRACT, LONGEST_OBEYED_WAIT_MS, Refusal
from extproc.domain.demand import Demand
from extproc.domain.outcome import Reason
from extproc.domain.policy import Lane
from extproc.sim.engine import Ended, Engine, EngineConfig, FirstToken, RequestDoesNotFit
from extproc.sim.gates import Admitted, Asked, Gate, Refused, Verdict

_US_PER_MS = 1_000

RECORD_US = 10_000
"""How long after its end a request's access-log record arrives."""

IMPATIENT_US = 500_000
"""The first pause of a client that does not do as it is told."""

IMPATIENT_MOST_US = 8_000_000
"""Its longest pause."""

_JITTER_PERMILLE = 250
_RETRIED_STATUSES = frozenset((429, 503))

ReplicaKey = tuple[str, str]
"""Pool and replica."""


class Fate(StrEnum):
    """How a request ended for its client."""

    SERVED = "served"
    REFUSED = "refused"  # for good: it may not be retried, or its attempts are used up
    HUNG_UP = "hung_up"  # its first token never came in time, in its last attempt
    UNFINISHED = "unfinished"  # when the run was over


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of one request. Times are from its first attempt's point of view: absolute, in microseconds."""

    asked: Asked
    fate: Fate = Fate.UNFINISHED
    attempts: int = 0
    reason: Reason | None = None  # of its last refusal
    held_us: int = 0  # in line, all attempts together
    admitted_us: int | None = None
    first_token_us: int | None = None
    ended_us: int | None = None

    @property
    def ttft_us(self) -> int | None:
        """From the client's first attempt to its first token, every pause between included."""
        if self.first_token_us is None:
            return None
        return self.first_token_us - self.asked.request.arrival_us


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedAt:
    """One refusal, at a time."""

    at_us: int
    lane: Lane
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Tokens (input and output ceiling) let through at a time; `waiting` are the lanes that waited until then."""

    at_us: int
    lane: Lane
    tokens: int
    waiting: frozenset[Lane]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of the fleet at one instant."""

    at_us: int
    oldest_us: Mapping[Lane, int]  # age of the oldest request that waits in line
    waiting: Mapping[Lane, int]
    engine_running: int
    engine_waiting: int
    kv_permille: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that is known about a run that is over."""

    records: tuple[Record, ...]
    refusals: tuple[RefusedAt, ...]
    grants: tuple[Grant, ...]
    fallbacks: Mapping[str, int]  # requests let through by each of the policy's fallbacks
    samples: tuple[Sample, ...]
    ended_us: int
    preemptions: int
    prefill_tokens: int  # work done, with what was done again
    prompt_tokens: int  # of prompts that got a first token


class _Kind(IntEnum):
    """At the same instant, in this order."""

    ENGINE = 0
    RECORD = 1
    WAKE = 2
    HANG_UP = 3
    ATTEMPT = 4
    SAMPLE = 5


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    record: Record
    number: int
    began_us: int
    replica: ReplicaKey | None = None
    got_token: bool = False
    waited: bool = False

    @property
    def id(self) -> str:
        return f"{self.record.asked.request.index}.{self.number}"


@dataclass(slots=True)
class Fleet:
    """Plays one workload against one gate."""

    gate: Gate
    configs: Mapping[ReplicaKey, EngineConfig]
    sample_us: int
    drain_us: int
    _heap: list[tuple[int, _Kind, int, Callable[[], None]]] = field(default_factory=list)
    _pushes: int = 0
    _now_us: int = 0
    _engines: dict[ReplicaKey, Engine] = field(default_factory=dict)
    _engine_due: dict[ReplicaKey, int] = field(default_factory=dict)
    _wake_due_us: int | None = None
    _waiting: dict[str, _Attempt] = field(default_factory=dict)
    _waiting_lanes: Counter[Lane] = field(default_factory=Counter)
    _running: dict[str, _Attempt] = field(default_factory=dict)
    _open: int = 0  # requests that have not come to an end
    _refusals: list[RefusedAt] = field(default_factory=list)
    _grants: list[Grant] = field(default_factory=list)
    _fallbacks: Counter[str] = field(default_factory=Counter)
    _samples: list[Sample] = field(default_factory=list)

    def play(self, workload: Sequence[Asked], *, progress: Callable[[int], None] | None = None) -> Run:
        """Let every request come, and tell what became of it. `progress` hears of each sample's time."""
        self._engines = {key: Engine(config) for key, config in self.configs.items()}
        records = tuple(Record(asked=asked) for asked in workload)
        for record in records:
            self._push(record.asked.request.arrival_us, _Kind.ATTEMPT, partial(self._attempt, record))
        self._open = len(records)
        over_us = (workload[-1].request.arrival_us if workload else 0) + self.drain_us
        self._push(0, _Kind.SAMPLE, self._sample)
        while self._heap and self._open:
            at_us, kind, _, action = heapq.heappop(self._heap)
            if at_us > over_us:
                break
            self._now_us = at_us
            action()
            if kind is not _Kind.SAMPLE:
                self._after()
            elif progress is not None:
                progress(at_us)
        totals = [engine.snapshot() for engine in self._engines.values()]
        return Run(
            records=records,
            refusals=tuple(self._refusals),
            grants=tuple(self._grants),
            fallbacks=dict(self._fallbacks),
            samples=tuple(self._samples),
            ended_us=self._now_us,
            preemptions=sum(total.preemptions_total for total in totals),
            prefill_tokens=sum(total.prefill_tokens_total for total in totals),
            prompt_tokens=sum(total.prompt_tokens_total for total in totals),
        )

    @property
    def _now_ms(self) -> int:
        return self._now_us // _US_PER_MS

    def _push(self, at_us: int, kind: _Kind, action: Callable[[], None]) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (at_us, kind, self._pushes, action))

    def _after(self) -> None:
        """Tell those who waited, and see to it that time is noticed."""
        while news := self.gate.news(self._now_ms):
            for attempt_id, verdict in news:
                attempt = self._waiting[attempt_id]
                self._leave_line(attempt)
                self._tell(attempt, verdict)
        wake_at_ms = self.gate.wake_at_ms()
        if wake_at_ms is not None:
            # What could be done at this instant has been done; what is left over is due in the next.
            at_us = max(wake_at_ms, self._now_ms + 1) * _US_PER_MS
            if self._wake_due_us is None or at_us < self._wake_due_us:
                self._wake_due_us = at_us
                self._push(at_us, _Kind.WAKE, self._wake)

    def _wake(self) -> None:
        if self._wake_due_us == self._now_us:  # otherwise an earlier one has replaced it
            self._wake_due_us = None
            self.gate.wake(self._now_ms)

    def _book(self, attempt: _Attempt, used: Demand) -> None:
        self.gate.book(attempt.id, used, self._now_ms)

    # Clients.

    def _attempt(self, record: Record) -> None:
        record.attempts += 1
        attempt = _Attempt(record=record, number=record.attempts, began_us=self._now_us)
        timeout_us = record.asked.request.timeout_us
        if timeout_us is not None:
            self._push(self._now_us + timeout_us, _Kind.HANG_UP, partial(self._hang_up, attempt))
        verdict = self.gate.ask(record.asked, attempt.id, self._now_ms)
        if verdict is None:
            self._waiting[attempt.id] = attempt
            self._waiting_lanes[record.asked.lane] += 1
        else:
            self._tell(attempt, verdict)

    def _tell(self, attempt: _Attempt, verdict: Verdict) -> None:
        match verdict:
            case Admitted(pool=pool, replica=replica, fallback=fallback):
                if fallback is not None:
                    self._fallbacks[fallback] += 1
                self._submit(attempt, (pool, replica))
            case Refused(refusal=refusal):
                self._refused(attempt.record, refusal)

    def _refused(self, record: Record, refusal: Refusal) -> None:
        record.reason = refusal.reason
        self._refusals.append(RefusedAt(at_us=self._now_us, lane=record.asked.lane, reason=refusal.reason))
        pause_us = self._pause_us(record, refusal)
        if pause_us is None or record.attempts >= record.asked.request.attempts:
            self._end(record, Fate.REFUSED)
        else:
            self._push(self._now_us + pause_us, _Kind.ATTEMPT, partial(self._attempt, record))

    def _pause_us(self, record: Record, refusal: Refusal) -> int | None:
        if CONTRACT[refusal.reason].status not in _RETRIED_STATUSES:
            return None
        if not record.asked.request.obeys:
            return self._impatience_us(record)
        wait_ms = refusal.retry_after_ms
        if wait_ms is None or wait_ms > LONGEST_OBEYED_WAIT_MS or not refusal.retry_helps:
            return None
        return wait_ms * _US_PER_MS

    def _impatience_us(self, record: Record) -> int:
        pause_us = min(IMPATIENT_US << min(record.attempts - 1, 16), IMPATIENT_MOST_US)
        return pause_us - pause_us * (record.asked.request.spread % (_JITTER_PERMILLE + 1)) // 1000

    def _hang_up(self, attempt: _Attempt) -> None:
        record = attempt.record
        if attempt.id in self._waiting:
            self._leave_line(attempt)
            self.gate.withdraw(attempt.id, self._now_ms)
        elif attempt.id in self._running:
            # Its first token may be in a step that ends right now.
            if attempt.replica is None or self._has_answered(attempt, attempt.replica):
                return
            ended = self._engines[attempt.replica].cancel(attempt.id, now_us=self._now_us)
            self._note_due(attempt.replica)
            self._gone(attempt, 0 if ended is None else ended.generated_tokens)
        else:
            return  # it was refused, or is over
        if record.attempts >= record.asked.request.attempts:
            self._end(record, Fate.HUNG_UP)
        else:
            self._push(
                self._now_us + self._impatience_us(record), _Kind.ATTEMPT, partial(self._attempt, record)
            )

    def _has_answered(self, attempt: _Attempt, replica: ReplicaKey) -> bool:
        self._collect(replica)
        return attempt.got_token

    def _leave_line(self, attempt: _Attempt) -> None:
        del self._waiting[attempt.id]
        attempt.waited = True
        self._waiting_lanes[attempt.record.asked.lane] -= 1
        attempt.record.held_us += self._now_us - attempt.began_us

    def _end(self, record: Record, fate: Fate) -> None:
        record.fate = fate
        record.ended_us = self._now_us
        self._open -= 1

    # Engines.

    def _submit(self, attempt: _Attempt, key: ReplicaKey) -> None:
        record, asked = attempt.record, attempt.record.asked
        request = asked.request
        try:
            self._engines[key].submit(
                request_id=attempt.id,
                prompt_tokens=request.input_tokens,
                output_tokens=min(request.output_tokens, max(asked.demand.output_tokens, 1)),
                now_us=self._now_us,
            )
        except RequestDoesNotFit as misfit:
            self.gate.ended(attempt.id, self._now_ms)
            self._refused(record, Refusal(reason=Reason.EXCEEDS_CAPACITY, message=str(misfit)))
            return
        attempt.replica = key
        self._running[attempt.id] = attempt
        record.admitted_us = self._now_us
        waiting = {lane for lane, count in self._waiting_lanes.items() if count}
        if attempt.waited:
            waiting.add(asked.lane)
        self._grants.append(
            Grant(
                at_us=self._now_us,
                lane=asked.lane,
                tokens=asked.demand.total_tokens,
                waiting=frozenset(waiting),
            )
        )
        self._note_due(key)

    def _step(self, key: ReplicaKey) -> None:
        if self._engine_due.get(key) == self._now_us:  # otherwise an earlier one has replaced it
            del self._engine_due[key]
            self._collect(key)

    def _collect(self, key: ReplicaKey) -> None:
        for event in self._engines[key].advance(self._now_us):
            attempt = self._running[event.request_id]
            match event:
                case FirstToken(at_us=at_us):
                    attempt.got_token = True
                    attempt.record.first_token_us = at_us
                case Ended(generated_tokens=generated_tokens):
                    self._gone(attempt, generated_tokens)
                    self._end(attempt.record, Fate.SERVED)
        self._note_due(key)

    def _gone(self, attempt: _Attempt, generated_tokens: int) -> None:
        del self._running[attempt.id]
        self.gate.ended(attempt.id, self._now_ms)
        input_tokens = attempt.record.asked.request.input_tokens
        used = Demand(
            input_tokens=input_tokens, output_tokens=generated_tokens, longest_sequence_tokens=input_tokens
        )
        self._push(self._now_us + RECORD_US, _Kind.RECORD, partial(self._book, attempt, used))

    def _note_due(self, key: ReplicaKey) -> None:
        at_us = self._engines[key].next_event_at_us()
        if at_us is None:
            return
        at_us = max(at_us, self._now_us)
        due_us = self._engine_due.get(key)
        if due_us is None or at_us < due_us:
            self._engine_due[key] = at_us
            self._push(at_us, _Kind.ENGINE, partial(self._step, key))

    def _sample(self) -> None:
        oldest_us: dict[Lane, int] = {}
        for attempt in self._waiting.values():
            lane = attempt.record.asked.lane
            oldest_us[lane] = max(oldest_us.get(lane, 0), self._now_us - attempt.began_us)
        states = [engine.snapshot() for engine in self._engines.values()]
        self._samples.append(
            Sample(
                at_us=self._now_us,
                oldest_us=oldest_us,
                waiting=dict(self._waiting_lanes),
                engine_running=sum(state.running for state in states),
                engine_waiting=sum(state.waiting for state in states),
                kv_permille=sum(state.kv_usage_permille for state in states) // max(1, len(states)),
            )
        )
        self._push(self._now_us + self.sample_us, _Kind.SAMPLE, self._sample)
