"""One inference engine in virtual time: continuous batching, chunked prefill, a KV cache that can run out.

The engine works in steps. A step gives one token to every decoding sequence and spends what is left of
`max_step_tokens` on prefill, oldest request first, in chunks. How long a step takes:

    step_us = step_base_us + step_per_sequence_us * decoding
            + ceil(prefill * 1_000_000 / prefill_tokens_per_s)

The base stands for reading the weights once, the second term for each sequence's share of attention and
sampling, the third for the arithmetic of prefill. So a lone sequence decodes fastest, a full batch has the
highest throughput, and somebody's long prompt slows everybody's next token.

Memory is counted in tokens. At its start a request reserves what it must prefill; from then on every decode
step takes one more slot per sequence. When the next step has no slot for everyone, the newest running
sequence is evicted: its memory is freed, it returns to the head of the waiting queue, and what it had
computed (its prompt and the tokens already sent) must be prefilled again. That is recompute preemption as
vLLM's V1 scheduler does it, and it is why overload collapses instead of bending: past the knee the engine
spends steps on work it has already done. Pages, prefix caching and what a long context adds to each decode
step are left out.

A step that has begun is not changed: a request submitted at the very instant of a step boundary joins the
step after. A run of identical decode steps is one *stretch*; simulating it costs the same at any length.

The model is pure: integers only, microseconds, and the caller's clock is an argument that never goes back.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum

_US_PER_S = 1_000_000
_STALE_ENTRIES = 64  # below this many, clearing out the finish heap costs more than it saves


class RequestDoesNotFit(ValueError):
    """Prompt and output together are more tokens than the whole KV cache: no waiting can help."""


class DuplicateRequest(ValueError):
    """A request with this id is still in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How fast and how big the engine is. The defaults are near an 8B model on one large GPU.

    `max_step_tokens` bounds the tokens of one step, decode and prefill together (vLLM's
    max_num_batched_tokens); it may not be below `max_num_seqs`, or a full batch could not take a step.
    """

    prefill_tokens_per_s: int = 20_000
    step_base_us: int = 8_000
    step_per_sequence_us: int = 100
    kv_capacity_tokens: int = 120_000
    max_num_seqs: int = 256
    max_step_tokens: int = 2_048

    def __post_init__(self) -> None:
        for item in fields(self):
            value: int = getattr(self, item.name)
            least = 0 if item.name == "step_per_sequence_us" else 1
            if value < least:
                raise ValueError(f"{item.name} is {value}; it must be at least {least}")
        if self.max_step_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}, below max_num_seqs ({self.max_num_seqs}); "
                "raise it, since each running sequence needs one token per step"
            )

    def step_us(self, *, decoding: int, prefill_tokens: int) -> int:
        """The time of one step, by the formula at the top of this module; always at least 1."""
        prefill_us = -(-prefill_tokens * _US_PER_S // self.prefill_tokens_per_s)
        return self.step_base_us + self.step_per_sequence_us * decoding + prefill_us


class Ending(StrEnum):
    """How a request left the engine."""

    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A request's first output token appeared at `at_us`."""

    request_id: str
    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Everything there is to know about a request that has left the engine.

    `started_at_us` is when it first joined the batch, None if it never left the queue; `first_token_at_us`
    is None if no token had appeared. `generated_tokens` equals `output_tokens` if it finished.
    """

    request_id: str
    ending: Ending
    prompt_tokens: int
    output_tokens: int
    generated_tokens: int
    submitted_at_us: int
    started_at_us: int | None
    first_token_at_us: int | None
    ended_at_us: int
    preemptions: int


Event = FirstToken | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The engine's gauges and totals at one instant.

    A preempted request counts as waiting. `prompt_tokens_total` counts each prompt once, when its first token
    appears; `prefill_tokens_total` counts the prefill work done, so what it has over the former is work
    done again after preemption (or lost to cancellation, or still under way).
    """

    running: int
    waiting: int
    kv_used_tokens: int
    kv_usage_permille: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefill_tokens_total: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    request_id: str
    prompt_tokens: int
    output_tokens: int
    submitted_at_us: int
    started_at_us: int | None = None
    first_token_at_us: int | None = None
    preemptions: int = 0
    settled_tokens: int = 0  # output tokens so far; lags behind while decoding, see Engine._generated
    prefill_left_tokens: int = 0
    last_step: int | None = None  # while decoding: the number of the step that yields the last token

    @property
    def prefill_tokens(self) -> int:
        """What must be in the cache before the next output token: the prompt and all output so far."""
        return self.prompt_tokens + self.settled_tokens


