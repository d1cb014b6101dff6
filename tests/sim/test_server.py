"""The simulated engine over HTTP: the shapes that clients, probes and tests rely on."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.asked import count_words
from extproc.sim.engine import EngineConfig
from extproc.sim.server import CountTokens, ServerConfig, SimulatedEngine

FAST = EngineConfig(step_base_us=1_000, step_per_sequence_us=0, prefill_tokens_per_s=1_000_000)
# One seat and ten tokens a second: whatever is open stays open until somebody ends it.
STUCK = EngineConfig(step_base_us=100_000, max_num_seqs=1, kv_capacity_tokens=100_000)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def a_chat(**changes: Any) -> dict[str, Any]:
    body = {"model": "sim", "messages": [{"role": "user", "content": "three small words"}]}
    return body | {"max_tokens": 5, "ignore_eos": True} | changes


@asynccontextmanager
async def a_server(
    config: ServerConfig | None = None, count_tokens: CountTokens = count_words
) -> AsyncIterator[aiohttp.ClientSession]:
    """A running engine, and a client whose paths are relative to it."""
    server = SimulatedEngine(config or ServerConfig(engine=FAST), count_tokens)
    port = await server.start("127.0.0.1")
    try:
        # An engine that fails to answer shall fail its test, not hang it.
        patience = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=patience) as client:
            yield client
    finally:
        await server.stop()


async def post(client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(path, data=data, headers={"content-type": "application/json"}) as response:
        return response.status, await response.json()


async def stream(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[str]:
    """The data of each server-sent event."""
    async with client.post(path, json=body) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = await response.text()
    *lines, rest = text.split("\n\n")
    assert rest == ""
    assert all(line.startswith("data:") and "\n" not in line for line in lines)
    return [line.removeprefix("data:").lstrip(" ") for line in lines]


async def metrics(client: aiohttp.ClientSession) -> dict[str, float]:
    """Samples by name, with what distinguishes a label set beyond engine and model in brackets."""
    async with client.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine") == "0"
            labels.pop("model_name", None)
            suffix = f"[{','.join(labels.values())}]" if labels else ""
            found[sample.name.removeprefix("vllm:") + suffix] = sample.value
    return found


async def until(client: aiohttp.ClientSession, **expected: float) -> None:
    """Wait until the gauges have these values; fails by time-out if they never do."""
    async with asyncio.timeout(20):
        while True:
            now = await metrics(client)
            if {name: now[name] for name in expected} == expected:
                return
            await asyncio.sleep(0.01)


async def test_a_chat_answer_has_text_and_usage() -> None:
    """The plain answer has as many words as tokens were asked for, and says what was counted."""
    async with a_server() as client:
        status, answer = await post(client, CHAT, a_chat())
    assert status == 200
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "tokens are admitted one by"
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}


async def test_a_chat_stream_opens_with_the_role_and_has_one_event_per_token() -> None:
    """Role, then a delta per token, the last with the finish reason, then [DONE]; no usage unless asked."""
    async with a_server() as client:
        *chunks, done = await stream(client, CHAT, a_chat(stream=True))
    assert done == "[DONE]"
    opening, *pieces = [json.loads(chunk) for chunk in chunks]
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "tokens are admitted one by"
    )
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * 4 + ["length"]
    assert len({chunk["id"] for chunk in [opening, *pieces]}) == 1
    assert all("usage" not in chunk for chunk in [opening, *pieces])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_in_a_stream_comes_last_and_only_on_request(path: str) -> None:
    """With include_usage the chunk before [DONE] has no choices and the whole usage, as vLLM sends it."""
    body = a_chat(prompt="three small words", stream=True, stream_options={"include_usage": True})
    async with a_server() as client:
        *_, piece, usage, done = await stream(client, path, body)
    assert done == "[DONE]"
    assert "usage" not in json.loads(piece)
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"] == {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}


async def test_continuous_usage_counts_up_with_the_tokens() -> None:
    """With continuous_usage_stats every chunk says how many tokens there are so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with a_server() as client:
        *chunks, _ = await stream(client, CHAT, a_chat(stream=True, stream_options=options))
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 1, 2, 3, 4, 5, 5]


async def test_completions_take_several_prompts_and_copies() -> None:
    """Two prompts with n=2 are four choices; each prompt is counted once and every output token counts."""
    body = {"prompt": ["one two", [7, 8, 9]], "n": 2, "max_tokens": 4, "ignore_eos": True}
    async with a_server() as client:
        status, answer = await post(client, COMPLETIONS, body)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, _, _ = await stream(client, COMPLETIONS, body | {"stream": True, "stream_options": usage})
    assert status == 200
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"tokens are admitted one"}
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 21, "completion_tokens": 16}
    pieces = [json.loads(chunk) for chunk in chunks]
    told = sorted((piece["choices"][0]["index"], piece["usage"]["prompt_tokens"]) for piece in pieces)
    assert told == [(0, 2)] * 4 + [(1, 2)] * 4 + [(2, 3)] * 4 + [(3, 3)] * 4


