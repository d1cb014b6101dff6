"""The simulated engine as others see it: an official SDK, and a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from extproc.sim.engine import EngineConfig
from extproc.sim.server import ServerConfig, SimulatedEngine

FAST = EngineConfig(step_base_us=1_000, step_per_sequence_us=0, kv_capacity_tokens=500)


@pytest.fixture
async def sdk() -> AsyncIterator[openai.AsyncOpenAI]:
    server = SimulatedEngine(ServerConfig(engine=FAST))
    port = await server.start()
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        yield client
    finally:
        await client.close()
        await server.stop()


async def test_the_official_sdk_reads_a_stream_with_usage(sdk: openai.AsyncOpenAI) -> None:
    """Deltas join to the text, the finish reason arrives, and the last chunk has the usage."""
    stream = await sdk.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": "three small words"}],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, finish, usage = "", None, None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == "tokens are admitted one by one"
    assert finish == "length"
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 6, 9)


async def test_the_official_sdk_reads_plain_answers_and_models(sdk: openai.AsyncOpenAI) -> None:
    """Chat, completions and the model list parse into the SDK's types."""
    chat = await sdk.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=2,
        extra_body={"ignore_eos": True},
    )
    assert chat.choices[0].message.content == "tokens are"
    completion = await sdk.completions.create(
        model="sim", prompt="hello", max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert completion.choices[0].text == "tokens are"
    assert [model.id async for model in sdk.models.list()] == ["sim"]


async def test_the_official_sdk_understands_the_errors(sdk: openai.AsyncOpenAI) -> None:
    """A context that does not fit is a BadRequestError that names the parameter."""
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hello"}], max_tokens=500
        )
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(model="other", messages=[{"role": "user", "content": "hello"}])


async def test_the_sdk_closing_its_stream_cancels_the_request(sdk: openai.AsyncOpenAI) -> None:
    """Leaving a stream half read ends the request in the engine as aborted, not as completed."""
    stream = await sdk.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=450,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(aiter(stream))
    await stream.close()
    url = str(sdk.base_url.copy_with(path="/metrics"))
    async with aiohttp.ClientSession() as client, asyncio.timeout(20):
        while True:
            async with client.get(url) as response:
                page = await response.text()
            if 'finished_reason="abort",model_name="sim"} 1.0' in page:
                return
            assert 'finished_reason="length",model_name="sim"} 1.0' not in page
            await asyncio.sleep(0.01)


async def test_the_engine_runs_as_a_process_of_its_own() -> None:
    """The command line says where it listens, obeys its options, and ends cleanly on SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.sim.server", "--port", "0", "--model", "tiny", "--model", "alias"),
        *("--prefill-tokens-per-s", "100000", "--decode-ms", "1.5", "--decode-us-per-sequence", "0"),
        *("--kv-tokens", "300", "--max-num-seqs", "2", "--max-step-tokens", "64", "--max-model-len", "200"),
        *("--shortest-answer", "3", "--longest-answer", "3"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("listening on http://127.0.0.1:")
    async with aiohttp.ClientSession(line.removeprefix("listening on ").strip()) as client:
        body = {"model": "alias", "messages": [{"role": "user", "content": "hello"}]}
        async with client.post("/v1/chat/completions", json=body) as response:
            assert (await response.json())["usage"]["completion_tokens"] == 3
        async with client.get("/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 200
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_a_command_line_that_makes_no_sense_is_explained() -> None:
    """An option out of range ends with status 2 and a sentence, not a traceback."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.sim.server", "--kv-tokens", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"kv_capacity_tokens is 0; it must be at least 1" in errors
    assert b"Traceback" not in errors
