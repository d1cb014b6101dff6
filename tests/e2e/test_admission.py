"""The contract, told by a real Envoy to real clients, in front of simulated engines."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import time
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from tests.support.gateway import Gateway

CHAT = "/v1/chat/completions"
SENTENCE = "The harbour master counted every barrel before the tide came in. "


def chat(text: str = "Hello!", **changes: Any) -> dict[str, Any]:
    """A short chat."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16,
    }
    return body | changes


async def post(
    gateway: Gateway,
    body: dict[str, Any] | bytes,
    *,
    path: str = CHAT,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"x-tenant-id": "acme", "content-type": "application/json"} | (headers or {})
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), auto_decompress=False) as client,
        client.post(gateway.url + path, data=io.BytesIO(data), headers=sent) as answer,
    ):
        raw = await answer.read()
        content = json.loads(raw) if "json" in answer.headers.get("content-type", "") else raw
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, content


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (chat(SENTENCE * 4_000), {}, 413, "context_limit"),
        (chat(SENTENCE * 230, max_tokens=8_000), {}, 413, "lane_limit"),
        (chat(max_tokens=1_500), {"x-tenant-id": "visitor"}, 413, "exceeds_quota"),
        (chat(SENTENCE * 600), {"x-request-deadline-ms": "20"}, 429, "deadline_infeasible"),
        (chat(), {"x-tenant-id": "stranger"}, 401, "tenant_unknown"),
        (chat(), {"x-tenant-id": "gone"}, 403, "tenant_disabled"),
        (chat(model="nope"), {}, 400, "invalid_parameter"),
        (chat(max_tokens="16"), {}, 400, "invalid_parameter"),
        (b"{", {}, 400, "malformed_request"),
        (b"", {}, 400, "malformed_request"),
        (b"\xff" * 100_000, {}, 400, "malformed_request"),
        (b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}", {}, 400, "malformed_request"),
        (b"{}", {"content-encoding": "lzma"}, 415, "unsupported_encoding"),
        (b"x" * (3 << 20), {}, 413, "body_too_large"),
    ],
)
async def test_what_is_not_admitted_is_told_so(
    sim_gateway: Gateway,
    body: dict[str, Any] | bytes,
    headers: dict[str, str],
    status: int,
    reason: str,
) -> None:
    """Status, reason and retry are the contract's, nothing is held, and the service is unharmed."""
    got_status, got_headers, content = await post(sim_gateway, body, headers=headers)
    assert (got_status, got_headers.get("x-admission-reason")) == (status, reason)
    assert content["error"]["code"] == reason
    if status == 413:
        assert got_headers["x-should-retry"] == "false"
        assert "retry-after" not in got_headers
    if status == 429:
        assert int(got_headers["retry-after"]) >= 1
    assert await asyncio.to_thread(sim_gateway.await_idle)
    assert (await post(sim_gateway, chat()))[0] == 200


async def test_size_decides_the_pool_and_the_engine_is_told(
    sim_gateway: Gateway, engines: dict[str, str]
) -> None:
    """A chat goes to the chat pool, a document to the other; clients cannot choose, nor smuggle headers."""
    forged = {"x-admission-pool": "documents", "x-admission-lane": "vip", "x-admission-forged": "1"}
    assert (await post(sim_gateway, chat(), headers=forged))[0] == 200
    assert (await post(sim_gateway, chat(SENTENCE * 600)))[0] == 200
    told = {name: await _received(address) for name, address in engines.items()}

    assert told["chat"]["x-admission-pool"] == "chat"
    assert told["chat"]["x-admission-lane"] == "interactive"
    assert "x-admission-forged" not in told["chat"]
    assert told["documents"]["x-admission-lane"] == "bulk"
    assert int(told["documents"]["x-admission-input-tokens"]) > 4_096


async def test_a_declared_lane_can_only_be_lowered(sim_gateway: Gateway, engines: dict[str, str]) -> None:
    """A small chat that calls itself bulk travels as bulk; a document that calls itself interactive does not."""
    assert (await post(sim_gateway, chat("lowered"), headers={"x-request-intent": "bulk"}))[0] == 200
    assert (await _received(engines["documents"]))["x-admission-lane"] == "bulk"
    assert (await post(sim_gateway, chat(SENTENCE * 600), headers={"x-request-intent": "interactive"}))[
        0
    ] == 200
    assert int((await _received(engines["documents"]))["x-admission-input-tokens"]) > 4_096


async def test_concurrent_requests_never_pass_one_limit_together(sim_gateway: Gateway) -> None:
    """Twenty at once for a tenant with two in flight: two are admitted, the others are told to come back."""
    body = chat(max_tokens=200, ignore_eos=True)
    answers = await asyncio.gather(
        *(post(sim_gateway, body, headers={"x-tenant-id": "visitor"}) for _ in range(20))
    )
    statuses = sorted(status for status, _, _ in answers)
    assert statuses == [200] * 2 + [429] * 18
    reasons = {headers["x-admission-reason"] for status, headers, _ in answers if status == 429}
    assert reasons <= {"tenant_inflight", "tenant_rate"}
    await asyncio.to_thread(sim_gateway.await_idle)


async def test_a_full_pool_refuses_and_recovers(sim_gateway: Gateway) -> None:
    """Reserved tokens never exceed ceiling less guard band; what is over is 429, and later there is room."""
    body = chat(max_tokens=1_500, ignore_eos=True, stream=True)
    answers = await asyncio.gather(*(post(sim_gateway, body) for _ in range(8)))
    statuses = sorted(status for status, _, _ in answers)
    assert statuses == [200] * 4 + [429] * 4
    assert (await post(sim_gateway, chat()))[0] == 200
    await asyncio.to_thread(sim_gateway.await_idle)


