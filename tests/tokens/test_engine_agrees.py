"""A real engine's `usage.prompt_tokens` is the truth: from the request body to the count, the two agree."""

from __future__ import annotations

import pytest

from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.dialects import openai_chat
from extproc.domain.prompt import ChatPrompt, Counted
from tests.support.llama_cpp import LlamaServer
from tests.support.test_llama_facts import SAME_AS_HUGGING_FACE, Json, chat_tokens
from tests.tokens.counting import run

PARTS = [{"type": "text", "text": "How deep"}, {"type": "text", "text": "is it?"}]
BODIES: dict[str, Json] = {
    **{name: body for name, body in SAME_AS_HUGGING_FACE.items() if body.get("tools") != []},
    "content in parts": {"messages": [{"role": "user", "content": PARTS}]},
    "a long document": {"messages": [{"role": "user", "content": "The river rose overnight. " * 1_500}]},
}


def ours(model: ModelTokens, body: Json) -> int:
    prompt = openai_chat.read({"model": "m", **body}, "/v1/chat/completions").prompt
    assert isinstance(prompt, ChatPrompt)
    answer = run(model, prompt)
    assert isinstance(answer, Counted)
    return answer.per_sequence_tokens[0]


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_the_package_tokenizer_counts_as_the_engine_does(
    body: Json, llama_server: LlamaServer, tiny: ModelTokens
) -> None:
    """For the package's own small model."""
    assert ours(tiny, body) == chat_tokens(llama_server, **body)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_qwen3_counts_as_the_engine_does(body: Json, llama_qwen3: LlamaServer, qwen3: ModelTokens) -> None:
    """For a real model's tokenizer and template."""
    assert ours(qwen3, body) == chat_tokens(llama_qwen3, **body)
