"""Counting in tests: run a model's steps to the end, in this thread."""

from __future__ import annotations

from typing import Any

from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.domain.prompt import AtLeast, ChatPrompt, Counted, TextPrompt

NO_LIMIT = 1 << 40


def run(
    model: ModelTokens, prompt: ChatPrompt | TextPrompt, limit_tokens: int = NO_LIMIT
) -> Counted | AtLeast:
    """The answer of `model` to `prompt`."""
    steps = model.steps(prompt, limit_tokens)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        answer: Counted | AtLeast = end.value
        return answer


def count(model: ModelTokens, prompt: ChatPrompt | TextPrompt) -> int:
    """The tokens of a prompt of one sequence."""
    answer = run(model, prompt)
    assert isinstance(answer, Counted)
    (tokens,) = answer.per_sequence_tokens
    return tokens


def count_text(model: ModelTokens, text: str, *, add_special_tokens: bool = False) -> int:
    """The tokens of one text."""
    return count(model, TextPrompt(texts=(text,), add_special_tokens=add_special_tokens))


def chat(*contents: str, **settings: Any) -> ChatPrompt:
    """A conversation of user and assistant by turns."""
    roles = ("user", "assistant")
    return ChatPrompt(
        messages=[{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)],
        **settings,
    )