@pytest.mark.parametrize("after_chunks", [0, 1, 5])
async def test_a_client_that_hangs_up_gives_everything_back(sim_gateway: Gateway, after_chunks: int) -> None:
    """Whenever the client leaves, the lease is released, and the record books what is known."""
    body = chat(max_tokens=2_000, stream=True, ignore_eos=True)
    headers = {"x-tenant-id": "acme"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for _ in range(10):
            async with client.post(sim_gateway.url + CHAT, json=body) as answer:
                for _ in range(after_chunks):
                    await answer.content.readany()
                answer.close()
    state = await asyncio.to_thread(sim_gateway.await_idle)
    assert state["leases"] == 0


async def test_bodies_up_to_the_limit_pass_and_one_byte_more_does_not(sim_gateway: Gateway) -> None:
    """Default buffers of Envoy (1 MiB) and gRPC (4 MiB) are out of the way; the policy's limit is the limit."""
    limit = 2 << 20
    for size in (32_768, 32_769, 1_048_576, 1_048_577, limit):
        padded = json.dumps(chat(pad="")).encode()
        padded = padded[:-2] + b"x" * (size - len(padded)) + padded[-2:]
        assert len(padded) == size
        assert (await post(sim_gateway, padded))[0] == 200, size
    padded = padded[:-2] + b"x" + padded[-2:]
    status, headers, _ = await post(sim_gateway, padded)
    assert (status, headers["x-admission-reason"]) == (413, "body_too_large")


MANY = [{"role": "user", "content": f"turn {number}"} for number in range(1_500)]
LISTS = [[number] for number in range(20_000)]


async def test_long_bodies_are_read_like_short_ones(sim_gateway: Gateway, engines: dict[str, str]) -> None:
    """Read in threads and in pieces, plain or compressed: admitted with the same count, or refused as malformed."""
    counts = set()
    for body, status in (
        (chat(messages=MANY), 200),
        (chat(messages=MANY, unknown=LISTS), 200),
        (chat(messages=MANY, unknown=LISTS * 2), 400),
        (chat(messages=[*MANY, {"role": 1}]), 400),
    ):
        raw = json.dumps(body).encode()
        for coding, data in (("identity", raw), ("gzip", gzip.compress(raw))):
            found, headers, _ = await post(sim_gateway, data, headers={"content-encoding": coding})
            assert found == status, headers
            if status == 200:
                told = await _received(engines["documents"])
                counts.add(int(told["x-admission-input-tokens"]))
    assert len(counts) == 1
    assert min(counts) > 2 * len(MANY)
    assert (await asyncio.to_thread(sim_gateway.await_idle))["leases"] == 0


async def test_clients_that_leave_while_their_long_bodies_are_read_hold_nothing(sim_gateway: Gateway) -> None:
    """Whenever they leave, nothing is reserved or all of it is given back."""
    raw = json.dumps(chat(messages=MANY, unknown=LISTS)).encode()
    headers = {"x-tenant-id": "acme", "content-type": "application/json"}

    async def leave(after_s: float) -> None:
        async with aiohttp.ClientSession(headers=headers) as client:
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s), client.post(sim_gateway.url + CHAT, data=raw):
                    pass

    await asyncio.gather(*(leave(number * 0.004) for number in range(30)))
    assert (await asyncio.to_thread(sim_gateway.await_idle))["leases"] == 0
    assert (await post(sim_gateway, chat()))[0] == 200


async def test_other_routes_pass_untouched(sim_gateway: Gateway) -> None:
    """Listing models is not inference: it reaches an engine without a reservation."""
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"{sim_gateway.url}/v1/models") as answer,
    ):
        assert answer.status == 200
        assert (await answer.json())["data"][0]["id"] == "tiny"


async def test_answers_in_flight_outlive_the_service(own_gateway: Gateway) -> None:
    """Killed in mid-answer: the stream goes on to its end, newcomers get 503, and a restart serves again."""
    body = chat(max_tokens=150, stream=True, ignore_eos=True)
    headers = {"x-tenant-id": "acme"}
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(own_gateway.url + CHAT, json=body) as answer:
            await answer.content.readany()
            own_gateway.service.kill()
            rest = await answer.content.read()
        assert rest.rstrip().endswith(b"data: [DONE]")
        async with client.post(own_gateway.url + CHAT, json=chat()) as refused:
            assert refused.status == 503
        await asyncio.to_thread(own_gateway.service.start)
        deadline = time.monotonic() + 20
        while True:
            async with client.post(own_gateway.url + CHAT, json=chat()) as again:
                if again.status == 200:
                    break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)


async def test_a_drained_service_ends_while_its_answers_go_on(own_gateway: Gateway) -> None:
    """SIGTERM: the process exits although an answer is open, and that answer reaches its end."""
    body = chat(max_tokens=300, stream=True, ignore_eos=True)
    headers = {"x-tenant-id": "acme"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(own_gateway.url + CHAT, json=body) as answer,
    ):
        await answer.content.readany()
        await asyncio.to_thread(own_gateway.service.stop)
        rest = await answer.content.read()
    assert rest.rstrip().endswith(b"data: [DONE]")


async def _received(address: str) -> dict[str, str]:
    """The admission headers of the last request that an engine got."""
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://{address}/sim/requests") as answer,
    ):
        requests = (await answer.json())["requests"]
    headers: dict[str, str] = requests[-1]["headers"]
    return headers
