"""A thousand generated requests, each counted by us and answered by a real engine: its `usage` is the truth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from extproc.adapters.tokens.load import load_model_tokens
from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.dialects import openai_chat, openai_completions
from extproc.domain.policy import Engine
from extproc.domain.prompt import ChatPrompt, Counted, TextPrompt
from tests.support.llama_cpp import LlamaServer
from tests.support.test_llama_facts import chat_tokens, completion_tokens
from tests.support.tiny_model import tiny_model
from tests.tokens.counting import run
from tests.tokens.engine_requests import Json, requests

AT_ONCE = 4


def ours(model: ModelTokens, body: Json) -> int:
    """Our count, from the body on."""
    prompt = openai_chat.read({"model": "m", **body}, "/v1/chat/completions").prompt
    assert isinstance(prompt, ChatPrompt)
    answer = run(model, prompt)
    assert isinstance(answer, Counted)
    (tokens,) = answer.per_sequence_tokens
    assert (tokens,) == model.plain(prompt)
    return tokens


def differences(
    model: ModelTokens, server: LlamaServer, bodies: Sequence[Json]
) -> list[tuple[int, int, Json]]:
    """Ours and the engine's count, and the request, wherever the two differ."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        theirs = threads.map(lambda body: chat_tokens(server, **body), bodies)
        pairs = [(ours(model, body), engine, body) for body, engine in zip(bodies, theirs, strict=True)]
    return [pair for pair in pairs if pair[0] != pair[1]]


def test_a_thousand_requests_to_the_package_model(tokenizer_dir: Path, llama_server: LlamaServer) -> None:
    """Chats with tools, system turns, prefills, parts, all scripts and marker text: not one count differs."""
    model = load_model_tokens(tokenizer_dir, engine=Engine.LLAMA_CPP)
    assert differences(model, llama_server, list(requests(1_000, seed=1))) == []


def test_requests_to_a_model_that_thinks_and_normalizes(qwen3_dir: Path, llama_qwen3: LlamaServer) -> None:
    """The same for Qwen3, whose prefills open and close thoughts, and whose normalizer llama.cpp leaves out."""
    model = load_model_tokens(qwen3_dir, engine=Engine.LLAMA_CPP)
    assert differences(model, llama_qwen3, list(requests(400, seed=2))) == []


@pytest.fixture(scope="module", params=["silent", "printed"])
def bos(
    request: pytest.FixtureRequest,
    tokenizer_dir: Path,
    model_cache_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ModelTokens, LlamaServer]]:
    """A model that adds BOS, with a template that prints BOS too and with one that does not."""
    variant = tmp_path_factory.mktemp("bos")
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["add_bos_token"] = True
    if request.param == "printed":
        config["chat_template"] = "{{- bos_token }}" + config["chat_template"]
    (variant / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (variant / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    model = load_model_tokens(variant, engine=Engine.LLAMA_CPP)
    with LlamaServer(model=tiny_model(variant, model_cache_dir), log=variant / "log") as server:
        yield model, server


def test_bos_stands_once(bos: tuple[ModelTokens, LlamaServer]) -> None:
    """Chats and texts get the one BOS that the engine gives them, whoever writes it."""
    model, server = bos
    assert differences(model, server, list(requests(60, seed=3))) == []
    for text in ("one two", "", "<|im_end|>"):
        prompt = openai_completions.read({"model": "m", "prompt": text}, "/v1/completions").prompt
        assert isinstance(prompt, TextPrompt)
        assert run(model, prompt) == Counted(per_sequence_tokens=(completion_tokens(server, text),))
