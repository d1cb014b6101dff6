"""What the simulator is for: it shows why a fleet needs admission control."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from extproc.sim.engine import Ended, Engine, EngineConfig, Snapshot

# Short prompts and long answers: at the door each request looks small, and the memory runs out later.
CONFIG = EngineConfig(kv_capacity_tokens=24_000, prefill_tokens_per_s=8_000)
REQUESTS = 800
SECOND = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    ttft_p50_us: int
    ttft_p99_us: int
    output_tokens_per_s: int  # of requests that finished while others still arrived
    snapshot: Snapshot


@cache
def offered(requests_per_1000_s: int) -> Result:
    """The same requests, arriving at random at the given mean rate."""
    dice = random.Random(7)
    engine = Engine(CONFIG)
    ended: list[Ended] = []
    now_us = 0
    for number in range(REQUESTS):
        now_us += int(dice.expovariate(requests_per_1000_s / 1000) * SECOND)
        ended += [event for event in engine.advance(now_us) if isinstance(event, Ended)]
        engine.submit(
            request_id=str(number),
            prompt_tokens=dice.randint(1, 200),
            output_tokens=dice.randint(1, 2_000),
            now_us=now_us,
        )
    in_time = sum(end.generated_tokens for end in ended)
    snapshot = engine.snapshot()
    while (at_us := engine.next_event_at_us()) is not None:
        ended += [event for event in engine.advance(at_us) if isinstance(event, Ended)]
    ttft = sorted(end.first_token_at_us - end.submitted_at_us for end in ended if end.first_token_at_us)
    assert len(ttft) == REQUESTS
    return Result(
        ttft_p50_us=ttft[REQUESTS // 2],
        ttft_p99_us=ttft[REQUESTS * 99 // 100],
        output_tokens_per_s=in_time * SECOND // now_us,
        snapshot=snapshot,
    )


def test_below_the_knee_twice_the_load_hardly_shows() -> None:
    """From 0.6 to 1.2 requests a second the TTFT p99 stays within half as much again."""
    assert offered(1_200).ttft_p99_us < 1.5 * offered(600).ttft_p99_us
    assert offered(1_200).snapshot.preemptions_total == 0


def test_past_the_knee_a_fifth_more_load_makes_first_tokens_a_hundred_times_later() -> None:
    """From 2.0 to 2.4 requests a second the TTFT p99 grows more than a hundredfold: a cliff, not a slope."""
    assert offered(2_000).ttft_p99_us < 2 * offered(1_200).ttft_p99_us
    assert offered(2_400).ttft_p99_us > 100 * offered(2_000).ttft_p99_us


def test_overload_is_spent_on_work_done_before() -> None:
    """Past the knee most prefill is recomputation, so more load yields no more, and finally fewer tokens."""
    overload = offered(2_400)
    assert overload.snapshot.prefill_tokens_total > 3 * overload.snapshot.prompt_tokens_total
    assert offered(6_000).output_tokens_per_s < overload.output_tokens_per_s
