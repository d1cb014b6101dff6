"""The engine's arithmetic, told in numbers that can be checked by hand.

Here a prefill token costs 1 ms, a step 10 ms, each decoding sequence 1 ms, and a step takes 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from extproc.sim.engine import (
    DuplicateRequest,
    Ended,
    Ending,
    Engine,
    EngineConfig,
    FirstToken,
    RequestDoesNotFit,
)


def a_config(**changes: int) -> EngineConfig:
    numbers = {
        "prefill_tokens_per_s": 1_000,
        "step_base_us": 10_000,
        "step_per_sequence_us": 1_000,
        "kv_capacity_tokens": 1_000,
        "max_num_seqs": 4,
        "max_step_tokens": 32,
    }
    return EngineConfig(**(numbers | changes))


def drained(engine: Engine) -> list[Ended]:
    """Everything that ends from here on, in order, driven by the engine's own events."""
    ended: list[Ended] = []
    while (at_us := engine.next_event_at_us()) is not None:
        ended += [event for event in engine.advance(at_us) if isinstance(event, Ended)]
    return ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    name: str
    requests: tuple[tuple[str, int, int, int], ...]  # id, at_us, prompt, output
    config: EngineConfig
    ends: dict[str, tuple[int, int, int, int]]  # id: started, first token, finished (us), preemptions


STORIES = (
    Story(
        name="alone: 20 ms of prefill and a step, then two decode steps",
        requests=(("a", 0, 20, 3),),
        config=a_config(),
        ends={"a": (0, 30_000, 52_000, 0)},
    ),
    Story(
        name="one token: the end of prefill is the end",
        requests=(("a", 7, 20, 1),),
        config=a_config(),
        ends={"a": (7, 30_007, 30_007, 0)},
    ),
    Story(
        name="chunks: 50 tokens are steps of 32 and 18, each with its base",
        requests=(("a", 0, 50, 1),),
        config=a_config(),
        ends={"a": (0, 70_000, 70_000, 0)},
    ),
    Story(
        name="company: b joins at the next step, its prefill slows a's token, then both share steps of 12 ms",
        requests=(("a", 0, 20, 3), ("b", 1, 10, 2)),
        config=a_config(),
        ends={"a": (0, 30_000, 63_000, 0), "b": (30_000, 51_000, 63_000, 0)},
    ),
    Story(
        name="budget: the decoding a takes one of 32 tokens, so b's 40 are chunks of 31 and 9",
        requests=(("a", 0, 20, 4), ("b", 1, 40, 1)),
        config=a_config(),
        # 30 ms for a; 11 + 31 = 42; 11 + 9 = 20; then a alone for its fourth token: 11.
        ends={"a": (0, 30_000, 103_000, 0), "b": (30_000, 92_000, 92_000, 0)},
    ),
    Story(
        name="seats: with one seat b waits for a's end",
        requests=(("a", 0, 20, 3), ("b", 1, 10, 1)),
        config=a_config(max_num_seqs=1),
        ends={"a": (0, 30_000, 52_000, 0), "b": (52_000, 72_000, 72_000, 0)},
    ),
    Story(
        name="head of the line: c would fit beside a, but b is before it and does not",
        requests=(("a", 0, 20, 3), ("b", 1, 80, 1), ("c", 2, 10, 1)),
        config=a_config(kv_capacity_tokens=100),
        # b starts at 52 ms: chunks of 32, 32, 16 with 10 ms each, and c's 10 in the last of them.
        ends={
            "a": (0, 30_000, 52_000, 0),
            "b": (52_000, 172_000, 172_000, 0),
            "c": (136_000, 172_000, 172_000, 0),
        },
    ),
    Story(
        name="memory: b is evicted, waits for a, and pays for its prompt and six tokens again",
        requests=(("a", 0, 10, 10), ("b", 1, 9, 10)),
        config=a_config(kv_capacity_tokens=30),
        # 20 ms a; 11 + 9 = 20 with b; then 20 slots are held, and five steps of 12 fill all 30 at 100 ms.
        # b (six tokens) goes; a (seven) ends after 3 x 11 at 133; b: 10 + 9 + 6 to its seventh, then 3 x 11.
        ends={"a": (0, 20_000, 133_000, 0), "b": (20_000, 40_000, 191_000, 1)},
    ),
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name.split(":")[0])
def test_times_are_what_the_formula_says(story: Story) -> None:
    """Start, first token, finish and evictions of every request agree with the sums in the story."""
    engine = Engine(story.config)
    for request_id, at_us, prompt, output in story.requests:
        engine.submit(request_id=request_id, prompt_tokens=prompt, output_tokens=output, now_us=at_us)
    told = {
        end.request_id: (end.started_at_us, end.first_token_at_us, end.ended_at_us, end.preemptions)
        for end in drained(engine)
    }
    assert told == story.ends


