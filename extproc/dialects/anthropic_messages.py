"""Anthropic's Messages API, `/v1/messages`, as vLLM serves it.

vLLM turns such a request into a chat request before its template sees it, and counts that. This module makes
the same conversation: a system message first, thinking as `reasoning`, `tool_use` as tool calls, and every
`tool_result` as a `tool` message before the message that it came in. `/v1/messages/count_tokens` is no
inference and is not matched here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from extproc.dialects import fields
from extproc.dialects.elsewhere import refuse_hidden_prompts
from extproc.dialects.media import media_part, placeholder
from extproc.dialects.messages import described_function
from extproc.dialects.reading import BadRequest, Dialect, InferenceRequest, UsageField, UsagePaths
from extproc.dialects.refusals import anthropic_error
from extproc.dialects.template_variables import template_variables
from extproc.domain.media import MediaPart
from extproc.domain.prompt import ChatPrompt

ROLES = frozenset({"user", "assistant", "system"})

ATTRIBUTION = "x-anthropic-billing-header"
"""How a line begins that a coding agent puts into its system text, different in every request. Some engines leave it
out, and this module leaves that to them: a system text in blocks stays in blocks."""


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a messages request. `max_tokens` is required by the API and at least 1."""
    del path
    refuse_hidden_prompts(body)
    limit_tokens = fields.bounded_integer(body, "max_tokens", at_least=1)
    if limit_tokens is None:
        raise fields.required("max_tokens")
    media: list[MediaPart] = []
    messages = _conversation(body, media)
    return InferenceRequest(
        model=fields.model_name(body),
        prompt=ChatPrompt(
            messages=messages,
            tools=_tools(body),
            template_kwargs=template_variables(body, effort=_effort(body)),
            system_in_blocks=any(
                message["role"] == "system" and isinstance(message["content"], list) for message in messages
            ),
        ),
        output_limit_tokens=limit_tokens,
        stream=fields.boolean(body, "stream", default=False),
        media=tuple(media),
    )


def _conversation(body: Mapping[str, Any], media: list[MediaPart]) -> list[dict[str, Any]]:
    messages = fields.mappings(body, "messages")
    if messages is None:
        raise fields.required("messages")
    conversation: list[dict[str, Any]] = []
    system = body.get("system") or ""
    if not isinstance(system, str):
        system = _texts(_blocks(system, "system"), "system")
    if system:
        conversation.append({"role": "system", "content": system})
    for index, message in enumerate(messages):
        prefix = f"messages[{index}]."
        role = fields.needed_text(message, "role", prefix=prefix)
        if role not in ROLES:
            raise BadRequest(
                f"`{prefix}role` must be one of {', '.join(sorted(ROLES))}", param=f"{prefix}role"
            )
        content = message.get("content")
        if role == "system":
            where = f"{prefix}content"
            blocks = (
                [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content, where)
            )
            texts = _texts(blocks, where)
            if texts:
                conversation.append({"role": role, "content": texts})
        elif isinstance(content, str):
            conversation.append({"role": role, "content": content})
        else:
            where = f"{prefix}content"
            conversation.extend(_turn(role, _blocks(content, where), where, media))
    if not conversation:
        raise BadRequest("`messages` must have some content", param="messages")
    return conversation


