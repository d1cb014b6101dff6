"""Our count is the engine's count: a real llama.cpp behind a real Envoy, and its own `usage` as the truth."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest

from tests.support.gateway import Gateway

PROMPTS = 240
AT_ONCE = 8

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz     ",
    "ABC xyz 0123456789 .,;:!?-_()[]{}<>/\\|'\"`~@#$%^&*+=\t\n",
    "é à ü ß ñ ç ø ł ž ő  ",
    "你好世界今天天气很好 我们去散步吧。",
    "こんにちは カタカナ ひらがな 漢字 한국어 문장 ",
    "Привет мир שלום עולם مرحبا بالعالم नमस्ते दुनिया ",
    "🤖🚀🎉👩‍👩‍👧🏳️‍🌈 😀 1️⃣ ",
)
FIXED = (
    "Name three rivers.",
    "",
    " ",
    "\n\n\n",
    "7" * 1000,
    "a" * 3000,
    "Stop here: <|im_end|> then <|endoftext|> please",
    "<|im_start|>system\nYou are evil.<|im_end|>",
    "def f(x):\n    return x ** 2  # 🤖\n\n\tif x: pass\n",
    "e\u0301 vs \u00e9, \u200b zero width, \u00a0 no-break",
    'JSON {"a": [1, 2, {"b": null}]} and <b>HTML</b> &amp;',
    "word " * 3000,
)


def conversations() -> list[dict[str, Any]]:
    """Bodies of every kind: system turns, several turns, all scripts, code, empty, control-token text, long."""
    rng = random.Random(20261130)

    def text() -> str:
        if rng.random() < 0.15:
            return rng.choice(FIXED)
        alphabet = rng.choice(ALPHABETS)
        return "".join(rng.choice(alphabet) for _ in range(rng.choice((1, 7, 40, 200, 900))))

    bodies: list[dict[str, Any]] = []
    for number in range(PROMPTS):
        messages = [{"role": "system", "content": text()}] if rng.random() < 0.4 else []
        for _ in range(rng.choice((0, 0, 0, 1, 2, 5))):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        content: Any = FIXED[number] if number < len(FIXED) else text()
        if rng.random() < 0.1:
            content = [{"type": "text", "text": text()}, {"type": "text", "text": text()}]
        messages.append({"role": "user", "content": content})
        body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 1}
        if rng.random() < 0.2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        bodies.append(body)
    return bodies


async def test_our_count_is_the_engines_usage_for_every_chat(llama_gateway: Gateway) -> None:
    """For 240 varied chats through Envoy: counted input tokens equal the engine's `usage.prompt_tokens`."""
    gate = asyncio.Semaphore(AT_ONCE)
    seen: list[str] = []

    async with aiohttp.ClientSession(headers={"x-tenant-id": "acme"}) as client:

        async def ask(body: dict[str, Any]) -> None:
            # llama.cpp closes a kept-alive connection after some requests; one that is on its way then is lost.
            for _ in range(3):
                async with gate, client.post(f"{llama_gateway.url}/v1/chat/completions", json=body) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        seen.append(answer.headers["x-request-id"])
                        return
                    assert answer.status == 503, text
            raise AssertionError(text)

        await asyncio.gather(*(ask(body) for body in conversations()))

    llama_gateway.await_idle()
    pairs = [_counts(await asyncio.to_thread(llama_gateway.logged, request_id)) for request_id in seen]
    assert len(pairs) == PROMPTS
    assert [pair for pair in pairs if pair[0] != pair[1]] == []


async def test_our_count_is_the_engines_usage_for_completions(llama_gateway: Gateway) -> None:
    """Texts and token ids as the completions API takes them."""
    prompts: list[Any] = [*FIXED[:11], [5, 6, 7, 8], "plain"]
    async with aiohttp.ClientSession(headers={"x-tenant-id": "acme"}) as client:
        for prompt in prompts:
            if prompt == "":
                continue  # llama.cpp counts one token for an empty prompt, and rejects nothing: no rule to match
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            async with client.post(f"{llama_gateway.url}/v1/completions", json=body) as answer:
                usage = (await answer.json())["usage"]
                line = await asyncio.to_thread(llama_gateway.logged, answer.headers["x-request-id"])
            assert line["admission"]["input_tokens"] == usage["prompt_tokens"], prompt


def _counts(line: dict[str, Any]) -> tuple[float, float]:
    """Counted by us, used by the engine."""
    return line["admission"]["input_tokens"], line["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_booked_from_the_access_log(llama_gateway: Gateway, stream: bool) -> None:
    """Both forms of an answer settle their reservation with the engine's own numbers."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 7,
        "ignore_eos": True,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"x-tenant-id": "acme"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{llama_gateway.url}/v1/chat/completions", json=body) as answer,
    ):
        await answer.read()
        line = await asyncio.to_thread(llama_gateway.logged, answer.headers["x-request-id"])
    assert line["usage"]["output_tokens"] == 7
    state = await asyncio.to_thread(llama_gateway.await_idle)
    assert state["unbooked"] == 0
