"""A conversation in the shape in which the engine hands it to the chat template.

Between the request body and the template an engine rewrites messages, and each rewriting changes the count.
These are vLLM's rules (0.32); `engine_rules` says where other engines have others:

- Templates that iterate over content parts get lists of parts, all others get strings; a list becomes a
  string by joining its text parts with newlines, empty ones left out, and no content becomes an empty list or string.
- A tool's answer is a string for every template.
- Of an image and the like, templates that iterate over parts see the type, and others nothing.
- `tool_calls[].function.arguments` is an object: JSON text is decoded, and what is no object becomes an empty one.
- A template that never mentions the role `developer` gets those messages as `system`, and then all system
  messages as one, in front.
- The line by which a coding agent attributes its requests is left out at the start of a system text.
- Absent and null are the same: transformers removes a message's null fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from extproc.adapters.tokens.errors import Uncountable
from extproc.dialects.anthropic_messages import ATTRIBUTION
from extproc.domain.media import MediaKind
from extproc.domain.outcome import Reason

ContentFormat = Literal["string", "openai"]

_PLAIN_KEYS = {"role", "content"}
_MEDIA = frozenset(MediaKind)


def as_engine_sees(
    messages: Sequence[Any],
    content_format: ContentFormat,
    *,
    knows_developer: bool,
    parts_joined_by: str = "\n",
    skips_empty_parts: bool = True,
    drops_attribution: bool = False,
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
            and not (message["role"] == "system" and message["content"].startswith(ATTRIBUTION))
        ):
            shaped.append(message)
            continue
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Uncountable(Reason.MALFORMED_REQUEST, f"messages[{index}] must be an object with a role")
        where = f"messages[{index}]"
        parts = _parts(message.get("content"), f"{where}.content")
        if drops_attribution and message["role"] == "system":
            parts = _without_attribution(parts)
        if skips_empty_parts and content_format == "string":
            parts = [part for part in parts if part.get("text") != ""]
        shaped.append(_shaped(message, parts, content_format, where, parts_joined_by))
        developers = developers or message["role"] == "developer"
    if developers and not knows_developer:
        return _with_one_system_message(shaped)
    return shaped


def _shaped(
    message: Mapping[str, Any],
    parts: list[dict[str, Any]],
    content_format: ContentFormat,
    where: str,
    parts_joined_by: str,
) -> dict[str, Any]:
    role = message["role"]
    shaped = {key: value for key, value in message.items() if value is not None}
    if content_format == "string" or role == "tool":
        texts = [part["text"] for part in parts if "text" in part]
        shaped["content"] = parts_joined_by.join(texts)
    else:
        shaped["content"] = parts
    calls = shaped.get("tool_calls")
    if role == "assistant" and isinstance(calls, list):
        if calls:
            shaped["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        else:
            del shaped["tool_calls"]
    return shaped


def is_media(part: object) -> bool:
    """Is this what a dialect leaves of an image or the like, which the policy's rules count?"""
    return isinstance(part, Mapping) and part.keys() == {"type"} and part["type"] in _MEDIA


def _parts(content: object, where: str) -> list[dict[str, Any]]:
    """The content as parts: texts, and what is left of media."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise Uncountable(Reason.MALFORMED_REQUEST, f"{where} must be a string, null or a list of parts")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if is_media(part):
            parts.append(dict(part))
            continue
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if isinstance(text, str):
            parts.append({"type": "text", "text": text})
        elif text is not None:
            raise Uncountable(
                Reason.INVALID_PARAMETER,
                f"{where}[{index}] is not text; only text parts can be counted, so send none of another type",
            )
    return parts


def _without_attribution(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a system message; of those that begin with the line, what follows it."""
    kept: list[dict[str, Any]] = []
    for part in parts:
        if not part.get("text", "").startswith(ATTRIBUTION):
            kept.append(part)
        elif rest := part["text"].partition("\n")[2]:
            kept.append({**part, "text": rest})
    return kept


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
    return (
        content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
    )