@dataclass(slots=True, kw_only=True, eq=False)
class _Stretch:
    """The step under way and those known to follow it unchanged. With prefill, there is only the one."""

    started_at_us: int
    step_us: int
    steps: int
    prefills: list[tuple[_Sequence, int]]


class Engine:
    """What would this engine do with these requests, and when?

    Drive it by asking `next_event_at_us` and calling `advance` to that time or any earlier one. Every call
    with `now_us` first lives through all that happens up to then, so calls in time order give the same
    answers however finely the time between them is cut.
    """

    def __init__(self, config: EngineConfig, *, now_us: int = 0) -> None:
        self.config = config
        self._now_us = now_us
        self._waiting: OrderedDict[str, _Sequence] = OrderedDict()  # in order of submission, always
        self._running: dict[str, _Sequence] = {}  # in order of admission; all decode but perhaps the last
        self._partial: _Sequence | None = None  # that last one, when a step's budget ended inside its prefill
        self._decoding = 0
        self._stretch: _Stretch | None = None
        self._kv_tokens = 0  # reserved or computed, without the slots of the step under way (one per decoder)
        self._steps_total = 0
        self._finishes: list[tuple[int, int, _Sequence]] = []  # heap of (last_step, tie-break, sequence)
        self._pushes = 0
        self._events: list[Event] = []
        self._preemptions_total = 0
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._prefill_tokens_total = 0

    def submit(self, *, request_id: str, prompt_tokens: int, output_tokens: int, now_us: int) -> None:
        """Queue a request that will produce exactly `output_tokens`.

        Raises RequestDoesNotFit if it is larger than the KV cache, DuplicateRequest if the id is in use, and
        ValueError for a count below 1 or a time that lies before the last call's.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError(
                f"prompt_tokens is {prompt_tokens} and output_tokens is {output_tokens}; "
                "each must be at least 1"
            )
        if prompt_tokens + output_tokens > self.config.kv_capacity_tokens:
            raise RequestDoesNotFit(
                f"prompt_tokens ({prompt_tokens}) plus output_tokens ({output_tokens}) is more than "
                f"kv_capacity_tokens ({self.config.kv_capacity_tokens}); shorten the request"
            )
        self._live_until(now_us)
        if request_id in self._waiting or request_id in self._running:
            raise DuplicateRequest(f"request_id {request_id!r} is still in the engine; use a fresh one")
        # Behind somebody who cannot start, nobody can: only a newcomer to an empty queue ends the stretch.
        interrupts = not self._waiting
        self._waiting[request_id] = _Sequence(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            submitted_at_us=now_us,
        )
        if self._stretch is None:
            self._stretch = self._next_stretch(now_us)
        elif interrupts:
            self._stretch.steps = 1

    def cancel(self, request_id: str, *, now_us: int) -> Ended | None:
        """Drop a request and free its memory at once; None if it has already ended or never was here.

        The answer is the only report: a cancelled request does not appear in `advance` again.
        """
        self._live_until(now_us)
        sequence = self._waiting.pop(request_id, None)
        if sequence is None:
            sequence = self._running.pop(request_id, None)
            if sequence is None:
                return None
            self._settle(sequence)
            if sequence is self._partial:
                self._partial = None
        if self._stretch is not None:
            self._stretch.prefills = [pair for pair in self._stretch.prefills if pair[0] is not sequence]
            self._stretch.steps = 1  # there may be room for the queue's head now
        if not self._running and not self._waiting:
            self._stretch = None
        return _ended(sequence, Ending.CANCELLED, now_us)

    def advance(self, to_us: int) -> list[Event]:
        """Live until `to_us` and tell what has happened since the last call of this method, in time order."""
        self._live_until(to_us)
        events, self._events = self._events, []
        return events

    def next_event_at_us(self) -> int | None:
        """The earliest time at which some request may start, get its first token, be evicted or finish.

        None when idle. A `submit` or `cancel` may bring it forward, so ask again after each.
        """
        stretch = self._stretch
        return None if stretch is None else stretch.started_at_us + stretch.steps * stretch.step_us

    def next_step_at_us(self) -> int | None:
        """When the step under way ends, that is when the next token of anyone appears; None when idle."""
        stretch = self._stretch
        return None if stretch is None else stretch.started_at_us + stretch.step_us

    def progress(self) -> Iterator[tuple[str, int]]:
        """Each request in the batch, oldest first, and how many output tokens it has; not the queue's."""
        return ((key, self._generated(sequence)) for key, sequence in self._running.items())

    def snapshot(self) -> Snapshot:
        """The gauges and totals as of the last call."""
        used = self._kv_tokens + self._decoding
        return Snapshot(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_tokens=used,
            kv_usage_permille=used * 1000 // self.config.kv_capacity_tokens,
            preemptions_total=self._preemptions_total,
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            prefill_tokens_total=self._prefill_tokens_total,
        )

    def _live_until(self, now_us: int) -> None:
        if now_us < self._now_us:
            raise ValueError(f"now_us is {now_us}, before the engine's {self._now_us}; time may not go back")
        while (stretch := self._stretch) is not None:
            steps = min(stretch.steps, (now_us - stretch.started_at_us) // stretch.step_us)
            if steps == 0:
                break
            at_us = stretch.started_at_us + steps * stretch.step_us
            self._complete(stretch, steps, at_us)
            if steps == stretch.steps:
                self._stretch = self._next_stretch(at_us)
            else:
                stretch.started_at_us = at_us
                stretch.steps -= steps
        self._now_us = now_us

    def _next_stretch(self, at_us: int) -> _Stretch | None:
        """Decide the step that begins now, and for how many steps that decision will stay the same."""
        capacity = self.config.kv_capacity_tokens
        while self._kv_tokens + self._decoding > capacity:
            self._evict_newest()
        budget = self.config.max_step_tokens - self._decoding
        prefills: list[tuple[_Sequence, int]] = []
        if self._partial is not None:
            chunk = min(self._partial.prefill_left_tokens, budget)
            prefills.append((self._partial, chunk))
            budget -= chunk
        # Whoever was evicted just now does not get back in here: it needs the very room that was missing.
        while self._waiting and budget > 0 and len(self._running) < self.config.max_num_seqs:
            head = next(iter(self._waiting.values()))
            if self._kv_tokens + self._decoding + head.prefill_tokens > capacity:
                break
            self._admit(head, at_us)
            chunk = min(head.prefill_left_tokens, budget)
            prefills.append((head, chunk))
            budget -= chunk
        if not self._running:
            return None
        return _Stretch(
            started_at_us=at_us,
            step_us=self.config.step_us(
                decoding=self._decoding, prefill_tokens=sum(chunk for _, chunk in prefills)
            ),
            steps=1 if prefills else self._steps_unchanged(),
            prefills=prefills,
        )

    def _steps_unchanged(self) -> int:
        """How many decode steps until somebody finishes or the memory runs out. Needs someone decoding."""
        while self._finishes[0][2].last_step != self._finishes[0][0]:
            heapq.heappop(self._finishes)
        until_finish = self._finishes[0][0] - self._steps_total
        until_full = (self.config.kv_capacity_tokens - self._kv_tokens) // self._decoding
        return min(until_finish, until_full)

    def _complete(self, stretch: _Stretch, steps: int, at_us: int) -> None:
        self._steps_total += steps
        self._kv_tokens += self._decoding * steps
        self._generation_tokens_total += self._decoding * steps
        while self._finishes and self._finishes[0][0] <= self._steps_total:
            last_step, _, sequence = heapq.heappop(self._finishes)
            if sequence.last_step == last_step:
                self._finish(sequence, at_us)
        for sequence, chunk in stretch.prefills:
            self._prefill_tokens_total += chunk
            sequence.prefill_left_tokens -= chunk
            if sequence.prefill_left_tokens > 0:
                self._partial = sequence
                continue
            if sequence is self._partial:
                self._partial = None
            self._start_decoding(sequence, at_us)

    def _admit(self, sequence: _Sequence, at_us: int) -> None:
        del self._waiting[sequence.request_id]
        self._running[sequence.request_id] = sequence
        if sequence.started_at_us is None:
            sequence.started_at_us = at_us
        sequence.prefill_left_tokens = sequence.prefill_tokens
        self._kv_tokens += sequence.prefill_tokens

    def _start_decoding(self, sequence: _Sequence, at_us: int) -> None:
        """The end of prefill is a token in itself; only what comes after needs decode steps."""
        sequence.settled_tokens += 1
        self._generation_tokens_total += 1
        if sequence.first_token_at_us is None:
            sequence.first_token_at_us = at_us
            self._prompt_tokens_total += sequence.prompt_tokens
            self._events.append(FirstToken(request_id=sequence.request_id, at_us=at_us))
        self._decoding += 1
        sequence.last_step = self._steps_total + sequence.output_tokens - sequence.settled_tokens
        if sequence.settled_tokens == sequence.output_tokens:
            self._finish(sequence, at_us)
        else:
            self._pushes += 1
            heapq.heappush(self._finishes, (sequence.last_step, self._pushes, sequence))
            self._bound_finishes()

    def _finish(self, sequence: _Sequence, at_us: int) -> None:
        del self._running[sequence.request_id]
        self._settle(sequence)
        self._events.append(_ended(sequence, Ending.FINISHED, at_us))

    def _evict_newest(self) -> None:
        key, sequence = self._running.popitem()
        self._settle(sequence)
        if sequence is self._partial:
            self._partial = None
        sequence.preemptions += 1
        self._preemptions_total += 1
        self._waiting[key] = sequence
        self._waiting.move_to_end(key, last=False)

    def _settle(self, sequence: _Sequence) -> None:
        """Take a sequence's memory back as it leaves the batch, and fix how many tokens it has."""
        if sequence.last_step is None:
            self._kv_tokens -= sequence.prefill_tokens
            return
        sequence.settled_tokens = self._generated(sequence)
        # The newest token is in the cache only once the next step has read it.
        self._kv_tokens -= sequence.prefill_tokens - 1
        sequence.last_step = None
        self._decoding -= 1

    def _generated(self, sequence: _Sequence) -> int:
        if sequence.last_step is None:
            return sequence.settled_tokens
        return sequence.output_tokens - (sequence.last_step - self._steps_total)

    def _bound_finishes(self) -> None:
        """Entries of evicted and cancelled sequences stay behind in the heap; keep them few."""
        if len(self._finishes) > 2 * self._decoding + _STALE_ENTRIES:
            self._finishes = [entry for entry in self._finishes if entry[2].last_step == entry[0]]
            heapq.heapify(self._finishes)


def _ended(sequence: _Sequence, ending: Ending, at_us: int) -> Ended:
    return Ended(
        request_id=sequence.request_id,
        ending=ending,
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.output_tokens,
        generated_tokens=sequence.settled_tokens,
        submitted_at_us=sequence.submitted_at_us,
        started_at_us=sequence.started_at_us,
        first_token_at_us=sequence.first_token_at_us,
        ended_at_us=at_us,
        preemptions=sequence.preemptions,
    )
