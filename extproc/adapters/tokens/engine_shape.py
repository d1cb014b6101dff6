"""A conversation in the shape in which the engine hands it to the chat template.

Between the request body and the template an engine rewrites messages, and each rewriting changes the count.
These are vLLM's rules (0.32); `engine_rules` says where other engines have others:

- Templates that iterate over content parts get lists of parts, all others get strings; a list becomes a
  string by joining its text parts with newlines, and no content becomes an empty list or string.
- A tool's answer is a string for every template, unless it holds something other than text.
- `tool_calls[].function.arguments` is an object: JSON text is decoded, and what is no object becomes an empty one.
- A template that never mentions the role `developer` gets those messages as `system`, and then all system
  messages as one, in front.
- Absent and null are the same: transformers removes a message's null fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from extproc.adapters.tokens.errors import Uncountable
from extproc.domain.outcome import Reason

ContentFormat = Literal["string", "openai"]

_PLAIN_KEYS = {"role", "content"}


def as_engine_sees(
    messages: Sequence[Any],
    content_format: ContentFormat,
    *,
    knows_developer: bool,
    parts_joined_by: str = "\n",
) -> list[dict[str, Any]]:
    """The messages for the template. Raises `Uncountable` for a message that no engine accepts."""
    shaped: list[dict[str, Any]] = []
    developers = False
    for index, message in enumerate(messages):
        # Most messages of most conversations are a role and a string for a template that wants strings.
        if (
            content_format == "string"
            and type(message) is dict
            and message.keys() == _PLAIN_KEYS
            and type(message["content"]) is str
            and message["role"] != "developer"
        ):
            shaped.append(message)
            continue
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Uncountable(Reason.MALFORMED_REQUEST, f"messages[{index}] must be an object with a role")
        shaped.append(_shaped(message, content_format, f"messages[{index}]", parts_joined_by))
        developers = developers or message["role"] == "developer"
    if developers and not knows_developer:
        return _with_one_system_message(shaped)
    return shaped


def _shaped(
    message: Mapping[str, Any], content_format: ContentFormat, where: str, parts_joined_by: str
) -> dict[str, Any]:
    role = message["role"]
    shaped = {key: value for key, value in message.items() if value is not None}
    texts = _texts(message.get("content"), f"{where}.content")
    if content_format == "string" or role == "tool":
        shaped["content"] = texts if isinstance(texts, str) else parts_joined_by.join(texts)
    else:
        parts = [texts] if isinstance(texts, str) else texts
        shaped["content"] = [{"type": "text", "text": text} for text in parts]
    calls = shaped.get("tool_calls")
    if role == "assistant" and isinstance(calls, list):
        if calls:
            shaped["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        else:
            del shaped["tool_calls"]
    return shaped


def _texts(content: object, where: str) -> str | list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Uncountable(Reason.MALFORMED_REQUEST, f"{where} must be a string, null or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if isinstance(text, str):
            texts.append(text)
        elif text is not None:
            raise Uncountable(
                Reason.INVALID_PARAMETER,
                f"{where}[{index}] is not text; only text parts can be counted, so send none of another type",
            )
    return texts


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise Uncountable(Reason.MALFORMED_REQUEST, f"{where} must be an object with a function")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except RecursionError:
            raise Uncountable(
                Reason.MALFORMED_REQUEST, f"{where}.function.arguments nests too deeply"
            ) from None
        except ValueError:
            return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    converted = [
        {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [index for index, message in enumerate(converted) if message["role"] == "system"]
    if systems == [0]:
        return converted
    texts = [_system_text(converted[index]["content"]) for index in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _system_text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
