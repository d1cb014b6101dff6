"""One trace through the real Envoy: the client's span, Envoy's, ours, and what the engine is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.adapters.envoy_bootstrap import SocketAddress
from tests.envoy.stubs import StubEngine
from tests.support.gateway import Gateway, running_gateway
from tests.telemetry.collector import Received, attributes_of, grpc_collector

POLICY = """
version: 1
models:
  tiny:
    tokenizer: {tokenizer}
    context_tokens: 16_384
    default_output_tokens: 64
    lanes: {{interactive: chat}}
lanes:
  interactive: {{max_input_tokens: 4_096, max_output_tokens: 2_048, deadline_ms: 30s, residence_ms: 0}}
pools:
  chat:
    replicas: [{{name: chat-0, address: "{engine}", ceiling_tokens: 64_000}}]
    guard_band_permille: 100
    prefill_tokens_per_s: 20_000
    decode_tokens_per_s: 100
    request_cap: 256
tenants:
  identity: {{header: x-tenant-id}}
  tiers: {{paid: {{}}}}
  members: {{acme: {{tier: paid}}}}
limits: {{body_bytes: 2MiB}}
"""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A gateway whose spans, Envoy's and ours, go to `collector`."""

    gateway: Gateway
    engine: StubEngine
    collector: Received

    async def ask(self, traceparent: str | None, **body: Any) -> int:
        """The status of a short chat's answer."""
        headers = {"x-tenant-id": "acme"} | ({"traceparent": traceparent} if traceparent else {})
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16} | body
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.gateway.url + "/v1/chat/completions", json=chat, headers=headers) as answer,
        ):
            await answer.read()
            return answer.status


@pytest.fixture
async def traced(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Traced]:
    """Envoy and the service, both exporting to one collector, in front of one engine."""

    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"object": "chat.completion", "choices": [], "usage": USAGE})

    async with AsyncExitStack() as stack:
        collector = stack.enter_context(grpc_collector())
        engine = StubEngine(respond=respond)
        await engine.start()
        stack.push_async_callback(engine.stop)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "admission")
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        host, port = collector.address.split(":")
        blocking = ExitStack()
        running = running_gateway(
            tmp_path,
            POLICY.format(tokenizer=tokenizer_dir / "tokenizer.json", engine=engine.address),
            otlp=SocketAddress(host=host, port=int(port)),
        )
        gateway = await asyncio.to_thread(blocking.enter_context, running)
        stack.push_async_callback(asyncio.to_thread, blocking.close)
        yield Traced(gateway=gateway, engine=engine, collector=collector)


def ancestors(collector: Received, span: Any) -> list[str]:
    """The ids above a span, from its parent to the first one that nobody here exported."""
    by_id = {one.span_id.hex(): one for _, one in collector.spans}
    above = [span.parent_span_id.hex()]
    while above[-1] in by_id:
        above.append(by_id[above[-1]].parent_span_id.hex())
    return above


async def test_client_envoy_service_and_engine_are_one_trace(traced: Traced) -> None:
    """Our span hangs below Envoy's, Envoy's below the client's, and the engine is told the same trace."""
    assert await traced.ask(f"00-{TRACE}-{SPAN}-01") == 200
    collector = traced.collector
    await asyncio.to_thread(collector.await_spans, 1, "extproc.answer")
    # Envoy exports its spans in its own time, the ingress one when the request has ended.
    for _ in range(200):
        (whole,) = collector.named("extproc.admission")
        above = ancestors(collector, whole)
        if above[-1] == SPAN:
            break
        await asyncio.sleep(0.05)

    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}
    assert above[-1] == SPAN
    assert len(above) >= 2, "ours is a child of Envoy's span, not its sibling"
    (answer,) = collector.named("extproc.answer")
    assert answer.parent_span_id == whole.span_id
    assert attributes_of(answer)["gen_ai.usage.input_tokens"] == USAGE["prompt_tokens"]
    assert attributes_of(whole)["extproc.admission.lane"] == "interactive"

    (request,) = (one for one in traced.engine.served if one.method == "POST")  # others ask for its load
    told = request.headers["traceparent"].split("-")
    envoys = {span.span_id.hex() for service, span in collector.spans if service != "admission"}
    assert told[1] == TRACE
    assert told[2] in envoys


async def test_a_refusal_is_in_the_trace_and_an_unsampled_caller_is_not(traced: Traced) -> None:
    """What was refused is traced like what was admitted; what the caller does not sample leaves nothing."""
    assert await traced.ask(f"00-{'7' * 32}-{SPAN}-00") == 200
    assert await traced.ask(f"00-{TRACE}-{SPAN}-01", model="nobody-serves-this") == 400
    (whole,) = await asyncio.to_thread(traced.collector.await_spans, 1, "extproc.admission")

    assert attributes_of(whole)["extproc.admission.reason"] == "invalid_parameter"
    assert whole.status.code == 0
    assert {span.trace_id.hex() for _, span in traced.collector.spans} == {TRACE}
    assert "nobody-serves-this" not in str(whole)
