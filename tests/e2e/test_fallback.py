"""A full pool behind the real Envoy: where requests go instead, what engines see, and what clients are told."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.dialects.rewriting import with_model
from tests.e2e.conftest import POLICY, _await_up
from tests.e2e.test_admission import CHAT, chat, post
from tests.e2e.test_body_modes import MODES, another_envoy
from tests.support import child
from tests.support.gateway import Gateway, running_gateway

ORIGIN = "https://eu.example.org"


@pytest.fixture(scope="module")
def fallback_engines() -> Iterator[dict[str, str]]:
    """Three simulated engines by pool name; the one of the pool small serves the model small."""
    pools = {"chat": "tiny", "documents": "tiny", "small": "small"}
    ports = dict(zip(pools, child.free_ports(3), strict=True))
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "extproc.sim.server",
                f"--port={ports[pool]}",
                f"--model={model}",
                "--prefill-tokens-per-s=20000",
                "--kv-tokens=64000",
            ],
            stdin=subprocess.DEVNULL,
            text=True,
        )
        for pool, model in pools.items()
    ]
    try:
        for port in ports.values():
            _await_up(f"http://127.0.0.1:{port}/health")
        yield {pool: f"127.0.0.1:{port}" for pool, port in ports.items()}
    finally:
        for process in processes:
            child.stop(process)


def policy_with(fallback: str, engines: dict[str, str], tokenizer_dir: Path) -> str:
    """Chats in a pool of 2,000 tokens, and these places to go when it is full."""
    text = POLICY.format(
        tokenizer=tokenizer_dir / "tokenizer.json",
        chat=engines["chat"],
        documents=engines["documents"],
        ceiling_tokens=2_000,
    )
    small = f"""
  small:
    tokenizer: {tokenizer_dir / "tokenizer.json"}
    context_tokens: 8_192
    default_output_tokens: 64
    cost_factor: 0.5
    lanes: {{interactive: small}}
lanes:"""
    pool = f"""
  small:
    replicas: [{{name: small-0, address: "{engines["small"]}", ceiling_tokens: 8_000}}]
    prefill_tokens_per_s: 20_000
    decode_tokens_per_s: 100