def test_a_cancelled_request_gives_up_its_seat_at_the_next_step_and_its_memory_at_once() -> None:
    """Cancelling frees the KV cache immediately; the step under way still runs to its end."""
    engine = Engine(a_config(max_num_seqs=1))
    engine.submit(request_id="a", prompt_tokens=10, output_tokens=100, now_us=0)
    engine.submit(request_id="b", prompt_tokens=10, output_tokens=1, now_us=5_000)
    assert engine.advance(25_000) == [FirstToken(request_id="a", at_us=20_000)]
    assert engine.snapshot().kv_used_tokens == 11

    gone = engine.cancel("a", now_us=25_000)

    assert gone is not None
    assert (gone.ending, gone.generated_tokens) == (Ending.CANCELLED, 1)
    assert engine.snapshot().kv_used_tokens == 0
    (b,) = drained(engine)
    assert (b.started_at_us, b.first_token_at_us) == (31_000, 51_000)


def test_cancelling_a_request_in_the_middle_of_its_prefill_frees_what_it_reserved() -> None:
    """A prompt's memory is reserved whole at its start and freed whole when it is cancelled half way."""
    engine = Engine(a_config())
    engine.submit(request_id="a", prompt_tokens=50, output_tokens=1, now_us=0)
    engine.advance(43_000)
    assert engine.snapshot().kv_used_tokens == 50
    assert engine.cancel("a", now_us=43_000) is not None
    assert (engine.snapshot().kv_used_tokens, engine.snapshot().running) == (0, 0)
    assert engine.next_event_at_us() is None
    assert engine.cancel("a", now_us=43_000) is None


def test_a_half_prefilled_request_that_is_cancelled_costs_its_neighbour_nothing_more() -> None:
    """After b's first chunk b is cancelled: a's next step is a plain decode step of 11 ms again."""
    engine = Engine(a_config())
    engine.submit(request_id="a", prompt_tokens=20, output_tokens=4, now_us=0)
    engine.submit(request_id="b", prompt_tokens=90, output_tokens=1, now_us=1)
    engine.cancel("b", now_us=30_000 + 42_000 + 1)  # in the second of its chunks of 31, of 42 ms each
    (a,) = drained(engine)
    assert a.ended_at_us == 30_000 + 42_000 + 42_000 + 11_000
    assert engine.snapshot().prefill_tokens_total == 20 + 31


def test_gauges_and_totals_describe_the_middle_of_a_run() -> None:
    """Running, waiting, usage and totals are right between events, without waiting for the stretch's end."""
    engine = Engine(a_config(max_num_seqs=1, kv_capacity_tokens=100))
    engine.submit(request_id="a", prompt_tokens=20, output_tokens=50, now_us=0)
    engine.submit(request_id="b", prompt_tokens=20, output_tokens=1, now_us=0)
    engine.advance(30_000 + 3 * 11_000)  # the first token and three more
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting) == (1, 1)
    assert (snapshot.kv_used_tokens, snapshot.kv_usage_permille) == (24, 240)
    assert (snapshot.prompt_tokens_total, snapshot.generation_tokens_total) == (20, 4)
    assert list(engine.progress()) == [("a", 4)]
    assert engine.next_step_at_us() == 74_000
    assert engine.next_event_at_us() == 30_000 + 49 * 11_000


def test_a_request_larger_than_the_memory_is_refused() -> None:
    """What can never fit is an error at once, and one token less is not."""
    engine = Engine(a_config(kv_capacity_tokens=30))
    with pytest.raises(RequestDoesNotFit, match=r"prompt_tokens \(21\).*kv_capacity_tokens \(30\)"):
        engine.submit(request_id="a", prompt_tokens=21, output_tokens=10, now_us=0)
    engine.submit(request_id="a", prompt_tokens=20, output_tokens=10, now_us=0)
    assert [end.generated_tokens for end in drained(engine)] == [10]


@pytest.mark.parametrize(
    ("prompt", "output", "now_us", "message"),
    [(0, 1, 0, "at least 1"), (1, 0, 0, "at least 1"), (1, 1, -1, "time may not go back")],
)
def test_nonsense_is_refused(prompt: int, output: int, now_us: int, message: str) -> None:
    """A count below one and a clock that goes back are errors that say so, and leave no trace."""
    engine = Engine(a_config())
    with pytest.raises(ValueError, match=message):
        engine.submit(request_id="a", prompt_tokens=prompt, output_tokens=output, now_us=now_us)
    assert engine.snapshot().waiting == 0


def test_an_id_is_unique_among_open_requests_and_free_again_afterwards() -> None:
    """The same id twice at once is an error; after the first has ended it may be used again."""
    engine = Engine(a_config())
    engine.submit(request_id="a", prompt_tokens=1, output_tokens=1, now_us=0)
    with pytest.raises(DuplicateRequest, match="'a'"):
        engine.submit(request_id="a", prompt_tokens=1, output_tokens=1, now_us=0)
    (end,) = drained(engine)
    engine.submit(request_id="a", prompt_tokens=1, output_tokens=1, now_us=end.ended_at_us)
    assert len(drained(engine)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s is 0; it must be at least 1"),
        ({"step_per_sequence_us": -1}, "step_per_sequence_us is -1; it must be at least 0"),
        ({"max_num_seqs": 33}, r"max_step_tokens is 32, below max_num_seqs \(33\)"),
    ],
)
def test_an_impossible_engine_is_refused(changes: dict[str, int], message: str) -> None:
    """A bad configuration names the field, the value and the remedy."""
    with pytest.raises(ValueError, match=message):
        a_config(**changes)
