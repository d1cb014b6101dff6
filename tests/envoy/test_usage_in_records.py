"""Token usage read inside Envoy arrives in the access-log record, whatever the answer's shape and end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from extproc.adapters.access_log import settled_of
from extproc.exchange.events import Answer, RequestHeaders
from tests.envoy.conftest import Gateway, running_engine, running_gateway
from tests.envoy.policies import policy, pool
from tests.envoy.stubs import admitted_to

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]


def event(data: Json | str, name: str | None = None) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


OPENAI = [
    event({"choices": [{"delta": {"content": "a"}}], "usage": None}),
    event({"choices": [{"delta": {"content": "b"}}], "usage": None}),
    event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 8}}),
    event("[DONE]"),
]
OPENAI_CUMULATIVE = [
    *(
        event(
            {"choices": [{}], "usage": {"prompt_tokens": 12, "completion_tokens": n, "total_tokens": 12 + n}}
        )
        for n in range(9)
    ),
    event("[DONE]"),
]
ANTHROPIC = [
    event(
        {"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 1}}},
        "message_start",
    ),
    event({"type": "content_block_delta", "delta": {"text": "a"}}, "content_block_delta"),
    event({"type": "message_delta", "usage": {"output_tokens": 8}}, "message_delta"),
    event({"type": "message_stop"}, "message_stop"),
]
ANTHROPIC_CACHED = [
    event(
        {
            "type": "message_start",
            "message": {
                "usage": {
                    "input_tokens": 2,
                    "cache_creation_input_tokens": 3,
                    "cache_read_input_tokens": 7,
                    "output_tokens": 1,
                }
            },
        }
    ),
    event({"type": "message_delta", "usage": {"input_tokens": 2, "output_tokens": 8}}),
]
RESPONSES = [
    event({"type": "response.created", "response": {"usage": None}}),
    event({"type": "response.completed", "response": {"usage": {"input_tokens": 12, "output_tokens": 8}}}),
]
LLAMA_CPP = [
    event({"content": "a", "stop": False, "tokens_predicted": 1, "tokens_evaluated": 12}),
    event({"content": "", "stop": True, "tokens_predicted": 8, "tokens_evaluated": 12}),
]
SGLANG = [event({"text": "ab", "meta_info": {"prompt_tokens": 12, "completion_tokens": n}}) for n in (1, 8)]
TGI = [
    event({"token": {"id": 1, "text": "a"}, "generated_text": None, "details": None}),
    event(
        {"token": {"id": 2}, "generated_text": "ab", "details": {"generated_tokens": 8, "input_length": 12}}
    ),
]

STREAMS = {
    "openai": OPENAI,
    "openai-cumulative": OPENAI_CUMULATIVE,
    "anthropic": ANTHROPIC,
    "anthropic-cached": ANTHROPIC_CACHED,
    "responses": RESPONSES,
    "llama.cpp": LLAMA_CPP,
    "sglang": SGLANG,
    "tgi": TGI,
}
BODIES: dict[str, tuple[Json, dict[str, str]]] = {
    "openai": ({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 8}}, {}),
    "tgi": ({"generated_text": "ab"}, {"x-prompt-tokens": "12", "x-generated-tokens": "8"}),
    "anthropic": ({"type": "message", "usage": {"input_tokens": 12, "output_tokens": 8}}, {}),
    "anthropic-cached": (
        {
            "usage": {
                "input_tokens": 2,
                "cache_creation_input_tokens": 3,
                "cache_read_input_tokens": 7,
                "output_tokens": 8,
            }
        },
        {},
    ),
    "llama.cpp": ({"content": "ab", "tokens_predicted": 8, "tokens_evaluated": 12}, {}),
    "kserve": ({"text_output": "ab", "num_input_tokens": 12, "num_output_tokens": 8}, {}),
    "null-and-number": ({"usage": {"prompt_tokens": 12, "completion_tokens": 8, "input_tokens": None}}, {}),
    # Larger than every buffer that is sized for requests.
    "large": ({"pad": "x" * 5_000_000, "usage": {"prompt_tokens": 12, "completion_tokens": 8}}, {}),
}
UNUSABLE: dict[str, tuple[Json, dict[str, str]]] = {
    "null": ({"usage": {"prompt_tokens": None, "completion_tokens": None}}, {}),
    "text": ({"usage": {"prompt_tokens": "many", "completion_tokens": {"a": 1}}}, {}),
    "missing": ({"choices": []}, {}),
}


async def respond(request: web.Request) -> web.StreamResponse:
    """Answers as the path asks: `/stream/<shape>...`, `/hang/<shape>...` (never ends) or `/body/<shape>...`."""
    kind, shape = request.path.split("/")[1:3]
    if kind == "body":
        body, headers = (BODIES | UNUSABLE)[shape]
        return web.json_response(body, headers=headers)
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in STREAMS[shape]:
        # In two pieces, so that an event is not always one read.
        await response.write(chunk[:7])
        await response.write(chunk[7:])
    if kind == "hang":
        await asyncio.sleep(3600)
    return response


async def _admit(_head: RequestHeaders, _body: bytes) -> Answer:
    return admitted_to("main")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """One gateway for all shapes."""
    async with (
        running_engine(respond) as engine,
        running_gateway(
            policy(pool(addresses=(engine.address,))), _admit, tmp_path_factory.mktemp("gateway")
        ) as gateway,
    ):
        yield gateway


async def _used(gateway: Gateway) -> tuple[int | None, int | None]:
    settled = settled_of(await gateway.service.record())
    assert settled is not None
    assert settled.lease_id == "lease-1"
    return settled.used_input_tokens, settled.used_output_tokens


@pytest.mark.parametrize("shape", STREAMS)
async def test_a_streams_usage_is_in_its_record(gateway: Gateway, shape: str) -> None:
    """The last numbers that a stream reports arrive with its record, and the client gets the stream unchanged."""
    async with gateway.client.post(f"/stream/{shape}/v1/completions", data="{}") as answer:
        assert await answer.read() == b"".join(STREAMS[shape])
    assert await _used(gateway) == (12, 8)


@pytest.mark.parametrize("shape", STREAMS)
async def test_usage_survives_a_client_that_hangs_up(gateway: Gateway, shape: str) -> None:
    """A client that leaves before the end of its stream still has what it used in its record."""
    everything = b"".join(STREAMS[shape])
    async with gateway.client.post(f"/hang/{shape}/v1/completions", data="{}") as answer:
        assert await answer.content.readexactly(len(everything)) == everything
        answer.close()
    assert await _used(gateway) == (12, 8)


@pytest.mark.parametrize("shape", BODIES)
async def test_a_plain_answers_usage_is_in_its_record(gateway: Gateway, shape: str) -> None:
    """A JSON answer of any size reaches the client whole, and its usage arrives with its record."""
    body, _ = BODIES[shape]
    async with gateway.client.post(f"/body/{shape}/v1/completions", data="{}") as answer:
        assert answer.status == 200
        assert await answer.json() == body
    assert await _used(gateway) == (12, 8)


@pytest.mark.parametrize("shape", UNUSABLE)
async def test_what_is_no_usage_is_unknown(gateway: Gateway, shape: str) -> None:
    """Null, text or a missing field in the place of a number is unknown usage, never zero."""
    async with gateway.client.post(f"/body/{shape}/v1/completions", data="{}") as answer:
        assert await answer.json(content_type=None) == UNUSABLE[shape][0]
    assert await _used(gateway) == (None, None)


async def test_answers_without_output_are_not_parsed(gateway: Gateway) -> None:
    """The megabytes of an embeddings answer pass without being read: the input was counted exactly."""
    async with gateway.client.post("/body/openai/v1/embeddings", data="{}") as answer:
        assert await answer.json() == BODIES["openai"][0]
    assert await _used(gateway) == (None, None)