async def test_a_tgi_answer_tells_its_usage_in_headers_and_details() -> None:
    """/generate gives `generated_text`, details when asked, and the token counts in headers always."""
    parameters = {"max_new_tokens": 4, "ignore_eos": True, "decoder_input_details": True}
    async with a_server() as client:
        bare = {"inputs": "one two three", "parameters": {"max_new_tokens": 4, "ignore_eos": True}}
        status, plain = await post(client, "/generate", bare)
        async with client.post("/generate", json=bare | {"parameters": parameters}) as response:
            detailed = await response.json()
            counted = (response.headers["x-prompt-tokens"], response.headers["x-generated-tokens"])
    assert (status, plain) == (200, {"generated_text": "tokens are admitted one"})
    assert counted == ("3", "4")
    assert detailed["details"]["generated_tokens"] == 4
    assert detailed["details"]["finish_reason"] == "length"
    assert len(detailed["details"]["prefill"]) == 3


async def test_a_tgi_stream_ends_with_the_text_and_the_details_asked_for() -> None:
    """/generate_stream sends a token per event; the last has the whole text and, on request, the counts."""
    parameters = {"max_new_tokens": 3, "ignore_eos": True}
    body = {"inputs": "one two three", "parameters": parameters | {"details": True}}
    async with a_server() as client:
        pieces = [json.loads(data) for data in await stream(client, "/generate_stream", body)]
        *_, bare = await stream(client, "/generate_stream", body | {"parameters": parameters})
    assert [piece["index"] for piece in pieces] == [1, 2, 3]
    assert "".join(piece["token"]["text"] for piece in pieces) == "tokens are admitted"
    assert [piece["generated_text"] for piece in pieces] == [None, None, "tokens are admitted"]
    assert [piece["details"] for piece in pieces[:2]] == [None, None]
    assert pieces[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 3,
        "seed": None,
        "input_length": 3,
    }
    assert json.loads(bare)["details"] is None


async def test_an_answer_ends_by_itself_at_a_length_that_depends_on_the_body_only() -> None:
    """The drawn length is the same each time, within bounds, cut by max_tokens, and moot with ignore_eos."""
    config = ServerConfig(engine=FAST, shortest_answer_tokens=10, longest_answer_tokens=20)
    async with a_server(config) as client:
        lengths = []
        for words in ("a", "a", "a b", "a b c", "a b c d", "a b c d e"):
            body = {"messages": [{"role": "user", "content": words}]}
            _, answer = await post(client, CHAT, body)
            assert answer["choices"][0]["finish_reason"] == "stop"
            lengths.append(answer["usage"]["completion_tokens"])
        _, forced = await post(client, CHAT, body | {"max_tokens": 21, "ignore_eos": True})
        _, cut = await post(client, CHAT, body | {"max_completion_tokens": 9, "max_tokens": 15})
    assert lengths[0] == lengths[1]
    assert len(set(lengths)) > 1
    assert all(10 <= length <= 20 for length in lengths)
    assert forced["usage"]["completion_tokens"] == 21
    assert cut["usage"]["completion_tokens"] == 9
    assert cut["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (COMPLETIONS, {"prompt": "a"}, 16),
        (COMPLETIONS, {"prompt": "a", "max_tokens": None}, 16),
        ("/generate", {"inputs": "a"}, 100),
        (CHAT, {"messages": [{"role": "user", "content": "a b"}]}, 148),
    ],
)
async def test_a_missing_limit_is_the_engines_default(path: str, body: dict[str, Any], tokens: int) -> None:
    """16 for completions, 100 for TGI, and for a chat whatever the context leaves."""
    config = ServerConfig(
        engine=FAST, max_model_len_tokens=150, shortest_answer_tokens=200, longest_answer_tokens=200
    )
    async with a_server(config) as client:
        _, answer = await post(client, path, body)
    text = (
        answer.get("generated_text")
        or answer["choices"][0].get("text")
        or (answer["choices"][0]["message"]["content"])
    )
    assert len(text.split()) == tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, b"{", 400, None),
        (CHAT, b"[]", 400, None),
        (CHAT, a_chat(messages="x"), 400, "messages"),
        (CHAT, a_chat(max_tokens=0), 400, "max_tokens"),
        (CHAT, a_chat(max_tokens="16"), 400, "max_tokens"),
        (CHAT, a_chat(max_tokens=True), 400, "max_tokens"),
        (CHAT, a_chat(n=129), 400, "n"),
        (CHAT, a_chat(stream_options=[1]), 400, "stream_options"),
        (CHAT, a_chat(model="other"), 404, "model"),
        (CHAT, a_chat(max_tokens=98), 400, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "w " * 100}]}, 400, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 1}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt"),
    ],
)
async def test_what_the_engine_cannot_serve_is_an_error_in_vllms_shape(
    path: str, body: Any, status: int, param: str | None
) -> None:
    """A bad body, an unknown model or a context that does not fit (100 tokens) names the field at fault."""
    async with a_server(ServerConfig(engine=FAST, max_model_len_tokens=100)) as client:
        told, answer = await post(client, path, body)
        await until(client, num_requests_running=0, num_requests_waiting=0)
    assert (told, answer["error"]["code"], answer["error"]["param"]) == (status, status, param)
    assert answer["error"]["message"]