tenants:"""
    text = text.replace("bulk: documents}", f"bulk: documents}}\n    fallback: {fallback}", 1)
    return text.replace("\nlanes:", small, 1).replace("\ntenants:", pool, 1)


@pytest.fixture(scope="module")
def to_a_model(
    fallback_engines: dict[str, str], tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway whose chats fall back to the model small, then to the pool of documents."""
    policy = policy_with("[{model: small}, {pool: documents}]", fallback_engines, tokenizer_dir)
    with running_gateway(tmp_path_factory.mktemp("to-a-model"), policy) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def to_a_pool(
    fallback_engines: dict[str, str], tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway whose chats fall back to the pool of documents, then to another region."""
    fallback = f'[{{pool: documents}}, {{region: "{ORIGIN}"}}]'
    policy = policy_with(fallback, fallback_engines, tokenizer_dir).replace(
        "request_cap: 8", "request_cap: 1"
    )
    with running_gateway(tmp_path_factory.mktemp("to-a-pool"), policy) as gateway:
        yield gateway


@asynccontextmanager
async def a_long_answer(url: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """Most of the chat pool is held by one answer, for as long as this is open."""
    body = chat(max_tokens=1_500, ignore_eos=True, stream=True)
    async with (
        aiohttp.ClientSession(headers={"x-tenant-id": "acme", **headers}) as client,
        client.post(url + CHAT, json=body) as answer,
    ):
        assert answer.status == 200
        await answer.content.readany()
        yield answer


async def received(address: str) -> dict[str, Any]:
    """The last request that an engine got."""
    async with aiohttp.ClientSession() as client, client.get(f"http://{address}/sim/requests") as answer:
        last: dict[str, Any] = (await answer.json())["requests"][-1]
        return last


LARGE: dict[str, Any] = {"max_tokens": 700}
"""Fits the chat pool alone, and not beside the long answer."""


async def test_a_full_pool_leads_to_another_one(to_a_pool: Gateway, fallback_engines: dict[str, str]) -> None:
    """The client gets its answer and is told from where; without a full pool nothing is said or different."""
    status, headers, _ = await post(to_a_pool, chat(**LARGE))
    assert (status, headers["x-admission-lane"]) == (200, "interactive")
    assert "x-admission-fallback" not in headers

    async with a_long_answer(to_a_pool.url) as first:
        assert "x-admission-fallback" not in first.headers
        raw = json.dumps(chat("Elsewhere?", **LARGE)).encode()
        status, headers, _ = await post(to_a_pool, raw, headers={"x-admission-fallback": "forged"})
        assert (status, headers["x-admission-fallback"]) == (200, "pool:documents")
    told = await received(fallback_engines["documents"])
    assert told["headers"]["x-admission-fallback"] == "pool:documents"
    assert told["headers"]["x-admission-pool"] == "documents"
    assert told["body_sha256"] == hashlib.sha256(raw).hexdigest()
    logged = await asyncio.to_thread(to_a_pool.logged, headers["x-request-id"])
    assert logged["admission"]["fallback"] == "pool:documents"
    await asyncio.to_thread(to_a_pool.await_idle)


async def test_a_full_fleet_leads_to_another_region(to_a_pool: Gateway) -> None:
    """307 to the same path and query there, in the caller's dialect; and nothing is held for it."""
    path = f"{CHAT}?api-version=1"
    async with a_long_answer(to_a_pool.url), a_long_answer(to_a_pool.url) as second:
        assert second.headers["x-admission-fallback"] == "pool:documents"
        sent = {"x-tenant-id": "acme"}
        async with (
            aiohttp.ClientSession(headers=sent) as client,
            client.post(to_a_pool.url + path, json=chat(**LARGE), allow_redirects=False) as answer,
        ):
            content = await answer.json()
            assert answer.status == 307, content
            assert answer.headers["location"] == ORIGIN + path
            assert answer.headers["x-admission-fallback"] == f"region:{ORIGIN}"
            assert content["error"]["code"] == "token_budget_exhausted"
            assert "retry-after" not in answer.headers
    await asyncio.to_thread(to_a_pool.await_idle)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_full_pool_leads_to_a_smaller_model(
    to_a_model: Gateway, fallback_engines: dict[str, str], chunked: bool
) -> None:
    """The engine gets the client's bytes with its own name in them, whole; what it used is booked for it."""
    raw = json.dumps(chat("Häfen und Fässer. " * 40, **LARGE), indent=1, ensure_ascii=False).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 100):
            yield raw[start : start + 100]

    async with (
        a_long_answer(to_a_model.url),
        aiohttp.ClientSession(headers={"x-tenant-id": "acme", "content-type": "application/json"}) as client,
        client.post(to_a_model.url + CHAT, data=pieces() if chunked else raw) as answer,
    ):
        content = await answer.json()
        assert answer.status == 200, content
        assert answer.headers["x-admission-fallback"] == "model:small"
        assert content["model"] == "small"
    expected = with_model(raw, "small")
    assert expected is not None
    assert expected != raw
    told = await received(fallback_engines["small"])
    assert told["body_sha256"] == hashlib.sha256(expected).hexdigest()
    assert told["headers"]["x-admission-fallback"] == "model:small"
    logged = await asyncio.to_thread(to_a_model.logged, answer.headers["x-request-id"])
    admission, used = logged["admission"], content["usage"]
    assert (admission["model"], admission["pool"]) == ("small", "small")
    reserved = admission["input_tokens"] + admission["output_tokens"]
    assert admission["work_units"] == -(-reserved // 2)
    assert logged["usage"]["output_tokens"] == used["completion_tokens"]
    await asyncio.to_thread(to_a_model.await_idle)


async def test_a_compressed_body_is_not_changed(to_a_model: Gateway) -> None:
    """The next place is tried: another pool takes the body as it is."""
    raw = gzip.compress(json.dumps(chat(**LARGE)).encode())
    async with a_long_answer(to_a_model.url):
        # The simulated engine reads no compressed body: it is enough where it was sent.
        _, headers, _ = await post(to_a_model, raw, headers={"content-encoding": "gzip"})
        assert headers["x-admission-fallback"] == "pool:documents"
    await asyncio.to_thread(to_a_model.await_idle)


@pytest.mark.parametrize(
    "mode",
    [
        "streamed, made buffered by the service",
        "partly buffered",
        "full duplex",
        "streamed, the body comes unasked",
    ],
)
async def test_a_body_is_rewritten_in_every_mode_that_allows_it(
    to_a_model: Gateway, fallback_engines: dict[str, str], tmp_path: Path, mode: str
) -> None:
    """Where Envoy lets go of the body before the decision, the request goes to the next place, unchanged."""
    raw = json.dumps(chat(f"In mode {mode}.", **LARGE)).encode()
    with another_envoy(to_a_model, tmp_path, MODES[mode]) as url:
        async with (
            a_long_answer(url),
            aiohttp.ClientSession(
                headers={"x-tenant-id": "acme", "content-type": "application/json"}
            ) as client,
            client.post(url + CHAT, data=raw) as answer,
        ):
            text = await answer.text()
            assert answer.status == 200, text
            fell_back_to = answer.headers["x-admission-fallback"]
        unchanged = "unasked" in mode
        assert fell_back_to == ("pool:documents" if unchanged else "model:small")
        expected = raw if unchanged else with_model(raw, "small")
        assert expected is not None
        told = await received(fallback_engines["documents" if unchanged else "small"])
        assert told["body_sha256"] == hashlib.sha256(expected).hexdigest()
        await asyncio.to_thread(to_a_model.await_idle)


async def test_many_at_once_balance(to_a_model: Gateway) -> None:
    """Twenty at once over three engines: each is served somewhere or refused, and nothing stays held."""
    body = chat(max_tokens=700, ignore_eos=True)
    answers = await asyncio.gather(*(post(to_a_model, body) for _ in range(20)))
    places = {headers.get("x-admission-fallback") for status, headers, _ in answers if status == 200}
    assert places == {None, "model:small", "pool:documents"}
    assert {status for status, _, _ in answers} <= {200, 429}
    state = await asyncio.to_thread(to_a_model.await_idle)
    assert state["leases"] == 0
