"""A conversation in the shape in which llama.cpp hands it to the chat template.

Its server reads messages and tools into types of its own and writes them anew: fields that it does not know are
gone, what is absent is empty, JSON numbers are parsed. What it then changes to suit the template depends on what the
template can do, which it tries out when it loads; `Abilities` are these findings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from extproc.adapters.tokens.engine_shape import is_media
from extproc.adapters.tokens.errors import Uncountable
from extproc.domain.outcome import Reason
from extproc.domain.prompt import ChatPrompt

_LAST_MARK = re.compile(r"(?:<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\s*\Z")
"""A tag at the end of a text, with the white space behind it."""

OWN_DEVELOPERS = "<|channel|>"
"""A template that prints this knows developers; for all others they become `system`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What the template prints before and after the thoughts of an answer."""

    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a template can take. `takes_text` and `takes_parts` are about a message's content.

    A template `thinks` if it speaks of thoughts at all; `thinking` is there if what stands around them is known.
    """

    takes_text: bool
    takes_parts: bool
    takes_system: bool
    takes_argument_objects: bool
    keeps_developers: bool
    thinks: bool
    thinking: Thinking | None


def try_out(source: str, render: Callable[[list[dict[str, Any]]], str], *, parts: bool) -> Abilities:
    """What the template `source` can take, found by rendering short conversations, as the server does.

    `render` gives nothing for a conversation on which the template fails; `parts` says whether it reads parts.
    """
    call = {"id": "call00001", "type": "function"}
    arguments = {"name": "tool1", "arguments": {"arg": "«argument»"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "«text»"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": arguments}]},
        {"role": "tool", "content": "«answer»", "tool_call_id": "call00001"},
    ]
    thinking = _thinking(source, render, turns[0])
    systems: tuple[object, ...] = ("«system»", [{"type": "text", "text": "«system»"}])
    return Abilities(
        takes_text=not parts or "«text»" in render(turns[:1]),
        takes_parts=parts,
        takes_system=any(
            "«system»" in render([{"role": "system", "content": it}, turns[0]]) for it in systems
        ),
        takes_argument_objects="«argument»" in render(turns),
        keeps_developers=OWN_DEVELOPERS in source,
        thinks=thinking is not None or "think" in source.lower().replace("enable_thinking", ""),
        thinking=thinking,
    )


def _thinking(
    source: str, render: Callable[[list[dict[str, Any]]], str], question: dict[str, Any]
) -> Thinking | None:
    """What stands around the thoughts of the last answer; None if the template knows no thoughts."""
    answer = {"role": "assistant", "content": "«content»", "reasoning_content": "«thought»"}
    prompt, answered = render([question]), render([question, answer])
    start, end = answered.find("«thought»"), answered.find("«content»")
    if not 0 <= start < end:
        # Some templates only take thoughts out of what they are given.
        return Thinking(before="<think>", after="</think>") if "<think>" in source else None
    mark = _LAST_MARK.search(answered, 0, start)
    before = answered[shared_chars(prompt, answered) : start] if mark is None else mark.group()
    return Thinking(before=before, after=answered[start + len("«thought»") : end])


def shared_chars(first: str, second: str) -> int:
    """How long the beginning is that both have."""
    if second.startswith(first):
        return len(first)
    return next(at for at, (one, other) in enumerate(zip(first, f"{second}\0", strict=False)) if one != other)


def dates(now: datetime) -> dict[str, str]:
    """Today as the server tells it to every template, by two names."""
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}


def variables_for(
    prompt: ChatPrompt, can: Abilities, now: datetime, *, without: AbstractSet[str]
) -> dict[str, Any]:
    """What the template is given: fields that are absent stay so; it may think if it can and the request lets it.

    `without` are names that a request cannot set. Raises `Uncountable`.
    """
    variables: dict[str, Any] = {
        "messages": messages_for(prompt.messages, can),
        "enable_thinking": can.thinks,
        **dates(now),
    }
    tools = tools_for(prompt.tools)
    if tools is not None:
        variables["tools"] = tools
    variables |= {key: value for key, value in prompt.template_kwargs.items() if key not in without}
    if variables.get("reasoning_effort") == "none":
        del variables["reasoning_effort"]
    if prompt.add_generation_prompt:
        variables["add_generation_prompt"] = True
    return variables


def messages_for(messages: Sequence[Mapping[str, Any]], can: Abilities) -> list[dict[str, Any]]:
    """The messages as the template sees them. Raises `Uncountable` for what the server refuses."""
    written = [_message(message, f"messages[{index}]", can) for index, message in enumerate(messages)]
    if written and written[0]["role"] == "system" and not can.takes_system:
        system = written.pop(0)
        if written:
            written[0]["content"] = f"{text_of(system['content'])}\n{text_of(written[0]['content'])}"
    return written


def tools_for(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as the template sees them: three fields of a function, none of them null."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description") or "",
                "parameters": _plain_numbers(tool["function"].get("parameters") or {}),
            },
        }
        for tool in tools
    ]


def text_of(content: object, joined_by: str = "\n") -> str:
    """Text parts as one text; nothing is put before the first that is not empty."""
    if isinstance(content, str):
        return content
    text = ""
    for part in content if isinstance(content, list) else ():
        if not is_media(part):
            text += (joined_by if text else "") + _part_text(part)
    return text


def _part_text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _message(message: Mapping[str, Any], where: str, can: Abilities) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise Uncountable(Reason.MALFORMED_REQUEST, f"{where} must be an object with a role")
    if role == "developer" and not can.keeps_developers:
        role = "system"
    written: dict[str, Any] = {"role": role, "content": _content(message.get("content"), can)}
    for key in ("reasoning_content", "name", "tool_call_id"):
        if message.get(key):
            written[key] = message[key]
    if message.get("tool_calls"):
        written["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{at}]", can) for at, call in enumerate(message["tool_calls"])
        ]
    return written


def _content(content: object, can: Abilities) -> object:
    if not content:
        content = ""
    parts = content
    if can.takes_parts and not can.takes_text and isinstance(content, str):
        parts = [content]
    if can.takes_parts and isinstance(parts, list):
        return [{"type": "text", "text": _part_text(part)} for part in parts if not is_media(part)]
    return text_of(content)


def _call(call: Mapping[str, Any], where: str, can: Abilities) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise Uncountable(Reason.MALFORMED_REQUEST, f"{where} must be an object with a function")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    written: dict[str, Any] = {"name": function.get("name"), "arguments": text}
    if can.takes_argument_objects:
        try:
            written["arguments"] = _plain_numbers(json.loads(text))
        except (ValueError, RecursionError):
            raise Uncountable(
                Reason.INVALID_PARAMETER,
                f"{where}.function.arguments must be JSON; the engine refuses other text",
            ) from None
    read: dict[str, Any] = {"type": "function", "function": written}
    if call.get("id"):
        read["id"] = call["id"]
    return read


def _plain_numbers(value: Any) -> Any:
    """`value` with whole numbers written without their point, as the server prints them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(inner) for inner in value]
    return value