async def test_tgi_errors_have_tgis_shape() -> None:
    """A context that does not fit is 422 with `error` and `error_type`."""
    async with a_server(ServerConfig(engine=FAST, max_model_len_tokens=100)) as client:
        status, answer = await post(
            client, "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 100}}
        )
    assert status == 422
    assert answer["error_type"] == "validation"
    assert "100 tokens" in answer["error"]


async def test_the_largest_context_that_fits_is_served() -> None:
    """Prompt and output that fill the context exactly are not an error."""
    async with a_server(ServerConfig(engine=FAST, max_model_len_tokens=100)) as client:
        status, answer = await post(client, CHAT, a_chat(max_tokens=97))
    assert status == 200
    assert answer["usage"]["total_tokens"] == 100


async def test_an_engine_that_is_full_says_so_at_once() -> None:
    """Beyond max_open_sequences the answer is 503 (TGI: 429), and there is room again after an end."""
    config = ServerConfig(engine=STUCK, max_open_sequences=2)
    async with a_server(config) as client:
        endless = a_chat(max_tokens=10_000, stream=True)
        async with client.post(CHAT, json=endless), client.post(CHAT, json=endless):
            status, answer = await post(client, CHAT, a_chat())
            tgi_status, tgi = await post(client, "/generate", {"inputs": "a"})
        await until(client, num_requests_running=0, num_requests_waiting=0)
        freed, _ = await post(client, CHAT, a_chat(max_tokens=1))
    assert (status, answer["error"]["code"]) == (503, 503)
    assert (tgi_status, tgi["error_type"]) == (429, "overloaded")
    assert freed == 200


async def test_metrics_show_the_batch_the_queue_and_the_memory() -> None:
    """With one seat taken and two in the queue the gauges say so, and all is zero when the clients leave."""
    async with a_server(ServerConfig(engine=STUCK)) as client:
        body = a_chat(max_tokens=10_000, stream=True)
        async with client.post(CHAT, json=body) as first:
            assert await first.content.readline()
            async with client.post(CHAT, json=body), client.post(CHAT, json=body):
                await until(client, num_requests_running=1, num_requests_waiting=2)
                busy = await metrics(client)
        await until(client, num_requests_running=0, num_requests_waiting=0, kv_cache_usage_perc=0)
        idle = await metrics(client)
    assert 0 < busy["kv_cache_usage_perc"] < 0.001
    assert busy["prompt_tokens_total"] == 3
    assert busy["generation_tokens_total"] >= 1
    assert busy["time_to_first_token_seconds_count"] == 1
    assert busy["num_preemptions_total"] == 0
    assert idle["request_success_total[abort]"] == 3
    assert idle["cache_config_info[16,100000,6250]"] == 1


async def test_metrics_add_up_over_finished_requests() -> None:
    """Totals and histograms count each finished request and its tokens once, at every scrape anew."""
    async with a_server() as client:
        for count in (1, 2, 3):
            await post(client, CHAT, a_chat())
            now = await metrics(client)
            assert now["prompt_tokens_total"] == 3 * count
            assert now["generation_tokens_total"] == 5 * count
            assert now["request_success_total[length]"] == count
            for name in (
                "time_to_first_token_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
            ):
                assert now[f"{name}_count"] == count
        # Five steps of at least 1 ms each; the model's time, so this holds however slow the machine is.
        assert now["e2e_request_latency_seconds_sum"] >= 3 * 0.005
        assert now["request_time_per_output_token_seconds_sum"] == pytest.approx(3 * 0.001)


