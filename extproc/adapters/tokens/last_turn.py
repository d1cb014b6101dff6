"""A conversation that ends with the assistant's own words: what an engine makes of that last turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from extproc.adapters.tokens.engine_rules import EngineRules, LastAssistantTurn
from extproc.adapters.tokens.errors import Uncountable
from extproc.adapters.tokens.llama_cpp_shape import Thinking, shared_chars, text_of
from extproc.domain.outcome import Reason
from extproc.domain.prompt import ChatPrompt

Render = Callable[[ChatPrompt], str]


def rendered(prompt: ChatPrompt, rules: EngineRules, render: Render, thinking: Thinking | None) -> str:
    """The text of `prompt`; `render` makes the text of a conversation as it is. Raises `Uncountable`.

    `thinking` is what the engine opens and closes thoughts with when it continues a turn.
    """
    turn = _last_turn(prompt, rules)
    if rules.always_prompts:
        prompt = replace(prompt, add_generation_prompt=True, continue_final_message=False)
    if turn == "continued":
        return _continued(prompt, render, thinking)
    if turn == "cut":
        return _cut(prompt, rules.parts_joined_by, render)
    if turn == "a user's":
        messages = [*prompt.messages[:-1], {**prompt.messages[-1], "role": "user"}]
        return render(replace(prompt, messages=messages))
    return render(prompt)


def _last_turn(prompt: ChatPrompt, rules: EngineRules) -> LastAssistantTurn:
    last = prompt.messages[-1] if prompt.messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return "closed"
    if prompt.continue_final_message:
        return rules.explicitly_continued or "closed"
    if rules.last_assistant_turn == "a user's" and not isinstance(last.get("content"), str):
        return "closed"
    return rules.last_assistant_turn


def _continued(prompt: ChatPrompt, render: Render, thinking: Thinking | None) -> str:
    *before, last = prompt.messages
    if last.get("tool_calls"):
        raise Uncountable(
            Reason.INVALID_PARAMETER, "a final assistant message with tool calls cannot be continued"
        )
    if before and before[-1].get("role") == "assistant":
        raise Uncountable(
            Reason.INVALID_PARAMETER, "only one message of the assistant may stand at the end to be continued"
        )
    prompt = replace(prompt, messages=before, add_generation_prompt=False, continue_final_message=False)
    content, thought = last.get("content"), last.get("reasoning_content") or ""
    head = render(prompt)
    if not content and not thought:
        return head
    with_prompt = render(replace(prompt, add_generation_prompt=True))
    opening = with_prompt[shared_chars(head, with_prompt) :]
    if thinking is not None:
        if thinking.before:
            opening = opening.partition(thinking.before)[0]
        opening += thinking.before + thought + (thinking.after if content else "")
    return head + opening + text_of(content, "\n\n")


def _cut(prompt: ChatPrompt, parts_joined_by: str, render: Render) -> str:
    whole = render(prompt)
    content = prompt.messages[-1].get("content")
    parts = content if isinstance(content, list) else [content or ""]
    text = parts_joined_by.join(part if isinstance(part, str) else part.get("text") or "" for part in parts)
    at = whole.rfind(text)
    return whole if at < 0 else whole[: at + len(text)].rstrip()
