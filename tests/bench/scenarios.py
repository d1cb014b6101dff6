"""Everything that is compared with the floor, as a table: what is sent, how it arrives, and to which service."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from tests.bench.requests import Chats, Conversations, Requests, Traced
from tests.bench.rounds import Arrivals, AsTraced, Closed, OnClock, Round, exchanges, measure, quantile_of
from tests.bench.services import (
    AS_IT_COMES,
    SHARED_LEDGER,
    TRACED,
    TWO_WORKERS,
    UNOBSERVED,
    Services,
    Shape,
)

EIGHT = Closed(at_once=8)
FEW = Closed(at_once=2)

OTHER_ANSWERS_PERMILLE = 20
"""A tenant over its rate is let in now and then; more than that and something else was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One line. `log` sends each admitted request's access-log record; `count` is at full scale."""

    name: str
    requests: Requests
    count: int
    arrivals: Arrivals = EIGHT
    shape: Shape = AS_IT_COMES
    log: bool = False
    refused: bool = False

    def scaled(self, scale: float) -> int:
        """Exchanges per round: enough for every worker to have some."""
        return max(16, int(self.count * scale))


CHAT = Chats(tokens=290)
AZURE = Traced(file="azure_llm_2023_conv.csv.gz")
AZURE_CODE = Traced(file="azure_llm_2023_code.csv")
MOONCAKE = Traced(file="mooncake_fast25_conversation.jsonl.gz")
CACHED = "chat 300 tokens, cached"
SETTLED = "chat 300 tokens, cached, with access log"
STEADY = "500/s of 200 + 100 tokens, with access log"
REFUSED = "refusal (tenant over its rate)"
UNWATCHED = "telemetry off"
UNSAMPLED = "tracing on, unsampled"
LONG = "75k tokens, never seen"

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(name=CACHED, requests=CHAT, count=4000),
    Scenario(name=SETTLED, requests=CHAT, count=4000, log=True),
    Scenario(name="chat 300 tokens, never seen", requests=Chats(tokens=290, new_text=True), count=3000),
    Scenario(
        name=STEADY,
        requests=Chats(tokens=190, texts=64),
        count=5000,
        arrivals=OnClock(rate_per_s=500),
        log=True,
    ),
    Scenario(
        name=REFUSED, requests=Chats(tokens=290, tenant="pauper", new_body=True), count=4000, refused=True
    ),
    Scenario(
        name="refusal (again before its time)",
        requests=Chats(tokens=290, tenant="pauper"),
        count=4000,
        refused=True,
    ),
    Scenario(name="1k tokens, never seen", requests=Chats(tokens=1_000, new_text=True), count=1500),
    Scenario(
        name="8k tokens, never seen", requests=Chats(tokens=8_000, new_text=True), count=400, arrivals=FEW
    ),
    Scenario(
        name="32k tokens, never seen", requests=Chats(tokens=32_000, new_text=True), count=120, arrivals=FEW
    ),
    Scenario(name=LONG, requests=Chats(tokens=75_000, new_text=True), count=60, arrivals=FEW),
    Scenario(
        name="100k tokens, never seen", requests=Chats(tokens=100_000, new_text=True), count=48, arrivals=FEW
    ),
    Scenario(
        name="conversations, 20 turns of 2 x 200 tokens",
        requests=Conversations(turns=20, turn_tokens=200),
        count=1600,
    ),
    Scenario(
        name="Azure conversation trace",
        requests=AZURE,
        count=800,
        arrivals=AsTraced(trace=AZURE, faster=20),
        log=True,
    ),
    Scenario(
        name="Azure code trace, an excerpt",
        requests=AZURE_CODE,
        count=189,
        arrivals=AsTraced(trace=AZURE_CODE, faster=8),
        log=True,
    ),
    Scenario(
        name="Mooncake conversation trace",
        requests=MOONCAKE,
        count=100,
        arrivals=AsTraced(trace=MOONCAKE, faster=4),
        log=True,
    ),
    Scenario(name="ledger in Valkey, 1 worker", requests=CHAT, count=3000, log=True, shape=SHARED_LEDGER),
    Scenario(name="ledger in Valkey, 2 workers", requests=CHAT, count=3000, log=True, shape=TWO_WORKERS),
    Scenario(name=UNWATCHED, requests=CHAT, count=3000, log=True, shape=UNOBSERVED),
    Scenario(
        name=UNSAMPLED,
        requests=Chats(tokens=290, sampled=False),
        count=3000,
        log=True,
        shape=TRACED,
    ),
    Scenario(
        name="tracing on, every request sampled",
        requests=Chats(tokens=290, sampled=True),
        count=3000,
        log=True,
        shape=TRACED,
    ),
)

Row = dict[str, Any]


class OtherAnswers(Exception):
    """The service did something else than what the scenario is about: its figures would be of that."""


def compare(scenario: Scenario, services: Services, *, rounds: int, scale: float) -> Row:
    """Floor and service in turn, `rounds` times; the service keeps running, so that its caches are warm.

    The floor gets the same messages. Its answers carry nothing that a record could be made of, so it gets no
    access log: settlement is in our figure and not in the floor's.
    """
    exchange = exchanges(scenario.requests.prepared(), log=scenario.log)
    floor, service = services.floor(), services.service(scenario.shape)
    service.forget_peak()
    floors: list[Round] = []
    ours: list[Round] = []
    for _ in range(rounds):
        for server, taken in ((floor, floors), (service, ours)):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                taken.append(
                    runner.run(measure(server, exchange, scenario.arrivals, count=scenario.scaled(scale)))
                )
    sent, refused = sum(len(one.latencies_us) for one in ours), sum(one.refused for one in ours)
    other = sent - refused if scenario.refused else refused
    if other * 1000 > sent * OTHER_ANSWERS_PERMILLE:
        raise OtherAnswers(f"{scenario.name}: {other} of {sent} exchanges were not answered as expected")
    return row(scenario, floors, ours, peak_mb=service.peak_mb())


def row(scenario: Scenario, floors: list[Round], ours: list[Round], *, peak_mb: float) -> Row:
    """A scenario's figures: medians over the rounds, and the range of the ratio."""
    return {
        "scenario": scenario.name,
        "arrivals": scenario.arrivals.said(),
        "shape": asdict(scenario.shape),
        "cpu_us": spread(one.cpu_us for one in ours),
        "floor_cpu_us": spread(one.cpu_us for one in floors),
        "ratio": spread(mine.cpu_us / floor.cpu_us for mine, floor in zip(ours, floors, strict=True)),
        "cores": spread(one.cores for one in ours),
        "per_s": spread(one.per_s for one in ours),
        "per_core_s": round(1e6 / statistics.median(one.cpu_us for one in ours), 1),
        "p50_us": spread(one.p50_us for one in ours),
        "p95_us": spread(one.p95_us for one in ours),
        "p99_us": spread(one.quantile_us(0.99) for one in ours),
        "decided_p95_us": spread(quantile_of(one.decided_us, 0.95) for one in ours),
        "floor_p50_us": spread(one.p50_us for one in floors),
        "floor_p95_us": spread(one.p95_us for one in floors),
        "refused": sum(one.refused for one in ours),
        "exchanges": sum(len(one.latencies_us) for one in ours),
        "peak_mb": round(peak_mb),
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Least, middle and most over the rounds."""
    taken = sorted(values)
    return {
        "min": round(taken[0], 3),
        "median": round(statistics.median(taken), 3),
        "max": round(taken[-1], 3),
    }
