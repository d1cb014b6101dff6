"""Prompts in the four shapes of the OpenAI API: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from typing import Any

from extproc.dialects.reading import BadRequest
from extproc.domain.prompt import TextPrompt, TokenIdPrompt

_CHECKED_AT_ONCE = 16_384


def text_or_token_ids(
    value: object, name: str, *, add_special_tokens: bool = True
) -> TextPrompt | TokenIdPrompt:
    """What `value` holds, one sequence per text or list of ids. No list may be empty, and none may mix kinds.

    `add_special_tokens` is for texts: token ids are complete as they are.
    """
    if isinstance(value, str):
        return TextPrompt(texts=(value,), add_special_tokens=add_special_tokens)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return TextPrompt(texts=tuple(value), add_special_tokens=add_special_tokens)
        if _are_token_ids(value):
            return TokenIdPrompt(lengths_tokens=(len(value),))
        if all(isinstance(item, list) and _are_token_ids(item) for item in value):
            return TokenIdPrompt(lengths_tokens=tuple(len(item) for item in value))
    raise BadRequest(
        f"`{name}` must be a string, a list of strings, a list of token ids, or a list of such lists, "
        "none of the lists empty",
        param=name,
    )


def _are_token_ids(items: list[Any]) -> bool:
    return bool(items) and all(
        _few_are_token_ids(items[start : start + _CHECKED_AT_ONCE])
        for start in range(0, len(items), _CHECKED_AT_ONCE)
    )


def _few_are_token_ids(items: list[Any]) -> bool:
    # Prompts of a hundred thousand ids are ordinary, and this is four times as fast as asking each of them; but
    # nobody else runs meanwhile.
    return set(map(type, items)) == {int} and min(items) >= 0
