"""What is measured of a peer that runs. Each measure answers with figures that go into JSON as they are."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.peers import client
from tests.bench.peers.client import encode
from tests.bench.peers.peer import NotMeasuredError, Reply, Running, others_cpu_s
from tests.bench.peers.prompts import CHINESE, ENGLISH, OUTPUT_TOKENS, PROMPT_TOKENS, usual, varied
from tests.bench.peers.upstream import Upstream

INFLIGHT_LIMIT = 8
BUDGET_REQUESTS = 10
BUDGET_TOKENS = BUDGET_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS)
TIMES_OVER = 10
HANGING_UP = 200
SECOND_BURST_AFTER_S = 2.0
HOLD_MS = 8_000
PATIENCE_S = 60.0
LATENCY_RATE_PER_S = 20
SHOWN_HEADERS = (
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-admission-reason",
    "rate_limit_type",
    "reset_at",
    "content-type",
)


def throughput(peer: Running, bodies: Sequence[bytes], *, seconds: float, directory: Path) -> dict[str, Any]:
    """Requests per second of CPU, of all the peer needs and of each part.

    Raises NotMeasuredError when it refuses or breaks what it should serve.
    """
    before, others = peer.cpu_s(), others_cpu_s()
    loaded = client.load(peer, bodies, seconds=seconds, directory=directory)
    used = {part: seconds_now - before[part] for part, seconds_now in peer.cpu_s().items()}
    if not loaded.answered or loaded.refused or loaded.broken > loaded.requests // 100:
        raise NotMeasuredError(
            f"of {loaded.requests} requests {loaded.refused} refused, {loaded.broken} broken"
        )
    others = others_cpu_s() - others
    total = sum(used.values())
    return {
        "requests": loaded.answered,
        "per_s": round(loaded.answered / loaded.seconds, 1),
        "per_core_s": round(loaded.answered / total, 1),
        "cpu_us": {part: round(seconds_used / loaded.answered * 1e6) for part, seconds_used in used.items()},
        "cores": round(total / loaded.seconds, 2),
        "others_cores": round(max(0.0, others) / loaded.seconds, 2),
    }


def latency(peer: Running, direct: Running, bodies: Sequence[bytes], *, seconds: float) -> dict[str, Any]:
    """Milliseconds at a modest fixed rate, asked in turn with the bare upstream."""
    took = asyncio.run(
        client.paced({"direct": direct, "peer": peer}, bodies, rate_per_s=LATENCY_RATE_PER_S, seconds=seconds)
    )
    if len(took["peer"]) < 10:
        raise NotMeasuredError("hardly any request was answered at the fixed rate")
    p50, p95 = (quantile(took["peer"], share) for share in (0.5, 0.95))
    return {
        "p50_ms": round(p50, 2),
        "p95_ms": round(p95, 2),
        "added_p50_ms": round(p50 - quantile(took["direct"], 0.5), 2),
        "added_p95_ms": round(p95 - quantile(took["direct"], 0.95), 2),
        "paced_requests": len(took["peer"]),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def held(models: Path, peer: Running, *, seed: int, hold_ms: int, language: str = ENGLISH) -> dict[str, Any]:
    """A request that stays in the engine for `hold_ms`."""
    if (
        peer.own_engine
    ):  # a tiny model on this processor: eight at a time, some hundred tokens a second in all
        tokens = max(8, hold_ms // 14)
        return usual(models, seed=seed, language=language) | {"max_tokens": tokens, "ignore_eos": True}
    return usual(models, seed=seed, word=f"[hold {hold_ms}] ", language=language)


def requests_at_once(peer: Running, upstream: Upstream, models: Path) -> dict[str, Any]:
    """Ten times the limit at once, and again two seconds later while the first are still being served."""
    bodies = [
        encode(held(models, peer, seed=seed, hold_ms=HOLD_MS)) for seed in range(INFLIGHT_LIMIT * TIMES_OVER)
    ]
    upstream.reset()
    first, second = asyncio.run(client.two_bursts(peer, "probe", bodies, pause_s=SECOND_BURST_AFTER_S))
    stats = upstream.stats()
    return {
        "limit": INFLIGHT_LIMIT,
        "asked_at_once": len(bodies),
        "let_in": sum(reply.admitted for reply in first),
        "let_in_of_second": sum(reply.admitted for reply in second),
        "most_open": None if peer.own_engine else stats["peak"],
        "statuses": statuses(first),
        "refusal": refusal(first + second),
    }


def stream_refusal(peer: Running, models: Path) -> dict[str, Any]:
    """What clients get that ask for a stream when the limit is reached."""
    bodies = [
        encode(held(models, peer, seed=seed, hold_ms=2_000) | {"stream": True})
        for seed in range(INFLIGHT_LIMIT * TIMES_OVER)
    ]
    blockers = [encode(held(models, peer, seed=seed, hold_ms=4_000)) for seed in range(INFLIGHT_LIMIT)]

    async def ask() -> list[Reply]:
        blocking = asyncio.create_task(client.burst(peer, "probe", blockers))
        await asyncio.sleep(1)
        replies = await client.burst(peer, "probe", bodies)
        await blocking
        return replies

    replies = asyncio.run(ask())
    return refusal(replies) | {"statuses": statuses(replies)}


def tokens_at_once(peer: Running, models: Path) -> dict[str, Any]:
    """Ten times a token budget at once: 100 chats of 300 + 100 tokens, where a minute's budget is for ten.

    Once in English and once in Chinese: as many tokens, from another number of characters.
    """
    figures: dict[str, Any] = {"budget_tokens": BUDGET_TOKENS, "budget_requests": BUDGET_REQUESTS}
    for who, language in (("english", ENGLISH), ("chinese", CHINESE)):
        bodies = [
            encode(held(models, peer, seed=seed, hold_ms=1_000, language=language))
            for seed in range(BUDGET_REQUESTS * TIMES_OVER)
        ]
        replies = asyncio.run(client.burst(peer, who, bodies))
        let_in = sum(reply.admitted for reply in replies)
        figures[who] = {
            "asked_at_once": len(bodies),
            "let_in": let_in,
            "tokens_let_in": let_in * (PROMPT_TOKENS + OUTPUT_TOKENS),
            "statuses": statuses(replies),
        }
        if "refusal" not in figures and let_in < len(replies):
            figures["refusal"] = refusal(replies)
    return figures


def statuses(replies: Sequence[Reply]) -> dict[str, int]:
    """How many of each status."""
    return {
        str(status): count for status, count in sorted(Counter(reply.status for reply in replies).items())
    }


def refusal(replies: Sequence[Reply]) -> dict[str, Any]:
    """The most common refusal: status, the headers that matter, the body."""
    refused = [reply for reply in replies if not reply.admitted]
    if not refused:
        return {"status": None}
    common = Counter(reply.status for reply in refused).most_common(1)[0][0]
    one = next(reply for reply in refused if reply.status == common)
    return {
        "status": one.status,
        "headers": {name: one.headers[name] for name in SHOWN_HEADERS if name in one.headers},
        "body": one.body[:600].decode(errors="replace"),
    }


def hang_ups(peer: Running, upstream: Upstream, models: Path) -> dict[str, Any]:
    """200 clients leave in the middle of a streamed answer; then as many ask again as the limit allows.

    `cpu_s` is what the peer used until both it and the upstream were idle, or for as long as we waited.
    """
    body = usual(models, seed=0, word="[drip] ") | {"stream": True}
    if peer.own_engine:
        body |= {"max_tokens": 4_000, "ignore_eos": True}
    before = first_gauges(peer)
    upstream.reset()
    begun, refused = asyncio.run(client.hang_up(peer, "probe", encode(body), HANGING_UP))
    left, cpu_s = time.monotonic(), sum(peer.cpu_s().values())
    upstream_s: float | None = None
    peer_s: float | None = None
    gauges: dict[str, float] = {}
    while time.monotonic() < left + PATIENCE_S:
        after_s = round(time.monotonic() - left, 2)
        if upstream_s is None and upstream.stats()["open"] == 0:
            upstream_s = after_s
        try:
            gauges = peer.gauges()
        except OSError:  # too busy to say
            gauges = {}
        if (
            peer_s is None
            and gauges.keys() == before.keys()
            and all(gauges[name] <= before[name] for name in gauges)
        ):
            peer_s = after_s
        if upstream_s is not None and peer_s is not None:
            break
        time.sleep(0.1)
    still_open = upstream.stats()["open"]
    cpu_s = sum(peer.cpu_s().values()) - cpu_s
    bodies = [encode(held(models, peer, seed=seed, hold_ms=HOLD_MS)) for seed in range(HANGING_UP)]
    again = [] if peer.own_engine else asyncio.run(client.burst(peer, "probe", bodies))
    return {
        "clients": HANGING_UP,
        "begun": begun,
        "refused": refused,
        "upstream_idle_after_s": None if peer.own_engine else upstream_s,
        "upstream_still_open": None if peer.own_engine else still_open,
        "cpu_s": round(cpu_s, 2),
        "gauges_before": before,
        "gauges_after": gauges,
        "gauges_idle_after_s": peer_s if gauges else None,
        "let_in_again": sum(reply.admitted for reply in again) if again else None,
        "statuses_again": statuses(again),
    }


def first_gauges(peer: Running) -> dict[str, float]:
    """What it says it holds before anything happens; the first answer of some takes many seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return peer.gauges()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def counts(peer: Running, models: Path) -> dict[str, Any]:
    """Input tokens that the peer took each request for, beside the engine's `usage`. One client for each."""
    rows: list[dict[str, Any]] = []
    requests = [*varied(models), (f"a chat of {PROMPT_TOKENS}", usual(models, seed=1) | {"max_tokens": 1})]
    for number, (name, body) in enumerate(requests):
        (reply,) = asyncio.run(client.burst(peer, f"count-{number}", [encode(body)]))
        if not reply.admitted:
            rows.append({"request": name, "refused": reply.status, "body": reply.body[:200].decode()})
            continue
        true = json.loads(reply.body)["usage"]["prompt_tokens"]
        rows.append({"request": name, "true": true, "counted": peer.counted(reply, body)})
    if all(row.get("counted") is None for row in rows):
        raise NotMeasuredError("it counts no input tokens before it lets a request in, or does not tell")
    return {"rows": rows} | deviation(rows)


def deviation(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How far counts are from the truth: how many are equal, and counted / true."""
    pairs = [(row["counted"], row["true"]) for row in rows if row.get("counted") is not None]
    ratios = [counted / true for counted, true in pairs]
    return {
        "requests": len(pairs),
        "equal": sum(counted == true for counted, true in pairs),
        "least_ratio": round(min(ratios), 2),
        "median_ratio": round(statistics.median(ratios), 2),
        "most_ratio": round(max(ratios), 2),
        "sum_ratio": round(sum(counted for counted, _ in pairs) / sum(true for _, true in pairs), 2),
    }
