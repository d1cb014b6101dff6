"""What is to be counted: a dialect's reading of a body, before any tokenizer has seen it.

A dialect turns a request body into one of these values; a token counter turns the value into a
number. Neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from extproc.domain.frozen import frozen
from extproc.domain.outcome import Reason


@frozen
class ChatPrompt:
    """A conversation that the engine renders with the model's chat template.

    `messages`, `tools` and `documents` are the client's own JSON values, as the template will see them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_in_blocks: bool = False
    """Are the parts of a system message the blocks of one text, as in Anthropic's API?"""


@frozen
class TextPrompt:
    """One or more texts that the engine encodes as they are; each is a sequence of its own."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


@frozen
class TokenIdPrompt:
    """Prompts that arrive as token ids: their lengths are their counts."""

    lengths_tokens: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenIdPrompt


@frozen
class Counted:
    """Input tokens per sequence of the prompt, in order, exactly as the engine will count them."""

    per_sequence_tokens: tuple[int, ...]


@frozen
class AtLeast:
    """The prompt is longer than the limit that was asked about: it has at least this many tokens."""

    input_tokens: int


@frozen
class CountFailed:
    """The prompt cannot be counted. `detail` is safe to show: it never quotes the prompt."""

    reason: Reason
    detail: str


Count = Counted | AtLeast | CountFailed