async def test_preemption_is_seen_in_metrics() -> None:
    """When two growing answers fill the memory, one is evicted, both are completed, and the counter tells."""
    engine = EngineConfig(
        step_base_us=5_000, kv_capacity_tokens=60, prefill_tokens_per_s=100_000, max_num_seqs=4
    )
    async with a_server(ServerConfig(engine=engine)) as client:
        answers = await asyncio.gather(*(post(client, CHAT, a_chat(max_tokens=50)) for _ in range(2)))
        assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [50, 50]
        assert (await metrics(client))["num_preemptions_total"] >= 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_frees_its_place(streaming: bool) -> None:
    """A disconnect takes the request out of the model, running or queued, streaming or not."""
    async with a_server(ServerConfig(engine=STUCK)) as client:
        body = a_chat(max_tokens=10_000, stream=streaming)
        running, queued = (asyncio.create_task(post(client, CHAT, body)) for _ in range(2))
        await until(client, num_requests_running=1, num_requests_waiting=1)
        queued.cancel()
        await until(client, num_requests_running=1, num_requests_waiting=0)
        running.cancel()
        await until(client, num_requests_running=0, kv_cache_usage_perc=0)
        await asyncio.gather(running, queued, return_exceptions=True)


async def test_what_reached_the_engine_can_be_looked_up() -> None:
    """/sim/requests has path, x-admission-* headers, body hash and time of the newest, and no other header."""
    async with a_server(ServerConfig(engine=FAST, remembered_requests=2)) as client:
        raw = json.dumps(a_chat()).encode()
        sent = {"X-Admission-Lane": "bulk", "x-admission-input-tokens": "3", "authorization": "secret"}
        for number in range(3):
            async with client.post(CHAT, data=raw + b" " * number, headers=sent) as response:
                assert response.status == 200
        await post(client, "/generate", b"{")
        async with client.get("/sim/requests") as response:
            told = await response.json()
    assert told["received_total"] == 4
    chat, tgi = told["requests"]
    assert chat.pop("received_at_ms") <= tgi.pop("received_at_ms")
    assert chat == {
        "path": CHAT,
        "headers": {"x-admission-lane": "bulk", "x-admission-input-tokens": "3"},
        "body_sha256": hashlib.sha256(raw + b"  ").hexdigest(),
    }
    assert tgi == {"path": "/generate", "headers": {}, "body_sha256": hashlib.sha256(b"{").hexdigest()}


async def test_models_and_health() -> None:
    """Every alias is listed with the context length, and a running engine is healthy."""
    async with a_server(ServerConfig(engine=FAST, models=("tiny", "alias"))) as client:
        async with client.get("/v1/models") as response:
            models = (await response.json())["data"]
        async with client.get("/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        status, answer = await post(client, CHAT, a_chat(model="alias"))
    assert [(model["id"], model["max_model_len"]) for model in models] == [
        ("tiny", 120_000),
        ("alias", 120_000),
    ]
    assert (status, answer["model"]) == (200, "alias")


@pytest.mark.parametrize("padding_bytes", [0, 100_000])
async def test_a_counter_of_ones_own_decides_the_input_tokens(padding_bytes: int) -> None:
    """The given function sees the path and the body, large or small, and its count is the usage."""
    seen: list[tuple[str, Any]] = []

    def count(path: str, body: Mapping[str, Any]) -> int:
        seen.append((path, body["messages"][0]["content"]))
        return 1_234

    async with a_server(count_tokens=count) as client:
        _, answer = await post(client, CHAT, a_chat(padding="x" * padding_bytes))
    assert answer["usage"]["prompt_tokens"] == 1_234
    assert seen == [(CHAT, "three small words")]


async def test_stopping_cuts_answers_off_and_frees_the_port() -> None:
    """After `stop` an open stream is broken and nobody listens: a fleet's dead engine, not a draining one."""
    server = SimulatedEngine(ServerConfig(engine=STUCK))
    port = await server.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        async with client.post(CHAT, json=a_chat(max_tokens=10_000, stream=True)) as response:
            await server.stop()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/health")


def test_words_are_counted_in_all_text_parts() -> None:
    """The default counter adds up the words of every message and text part, and never says zero."""
    parts = [
        {"type": "text", "text": "a b"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "c"},
    ]
    messages = [{"content": "one two"}, {"content": parts}, {"content": None}]
    assert count_words(CHAT, {"messages": messages}) == 5
    assert count_words(CHAT, {"messages": []}) == 1
    assert count_words("/generate", {"inputs": " a\nb "}) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ()}, "models is empty"),
        ({"shortest_answer_tokens": 0}, "shortest_answer_tokens is 0"),
        ({"shortest_answer_tokens": 9, "longest_answer_tokens": 8}, "longest_answer_tokens is 8"),
    ],
)
def test_an_impossible_server_is_refused(changes: dict[str, Any], message: str) -> None:
    """A bad configuration names the field and the value."""
    with pytest.raises(ValueError, match=message):
        ServerConfig(**changes)
