"""In what the engines differ between a request and its tokens: one table.

vLLM's row (0.32) is what the rest of this package describes. llama.cpp's is held to the real server in the tests.
TGI's and SGLang's follow their sources: TGI 3's `chat_template.rs`, SGLang's `serving_chat.py`. Two of their habits
are not in the table, because a prompt does not say enough: TGI adds its tool prompt to the last message of a request
with tools, and SGLang leaves tools out for `tool_choice: none`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from extproc.domain.policy import Engine

LastAssistantTurn = Literal["closed", "continued", "cut", "a user's"]
"""What becomes of a conversation whose last turn is the assistant's, if the request says nothing about it.

- closed: it is a turn like others, and the generation prompt follows (if the request wants one)
- continued: the turns before it and the generation prompt are rendered, and its text follows as it is
- cut: all is rendered, and what follows its text is cut off, white space included
- a user's: its role is changed
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """How one engine makes a prompt of a request."""

    last_assistant_turn: LastAssistantTurn = "closed"
    explicitly_continued: LastAssistantTurn | None = None
    """The same for requests with `continue_final_message`. None: as transformers does, by marking the text's end."""
    parts_joined_by: str = "\n"
    """What stands between the text parts of a message, for templates that want a string."""
    skips_empty_parts: bool = False
    """Are empty text parts left out before the others are joined?"""
    one_system_message: bool = True
    """Are system messages put together in front, once a developer's message had to become one?"""
    always_prompts: bool = False
    """Is the generation prompt added whatever the request says about it?"""
    rewrites: bool = False
    """Are messages and tools read into the engine's own types and written anew (`llama_cpp_shape`)?"""
    normalizes: bool = True
    """Is text normalized to composed characters (NFC), where the tokenizer's file says so?"""
    drops_attribution: bool = False
    """Is the line left out by which a coding agent attributes its requests, at the start of a system text?"""
    moves_system: bool = False
    """Do Anthropic's system messages between turns go to the front, if the template fails on them there?"""
    adds_special_tokens: bool = False
    """Does a rendered chat get BOS and EOS as any text does, unless it has them already?"""


RULES: Mapping[Engine, EngineRules] = {
    Engine.VLLM: EngineRules(skips_empty_parts=True, drops_attribution=True, moves_system=True),
    Engine.LLAMA_CPP: EngineRules(
        last_assistant_turn="continued",
        explicitly_continued="continued",
        one_system_message=False,
        rewrites=True,
        normalizes=False,
        adds_special_tokens=True,
    ),
    Engine.TGI: EngineRules(
        last_assistant_turn="cut",
        explicitly_continued="cut",
        parts_joined_by="",
        one_system_message=False,
        always_prompts=True,
    ),
    Engine.SGLANG: EngineRules(
        last_assistant_turn="a user's",
        explicitly_continued="continued",
        parts_joined_by=" ",
        one_system_message=False,
        always_prompts=True,
    ),
}
