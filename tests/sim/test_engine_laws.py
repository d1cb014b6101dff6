"""What holds for the engine whatever is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.engine import Ended, Ending, Engine, EngineConfig, FirstToken

CAPACITY = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    back: int  # which: the newest is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    us: int


configs = st.builds(
    EngineConfig,
    prefill_tokens_per_s=st.sampled_from([700, 1_000_000]),
    step_base_us=st.integers(1, 50),
    step_per_sequence_us=st.integers(0, 9),
    kv_capacity_tokens=st.just(CAPACITY),
    max_num_seqs=st.integers(1, 6),
    max_step_tokens=st.integers(6, 40),
)
submits = st.builds(Submit, prompt=st.integers(1, 30), output=st.integers(1, 30))
waits = st.builds(Wait, us=st.one_of(st.integers(0, 200), st.integers(0, 60_000)))
cancels = st.builds(Cancel, back=st.integers(1, 6))
histories = st.lists(st.one_of(submits, submits, waits, cancels), max_size=40)
histories_without_cancel = st.lists(st.one_of(submits, waits), max_size=40)


@dataclass(slots=True)
class Run:
    """A history played on an engine, with what it said along the way."""

    engine: Engine
    now_us: int = 0
    submitted: dict[str, Submit] = field(default_factory=dict)
    first_tokens: list[FirstToken] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def play(self, move: Submit | Cancel | Wait) -> None:
        match move:
            case Submit(prompt=prompt, output=output):
                request_id = f"r{len(self.submitted)}"
                self.submitted[request_id] = move
                self.engine.submit(
                    request_id=request_id, prompt_tokens=prompt, output_tokens=output, now_us=self.now_us
                )
            case Cancel(back=back):
                gone = self.engine.cancel(f"r{len(self.submitted) - back}", now_us=self.now_us)
                self.ended += [gone] if gone else []
            case Wait(us=us):
                self.now_us += us
        self.listen(self.now_us)

    def listen(self, to_us: int) -> None:
        self.now_us = to_us
        for event in self.engine.advance(to_us):
            if isinstance(event, FirstToken):
                self.first_tokens.append(event)
            else:
                self.ended.append(event)

    def drain(self) -> None:
        while (at_us := self.engine.next_event_at_us()) is not None:
            assert at_us > self.now_us, "an event must lie ahead, or a simulation would never end"
            self.listen(at_us)


def check_gauges(run: Run) -> None:
    snapshot = run.engine.snapshot()
    config = run.engine.config
    batch = dict(run.engine.progress())
    assert 0 <= snapshot.kv_used_tokens <= config.kv_capacity_tokens
    # Memory is the prompts and outputs of the batch and of nobody else, with the slot of the coming token.
    assert snapshot.kv_used_tokens == sum(run.submitted[key].prompt + done for key, done in batch.items())
    assert snapshot.running == len(batch) <= config.max_num_seqs
    assert snapshot.running + snapshot.waiting == len(run.submitted) - len(run.ended)
    next_step, next_event = run.engine.next_step_at_us(), run.engine.next_event_at_us()
    if snapshot.running + snapshot.waiting:
        assert next_step is not None
        assert next_event is not None
        assert run.now_us < next_step <= next_event
    else:
        assert (next_step, next_event) == (None, None)


@given(config=configs, history=histories)
@settings(max_examples=150, deadline=None)
def test_memory_is_accounted_for_and_every_request_ends_exactly_once(
    config: EngineConfig, history: list[Submit | Cancel | Wait]
) -> None:
    """KV use is the batch's tokens and never over capacity; each request ends once; idle is zero."""
    run = Run(Engine(config))
    for move in history:
        run.play(move)
        check_gauges(run)
    while (at_us := run.engine.next_event_at_us()) is not None:
        run.listen(at_us)
        check_gauges(run)

    assert sorted(end.request_id for end in run.ended) == sorted(run.submitted)
    snapshot = run.engine.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.kv_used_tokens) == (0, 0, 0)
    assert snapshot.preemptions_total == sum(end.preemptions for end in run.ended)


@given(config=configs, history=histories)
@settings(max_examples=150, deadline=None)
def test_tokens_are_conserved(config: EngineConfig, history: list[Submit | Cancel | Wait]) -> None:
    """Totals are the sums over requests: generated tokens of all, prompts of those that got a first token."""
    run = Run(Engine(config))
    for move in history:
        run.play(move)
    run.drain()

    snapshot = run.engine.snapshot()
    assert snapshot.generation_tokens_total == sum(end.generated_tokens for end in run.ended)
    began = [end for end in run.ended if end.first_token_at_us is not None]
    assert snapshot.prompt_tokens_total == sum(end.prompt_tokens for end in began)
    assert {first.request_id: first.at_us for first in run.first_tokens} == {
        end.request_id: end.first_token_at_us for end in began
    }
    for end in run.ended:
        if end.ending is Ending.FINISHED:
            assert end.generated_tokens == end.output_tokens
        else:
            assert end.generated_tokens < end.output_tokens
        assert (end.generated_tokens > 0) == (end.first_token_at_us is not None)


