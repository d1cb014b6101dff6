"""A real vLLM behind a real Envoy and the service: counted, forwarded and booked, whole answers and streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.engines.vllm_requests import Request, requests
from tests.support.gateway import Gateway, running_gateway
from tests.support.vllm import CONTEXT_TOKENS, VllmServer

ASKED = 180
AT_ONCE = 6
ANSWER_TOKENS = 3
BOOKED_WITHIN_S = 30

POLICY = """
version: 1
models:
  tiny:
    tokenizer: {tokenizer}
    context_tokens: {context}
    default_output_tokens: 64
    lanes: {{interactive: chat, bulk: chat}}
lanes:
  interactive: {{max_input_tokens: 8_000, max_output_tokens: 64, deadline_ms: 120s, residence_ms: 60s}}
  bulk: {{max_input_tokens: 8_000, max_output_tokens: 64, deadline_ms: 120s, residence_ms: 60s}}
pools:
  chat:
    replicas: [{{name: chat-0, address: "{address}", ceiling_tokens: 64_000}}]
    prefill_tokens_per_s: 1_000_000
    decode_tokens_per_s: 100
    request_cap: 64
tenants: {{identity: {{header: x-tenant-id}}, tiers: {{paid: {{}}}}, members: {{acme: {{tier: paid}}}}}}
"""


@pytest.fixture(scope="module")
def gateway(vllm_qwen3: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Envoy, the service and vLLM."""
    policy = POLICY.format(
        tokenizer=vllm_qwen3.model / "tokenizer.json",
        context=CONTEXT_TOKENS,
        address=vllm_qwen3.url.removeprefix("http://"),
    )
    with running_gateway(tmp_path_factory.mktemp("vllm-gateway"), policy) as running:
        yield running


def answered(request: Request, *, stream: bool) -> Request:
    """The request for a few tokens, whole or as a stream that tells its usage."""
    path, body = request
    body = dict(body)
    if path == "/inference/v1/generate":
        body["sampling_params"] = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        return path, body
    if path in ("/v1/chat/completions", "/v1/completions"):
        body |= {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        for sooner in ("max_completion_tokens", "stop"):
            body.pop(sooner, None)
        if stream:
            body["stream_options"] = {"include_usage": True}
    elif path == "/v1/responses":
        body["max_output_tokens"] = ANSWER_TOKENS
    if stream:
        body["stream"] = True
    return path, body


async def test_every_answer_is_booked_as_it_was_counted(gateway: Gateway) -> None:
    """Counted input is the engine's own in every access-log record, and the drift alarm has nothing to say."""
    asked = [answered(request, stream=at % 2 == 0) for at, request in enumerate(requests(ASKED, seed=5))]
    gate = asyncio.Semaphore(AT_ONCE)
    ids: dict[str, Request] = {}
    async with aiohttp.ClientSession(headers={"x-tenant-id": "acme"}) as client:

        async def ask(request: Request) -> None:
            path, body = request
            async with gate, client.post(gateway.url + path, json=body) as answer:
                assert answer.status == 200, (path, await answer.text())
                await answer.read()
                ids[answer.headers["x-request-id"]] = request

        await asyncio.gather(*(ask(request) for request in asked))

    assert len(ids) == ASKED
    await asyncio.to_thread(_await_booked, gateway)
    lines = {request_id: await asyncio.to_thread(gateway.logged, request_id) for request_id in ids}
    unequal = [
        (line["admission"]["input_tokens"], line["usage"], ids[request_id])
        for request_id, line in lines.items()
        if line["usage"]["input_tokens"] != line["admission"]["input_tokens"]
    ]
    assert unequal == []
    for request_id, (path, body) in ids.items():
        if body.get("ignore_eos"):
            prompts = 1 if path.endswith("chat/completions") else _prompts(body["prompt"])
            made = lines[request_id]["usage"]["output_tokens"]
            assert made == ANSWER_TOKENS * prompts * body.get("n", 1), (path, body)
    metrics = dict(line.rsplit(" ", 1) for line in gateway.get("/metrics").splitlines() if "count_" in line)
    assert float(metrics['extproc_count_checked_total{model="tiny"}']) == ASKED
    assert float(metrics.get('extproc_count_drift_total{model="tiny"}', 0)) == 0


def _await_booked(gateway: Gateway) -> None:
    """Wait until nothing is held and every record has come; they follow the answers."""
    deadline = time.monotonic() + BOOKED_WITHIN_S
    while gateway.await_idle()["unbooked"]:
        assert time.monotonic() < deadline, "answers are not booked"
        time.sleep(0.1)


def _prompts(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