def _blocks(content: object, param: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise BadRequest(f"`{param}` must be a string or a list of content blocks", param=param)
    return content


def _texts(blocks: Sequence[Mapping[str, Any]], param: str) -> list[dict[str, str]]:
    """The blocks of a system text that are not empty, as parts."""
    texts = [_block_text(block, f"{param}[{index}]") for index, block in enumerate(blocks)]
    return [{"type": "text", "text": text} for text in texts if text]


def _block_text(block: Mapping[str, Any], param: str) -> str:
    if block.get("type") != "text":
        raise _uncounted(param)
    return fields.needed_text(block, "text", prefix=f"{param}.")


def _uncounted(param: str) -> BadRequest:
    return BadRequest(
        f"`{param}.type` is not a type of content block that this gateway knows how to count",
        param=f"{param}.type",
    )


def _turn(
    role: str, blocks: Sequence[Mapping[str, Any]], param: str, media: list[MediaPart]
) -> list[dict[str, Any]]:
    """The chat messages that one message of blocks becomes."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, str]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        where = f"{param}[{index}]"
        match block.get("type"):
            case "text":
                text = _block_text(block, where)
                if text:
                    parts.append({"type": "text", "text": text})
            case "thinking":
                thoughts.append(fields.needed_text(block, "thinking", prefix=f"{where}."))
            case "redacted_thinking":
                pass  # opaque to the engine, which leaves it out
            case "tool_use" if role == "assistant":
                calls.append(_call(block, f"{where}."))
            case "tool_result" if role == "user":
                results.append(_result(block, f"{where}.", media))
            case "image" | "document" if role == "user":
                parts.append(_medium(block, where, media))
            case _:
                raise _uncounted(where)
    message: dict[str, Any] = {"role": role, "content": None}
    if len(parts) == 1 and "text" in parts[0]:
        message["content"] = parts[0]["text"]
    elif parts:
        message["content"] = parts
    elif role == "user":
        return results
    if thoughts and role == "assistant":
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _call(block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {  # in vLLM's order: templates may print a call as a whole
        "id": fields.text(block, "id", prefix=prefix) or "",
        "function": {
            "arguments": fields.mapping(block, "input", prefix=prefix) or {},
            "name": fields.needed_text(block, "name", prefix=prefix),
        },
        "type": "function",
    }


def _medium(block: Mapping[str, Any], param: str, media: list[MediaPart]) -> dict[str, str]:
    medium = media_part(block, param)
    assert medium is not None, "asked only about types that are known"
    media.append(medium)
    return placeholder(medium)


def _result(block: Mapping[str, Any], prefix: str, media: list[MediaPart]) -> dict[str, Any]:
    content = block.get("content")
    if content is None:
        content = ""
    if not isinstance(content, str):
        param = f"{prefix}content"
        texts: list[str] = []
        for index, item in enumerate(_blocks(content, param)):
            where = f"{param}[{index}]"
            if item.get("type") in ("image", "document"):
                _medium(item, where, media)  # counted, and shown by no template inside a tool's answer
            else:
                texts.append(_block_text(item, where))
        content = "\n".join(texts)
    return {
        "role": "tool",
        "tool_call_id": fields.text(block, "tool_use_id", prefix=prefix) or "",
        "content": content,
    }


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Tools in the chat API's shape; a schema without a type is one of an object."""
    listed = fields.mappings(body, "tools", may_be_empty=True)
    if listed is None:
        return None
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(listed):
        prefix = f"tools[{index}]."
        function = described_function(tool, prefix, schema="input_schema")
        if function["parameters"] is None:
            raise BadRequest(
                f"`{prefix}input_schema` must be an object; tools that the server runs are not offered here",
                param=f"{prefix}input_schema",
            )
        function["parameters"] = {**function["parameters"]}
        function["parameters"].setdefault("type", "object")
        tools.append({"type": "function", "function": function})
    return tools


def _effort(body: Mapping[str, Any]) -> str | None:
    thinking = fields.mapping(body, "thinking")
    if thinking is not None and thinking.get("type") == "disabled":
        return "none"
    return fields.text(fields.mapping(body, "output_config") or {}, "effort", prefix="output_config.")


def _usage_field(name: str) -> UsageField:
    # A stream tells it at its start and again, corrected, near its end: the later one stands.
    return UsageField(body=(("usage", name),), stream=(("message", "usage", name), ("usage", name)))


DIALECT = Dialect(
    name="anthropic_messages",
    paths=("/v1/messages",),
    read=read,
    error_body=anthropic_error,
    usage=UsagePaths(
        input_fields=(
            _usage_field("input_tokens"),
            _usage_field("cache_creation_input_tokens"),
            _usage_field("cache_read_input_tokens"),
        ),
        output_fields=(_usage_field("output_tokens"),),
    ),
    counts="system text, messages and tools, as the chat request that they become; media by rule",
    smallest={"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]},
)