@given(config=configs, history=histories_without_cancel)
@settings(max_examples=100, deadline=None)
def test_only_preemption_makes_work_twice(config: EngineConfig, history: list[Submit | Wait]) -> None:
    """Without cancellation, prefill work equals the prompts if nobody was evicted, and is more otherwise."""
    run = Run(Engine(config))
    for move in history:
        run.play(move)
    run.drain()
    snapshot = run.engine.snapshot()
    assert (snapshot.prefill_tokens_total > snapshot.prompt_tokens_total) == (snapshot.preemptions_total > 0)


@given(config=configs, history=histories)
@settings(max_examples=100, deadline=None)
def test_requests_start_in_the_order_they_came(
    config: EngineConfig, history: list[Submit | Cancel | Wait]
) -> None:
    """Start and first-token times never decrease in order of submission, and each life runs forwards."""
    run = Run(Engine(config))
    for move in history:
        run.play(move)
    run.drain()
    ended = {end.request_id: end for end in run.ended}
    lives = [ended[key] for key in run.submitted]
    starts = [end.started_at_us for end in lives if end.started_at_us is not None]
    assert starts == sorted(starts)
    firsts = [end.first_token_at_us for end in lives if end.first_token_at_us is not None]
    assert firsts == sorted(firsts)
    for end in lives:
        moments = [end.submitted_at_us, end.started_at_us, end.first_token_at_us, end.ended_at_us]
        known = [moment for moment in moments if moment is not None]
        assert known == sorted(known)


@dataclass(slots=True)
class Plain:
    """One request of the plain engine below: the reference, so no cleverness."""

    request_id: str
    prompt: int
    output: int
    came_at: int
    done: int = 0
    left: int = 0  # of prefill; decoding when it is nought
    first_at: int | None = None
    ended_at: int | None = None
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.done


def plain_engine(config: EngineConfig, coming: list[Plain]) -> None:
    """The same rules one step and one token at a time, with every sum taken afresh."""
    waiting, running, now = list[Plain](), list[Plain](), 0
    while coming or waiting or running:
        while coming and coming[0].came_at < now:
            waiting.append(coming.pop(0))
        if not waiting and not running:
            # Of those who come together to an idle engine, the first starts a step and the others miss it.
            now = max(now, coming[0].came_at)
            waiting.append(coming.pop(0))
        evicted = False
        while sum(one.tokens for one in running) > config.kv_capacity_tokens:
            victim = running.pop()
            victim.preemptions += 1
            waiting.insert(0, victim)
            evicted = True
        decoders = [one for one in running if not one.left]
        prefilling = [one for one in running if one.left]
        budget = config.max_step_tokens - len(decoders) - sum(one.left for one in prefilling)
        while waiting and not evicted and budget > 0 and len(running) < config.max_num_seqs:
            if sum(one.tokens for one in [*running, waiting[0]]) > config.kv_capacity_tokens:
                break
            one = waiting.pop(0)
            one.left = one.tokens
            budget -= one.left
            running.append(one)
            prefilling.append(one)
        budget = config.max_step_tokens - len(decoders)
        before = budget
        for one in prefilling:
            chunk = min(budget, one.left)
            one.left -= chunk
            budget -= chunk
        now += config.step_us(decoding=len(decoders), prefill_tokens=before - budget)
        for one in running:
            if not one.left:
                one.done += 1
                one.first_at = one.first_at or now
                one.ended_at = now if one.done == one.output else None
        running = [one for one in running if one.ended_at is None]


@given(config=configs, history=histories_without_cancel)
@settings(max_examples=150, deadline=None)
def test_taking_many_steps_at_once_changes_nothing(
    config: EngineConfig, history: list[Submit | Wait]
) -> None:
    """A plain engine that goes token by token gives every request the same times and evictions."""
    run = Run(Engine(config))
    arrivals = list[Plain]()
    for move in history:
        if isinstance(move, Submit):
            arrivals.append(Plain(f"r{len(arrivals)}", move.prompt, move.output, run.now_us))
        run.play(move)
    run.drain()
    plain_engine(config, list(arrivals))
    expected = {one.request_id: (one.first_at, one.ended_at, one.preemptions) for one in arrivals}
    told = {end.request_id: (end.first_token_at_us, end.ended_at_us, end.preemptions) for end in run.ended}
    assert told == expected


@given(config=configs, history=histories, cuts=st.lists(st.integers(1, 3_000), min_size=1, max_size=10))
@settings(max_examples=100, deadline=None)
def test_looking_more_often_changes_nothing(
    config: EngineConfig, history: list[Submit | Cancel | Wait], cuts: list[int]
) -> None:
    """Advancing in small uneven pieces tells the same story as advancing in one go."""
    calm, nosy = Run(Engine(config)), Run(Engine(config))
    for turn, move in enumerate(history):
        calm.play(move)
        if isinstance(move, Wait):
            left = move.us
            while left:
                piece = min(left, cuts[turn % len(cuts)])
                nosy.play(Wait(us=piece))
                left -= piece
        else:
            nosy.play(move)
    calm.drain()
    nosy.drain()
    assert nosy.ended == calm.ended
    assert nosy.first_tokens == calm.first_tokens
    assert nosy.engine.snapshot() == calm.engine.snapshot()
