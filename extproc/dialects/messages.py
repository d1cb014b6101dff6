"""Conversations and tools as the OpenAI chat API writes them, checked until a chat template can rely on them.

What comes out has only the keys that engines show to a template, each with the type that templates expect.
The shapes follow vLLM's request models (0.32): unknown keys are dropped, a tool's absent fields become null,
`reasoning_content` is the old name of `reasoning`, and every kind of text part is a part of type `text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.media import media_part, placeholder
from extproc.dialects.reading import BadRequest
from extproc.domain.media import MediaPart

TEXT_PARTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content part that are text, and the key that holds it. Media are counted by the policy's rules, and any
other type is refused: what it costs is not known."""

SKIPPED_WHEN_NULL = frozenset({"text", "refusal"})


def conversation(
    body: Mapping[str, Any], media: list[MediaPart], name: str = "messages"
) -> list[dict[str, Any]]:
    """The messages of a chat request; what is not text in them is added to `media`.

    A message's content is a string, a list of parts, or null.
    """
    messages = fields.mappings(body, name)
    if messages is None:
        raise fields.required(name)
    return [
        {"role": message["role"], "content": message["content"]}
        if _is_plain(message)
        else _message(message, f"{name}[{index}].", media)
        for index, message in enumerate(messages)
    ]


_PLAIN_ROLES = frozenset({"system", "user", "assistant"})


def _is_plain(message: Mapping[str, Any]) -> bool:
    """Is this a role and a text and nothing else? Most are, and there may be thousands."""
    return (
        len(message) == 2
        and type(message.get("content")) is str
        and type(role := message.get("role")) is str
        and role in _PLAIN_ROLES
    )


def _message(message: Mapping[str, Any], prefix: str, media: list[MediaPart]) -> dict[str, Any]:
    role = fields.text(message, "role", prefix=prefix)
    if not role:
        raise BadRequest(f"`{prefix}role` must be a non-empty string", param=f"{prefix}role")
    read: dict[str, Any] = {
        "role": role,
        "content": content(message.get("content"), f"{prefix}content", media),
    }
    for key in ("name", "task"):
        value = fields.text(message, key, prefix=prefix)
        if value is not None:
            read[key] = value
    if role == "assistant":
        reasoning = fields.text(message, "reasoning", prefix=prefix)
        if reasoning is None:
            reasoning = fields.text(message, "reasoning_content", prefix=prefix)
        if reasoning is not None:
            read["reasoning"] = reasoning
            read["reasoning_content"] = reasoning
        calls = tool_calls(message.get("tool_calls"), f"{prefix}tool_calls")
        if calls:
            read["tool_calls"] = calls
    elif role == "tool":
        call_id = fields.text(message, "tool_call_id", prefix=prefix)
        if call_id is not None:
            read["tool_call_id"] = call_id
    elif role == "developer":
        read["tools"] = tools(message, prefix=prefix)
    return read


def content(value: object, param: str, media: list[MediaPart]) -> str | list[dict[str, str]] | None:
    """A message's content: a string as it is, or a list of parts as `{"type": "text", "text": ...}`.

    Of what is not text, only `{"type": "image"}` and the like is left; the rest is added to `media`.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"`{param}` must be a string, null, or a list of content parts", param=param)
    parts: list[dict[str, str]] = []
    for index, part in enumerate(value):
        where = f"{param}[{index}]"
        medium = media_part(part, where) if isinstance(part, Mapping) else None
        if medium is not None:
            media.append(medium)
            parts.append(placeholder(medium))
            continue
        text = _text_of_part(part, where)
        if text is not None:
            parts.append({"type": "text", "text": text})
    return parts


def _text_of_part(part: object, param: str) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadRequest(f"`{param}` must be a string or an object with a type", param=param)
    kind = part.get("type")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise BadRequest(
            f"`{param}.type` is not a type of content part that this gateway knows how to count",
            param=f"{param}.type",
        )
    if kind in SKIPPED_WHEN_NULL:
        return fields.text(part, key, prefix=f"{param}.")
    return fields.needed_text(part, key, prefix=f"{param}.")


def tool_calls(value: object, param: str) -> list[dict[str, Any]]:
    """An assistant's calls. `arguments` stays what it is, JSON text or an object: templates need either."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"`{param}` must be a list of objects or null", param=param)
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(value):
        where = f"{param}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise BadRequest(f"`{where}` must be an object with a function", param=where)
        if call.get("type", "function") != "function":
            raise BadRequest(f"`{where}.type` must be function", param=f"{where}.type")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str | Mapping):
            raise BadRequest(
                f"`{where}.function.arguments` must be JSON text or an object",
                param=f"{where}.function.arguments",
            )
        name = fields.text(function, "name", prefix=f"{where}.function.")
        call_id = fields.text(call, "id", prefix=f"{where}.")
        # The order is vLLM's: templates may print a call as a whole.
        read: dict[str, Any] = {} if call_id is None else {"id": call_id}
        read |= {"function": {"arguments": arguments, "name": name or ""}, "type": "function"}
        calls.append(read)
    return calls


def tools(body: Mapping[str, Any], *, prefix: str = "") -> list[dict[str, Any]] | None:
    """The tools that the template shows to the model, or the functions of the API's first version.

    Functions are counted as tools although vLLM and llama.cpp leave them out: rather too much than unseen. Tools
    are shown whatever `tool_choice` says: vLLM leaves them in the prompt for `none` too, unless it is
    started with an option against that, and more can be released later while less cannot be taken back.
    """
    listed = fields.mappings(body, "tools", prefix=prefix)
    if listed is not None:
        return [_tool(tool, f"{prefix}tools[{index}].") for index, tool in enumerate(listed)]
    functions = fields.mappings(body, "functions", prefix=prefix)
    if functions is not None:
        return [
            {"type": "function", "function": described_function(function, f"{prefix}functions[{index}].")}
            for index, function in enumerate(functions)
        ]
    return None


def _tool(tool: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise BadRequest(f"`{prefix}type` must be function", param=f"{prefix}type")
    function = fields.mapping(tool, "function", prefix=prefix)
    if function is None:
        raise BadRequest(f"`{prefix}function` must be an object", param=f"{prefix}function")
    deferred = fields.boolean(tool, "defer_loading", default=False, prefix=prefix)
    described = described_function(function, f"{prefix}function.")
    read: dict[str, Any] = {"type": "function", "function": described}
    if tool.get("defer_loading") is not None:
        read["defer_loading"] = deferred
        described.setdefault("defer_loading", deferred)
    return read


def described_function(
    function: Mapping[str, Any], prefix: str, *, schema: str = "parameters"
) -> dict[str, Any]:
    """A function as templates see it. `schema` is the key under which the API keeps its parameters."""
    read: dict[str, Any] = {
        "name": fields.needed_text(function, "name", prefix=prefix),
        "description": fields.text(function, "description", prefix=prefix),
        "parameters": fields.mapping(function, schema, prefix=prefix),
    }
    for key in ("strict", "defer_loading"):
        value = fields.boolean(function, key, default=False, prefix=prefix)
        if function.get(key) is not None:
            read[key] = value
    return read
