"""The demo's traffic: every kind of request that a gateway sees on a bad day, and what became of each."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from extproc.demo.stage import ACME_KEY, VISITOR_KEY, Progress, Stage

SENTENCE = "The harbour master counted every barrel before the tide came in. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of the demo. `leave_after_chunks` hangs up in the middle of the answer."""

    name: str
    body: dict[str, Any] | bytes
    key: str = ACME_KEY
    path: str = "/v1/chat/completions"
    headers: dict[str, str] = field(default_factory=dict)
    leave_after_chunks: int | None = None
    alongside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the client was told, joined with what the service decided."""

    name: str
    status: int
    decision: str
    reason: str = ""
    retry_after: str = ""
    tokens: str = ""
    lane: str = ""
    pool: str = ""


def chat(text: str, *, max_tokens: int = 64, stream: bool = False) -> dict[str, Any]:
    """A chat with one user turn; a stream reports its usage."""
    body: dict[str, Any] = {
        "model": "demo-model",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def visits() -> list[Visit]:
    """The demo's requests, in order."""
    hang_up = chat("Tell me everything about barrels.", max_tokens=1_000, stream=True) | {"ignore_eos": True}
    return [
        Visit(name="chat turn", body=chat("Name three rivers.")),
        Visit(name="chat turn, streamed", body=chat("And three lakes?", stream=True)),
        Visit(
            name="TGI client",
            path="/generate",
            body={"inputs": "Three seas are", "parameters": {"max_new_tokens": 20}},
        ),
        Visit(name="long document", body=chat(SENTENCE * 600, max_tokens=200)),
        Visit(
            name="document declared urgent",
            body=chat(SENTENCE * 600),
            headers={"x-request-deadline-ms": "100"},
        ),
        Visit(name="prompt over the context", body=chat(SENTENCE * 4_000)),
        Visit(name="visitor's first request", body=chat("Hello!", max_tokens=600), key=VISITOR_KEY),
        Visit(name="visitor over its quota", body=chat("Hello again!", max_tokens=600), key=VISITOR_KEY),
        Visit(name="visitor asks too much", body=chat("Hello!", max_tokens=1_000), key=VISITOR_KEY),
        Visit(name="caller nobody knows", body=chat("Let me in."), key="stolen"),
        Visit(name="not JSON", body=b'{"model": '),
        Visit(name="client that hangs up", body=hang_up, leave_after_chunks=3),
        Visit(name="chat in a full pool", body=chat("Is there room?", max_tokens=900), alongside=3),
        Visit(name="chat after the rush", body=chat("And now?")),
    ]


async def pay(visit: Visit, stage: Stage, client: aiohttp.ClientSession) -> Told:
    """Send one request, read (or leave) its answer."""
    crowd = [asyncio.ensure_future(_crowd(stage, client, visit.key)) for _ in range(visit.alongside)]
    try:
        if crowd:
            await asyncio.sleep(0.3)
        return await _pay(visit, stage, client)
    finally:
        for one in crowd:
            one.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


async def _crowd(stage: Stage, client: aiohttp.ClientSession, key: str) -> None:
    """A long answer that keeps a pool busy until it is cancelled."""
    body = chat("Count to a thousand.", max_tokens=1_000, stream=True) | {"ignore_eos": True}
    async with client.post(
        f"{stage.gateway}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    ) as answer:
        async for _ in answer.content.iter_any():
            pass


async def _pay(visit: Visit, stage: Stage, client: aiohttp.ClientSession) -> Told:
    data = visit.body if isinstance(visit.body, bytes) else json.dumps(visit.body).encode()
    headers = {
        "authorization": f"Bearer {visit.key}",
        "content-type": "application/json",
        **visit.headers,
    }
    async with client.post(stage.gateway + visit.path, data=data, headers=headers) as answer:
        if visit.leave_after_chunks is None:
            content = await answer.read()
        else:
            content = b""
            for _ in range(visit.leave_after_chunks):
                await answer.content.readany()
        told = answer.headers
        status = answer.status
    if "x-admission-reason" in told:
        counted = json.loads(content)["error"].get("counted") or {}
        return Told(
            name=visit.name,
            status=status,
            decision="refused",
            reason=told["x-admission-reason"],
            retry_after=f"{told['retry-after']} s" if "retry-after" in told else "never",
            tokens=_tokens(counted.get("input_tokens"), counted.get("output_tokens")),
            lane=told.get("x-admission-lane", ""),
        )
    # What an engine got says what was decided: the service told it in headers that no client can set.
    given = await _engine_was_told(stage, client)
    input_tokens = int(given.get("x-admission-input-tokens", 0))
    return Told(
        name=visit.name,
        status=status,
        decision="admitted" if given else "failed",
        tokens=_tokens(input_tokens, int(given.get("x-admission-reserved-tokens", 0)) - input_tokens),
        lane=given.get("x-admission-lane", ""),
        pool=given.get("x-admission-pool", ""),
    )


def _tokens(input_tokens: int | None, output_tokens: int | None) -> str:
    """Counted input and permitted output."""
    return "" if input_tokens is None else f"{input_tokens} + {output_tokens or 0}"


async def _engine_was_told(stage: Stage, client: aiohttp.ClientSession) -> dict[str, str]:
    """The admission headers of the request that reached an engine last."""
    newest: tuple[int, dict[str, str]] = (0, {})
    for url in stage.engines.values():
        async with client.get(f"{url}/sim/requests") as answer:
            for request in (await answer.json())["requests"]:
                newest = max(
                    newest, (request["received_at_ms"], request["headers"]), key=lambda pair: pair[0]
                )
    return newest[1]


async def play(stage: Stage, progress: Progress) -> list[Told]:
    """Pay every visit in turn."""
    told = []
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for number, visit in enumerate(visits(), start=1):
            progress(f"request {number}: {visit.name}")
            told.append(await pay(visit, stage, client))
    return told
