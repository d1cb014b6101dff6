"""The OpenAI Responses API, `/v1/responses`, as far as one request says all that the model will read.

Requests that continue something the engine has stored, or that go on after their HTTP stream has ended, are
refused: nobody outside the engine can count the first, and the second would hold no lease. Items become chat
messages as in vLLM: calls, reasoning and text that follow each other are one assistant message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.elsewhere import refuse_hidden_prompts
from extproc.dialects.messages import content, described_function
from extproc.dialects.reading import (
    BadRequest,
    Dialect,
    InferenceRequest,
    Truncation,
    UsageField,
    UsagePaths,
)
from extproc.dialects.refusals import openai_error
from extproc.dialects.template_variables import template_variables
from extproc.domain.media import MediaPart
from extproc.domain.prompt import ChatPrompt

STORED = ("previous_response_id", "conversation", "prompt", "previous_input_messages")
"""Fields that stand for text which is not in the request."""

UNFINISHED = frozenset({"in_progress", "incomplete"})

CUSTOM_INPUT = "input"
"""vLLM shows a custom tool as a function, and the free text of a call as its one argument."""

CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."},
    },
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""What that function takes (vLLM 0.32)."""


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a request. It always gets one answer, of at most `max_output_tokens`."""
    del path
    refuse_hidden_prompts(body)
    for name in STORED:
        if body.get(name) is not None:
            raise BadRequest(
                f"`{name}` is not accepted: what it stands for cannot be counted here; send the whole input",
                param=name,
            )
    if fields.boolean(body, "background", default=False):
        raise BadRequest(
            "`background` is not accepted: an answer must be read as it is made", param="background"
        )
    items = body.get("input")
    if items is None:
        raise fields.required("input")
    unfinished = _is_unfinished(items)
    media: list[MediaPart] = []
    messages = _conversation(body, items, media)
    reasoning = fields.mapping(body, "reasoning") or {}
    return InferenceRequest(
        model=fields.model_name(body),
        prompt=ChatPrompt(
            messages=messages,
            tools=_tools(body),
            add_generation_prompt=not unfinished,
            continue_final_message=unfinished,
            add_special_tokens=True,  # vLLM's renderer has it so here, and not in the chat API
            template_kwargs=template_variables(
                body, effort=fields.text(reasoning, "effort", prefix="reasoning.")
            ),
        ),
        output_limit_tokens=fields.bounded_integer(body, "max_output_tokens"),
        stream=fields.boolean(body, "stream", default=False),
        truncation=Truncation(keep_tokens=None) if _truncates(body) else None,
        media=tuple(media),
    )


def _truncates(body: Mapping[str, Any]) -> bool:
    truncation = fields.text(body, "truncation")
    if truncation not in {None, "disabled", "auto"}:
        raise BadRequest("`truncation` must be auto or disabled", param="truncation")
    return truncation == "auto"


def _is_unfinished(items: object) -> bool:
    """Whether the last item is an answer that the model is to go on with."""
    last = items[-1] if isinstance(items, list) and items else None
    if not isinstance(last, Mapping) or last.get("type") not in (None, "message", "reasoning"):
        return False
    status = last.get("status")
    return isinstance(status, str) and status in UNFINISHED


def _conversation(body: Mapping[str, Any], items: object, media: list[MediaPart]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    instructions = fields.text(body, "instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    listed = fields.mappings(body, "input")
    for index, item in enumerate(listed or ()):
        _append(messages, item, f"input[{index}].", media)
    return messages


def _append(
    messages: list[dict[str, Any]], item: Mapping[str, Any], prefix: str, media: list[MediaPart]
) -> None:
    """Add one item to the conversation: as a message, or as a part of the assistant's message before it."""
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        _assistant(messages, "tool_calls").setdefault("tool_calls", []).append(_call(item, prefix))
    elif kind == "reasoning":
        thought = _thought(item, prefix)
        message = _assistant(messages, "reasoning")
        message["reasoning"] = message["reasoning_content"] = thought
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append(
            {
                "role": "tool",
                "tool_call_id": fields.text(item, "call_id", prefix=prefix) or "",
                "content": content(item.get("output"), f"{prefix}output", media),
            }
        )
    elif kind in (None, "message"):
        role = fields.needed_text(item, "role", prefix=prefix)
        text = content(item.get("content"), f"{prefix}content", media)
        if role == "assistant":
            if isinstance(text, list):
                text = text[0].get("text", "") if text else ""  # of an answer's parts, vLLM shows the first
            _assistant(messages, "content")["content"] = text
        else:
            messages.append({"role": role, "content": text})
    else:
        raise BadRequest(
            f"`{prefix}type` is not a type of item that this gateway knows how to count",
            param=f"{prefix}type",
        )


def _assistant(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """The assistant's message that `part` belongs to: the last message if it lacks one, else a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (part != "tool_calls" and last.get(part) is not None):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _call(item: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    arguments: object
    if item.get("type") == "custom_tool_call":
        arguments = {CUSTOM_INPUT: fields.text(item, "input", prefix=prefix) or ""}
    else:
        arguments = fields.text(item, "arguments", prefix=prefix)
    name = _in_namespace(
        fields.text(item, "namespace", prefix=prefix), fields.needed_text(item, "name", prefix=prefix)
    )
    return {  # in vLLM's order, which is another one in the chat API: templates may print a call as a whole
        "id": fields.text(item, "call_id", prefix=prefix) or "",
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    }


def _thought(item: Mapping[str, Any], prefix: str) -> str:
    """The text of a reasoning item: its first content, or its first summary."""
    if item.get("encrypted_content"):
        raise BadRequest(
            f"`{prefix}encrypted_content` is not accepted: what is encrypted cannot be counted",
            param=f"{prefix}encrypted_content",
        )
    for key in ("content", "summary"):
        parts = fields.mappings(item, key, prefix=prefix, may_be_empty=True)
        if parts:
            return fields.needed_text(parts[0], "text", prefix=f"{prefix}{key}[0].")
    return ""


def _in_namespace(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The functions that the template shows. Tools that the engine runs by itself are not shown by it."""
    listed = fields.mappings(body, "tools", may_be_empty=True) or []
    functions: list[dict[str, Any]] = []
    for index, tool in enumerate(listed):
        prefix = f"tools[{index}]."
        kind = tool.get("type")
        if kind == "function":
            functions.append(described_function(tool, prefix))
        elif kind == "custom":
            functions.append({**described_function(tool, prefix), "parameters": CUSTOM_PARAMETERS})
        elif kind == "namespace":
            functions += _namespace(tool, prefix)
    return [{"type": "function", "function": function} for function in functions] or None


def _namespace(tool: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The functions of a group of tools; each bears the group's name."""
    name = fields.needed_text(tool, "name", prefix=prefix)
    functions: list[dict[str, Any]] = []
    for index, inner in enumerate(fields.mappings(tool, "tools", prefix=prefix, may_be_empty=True) or ()):
        if inner.get("type") == "function":
            described = described_function(inner, f"{prefix}tools[{index}].")
            functions.append({**described, "name": _in_namespace(name, described["name"])})
    return functions


def _usage_field(name: str) -> UsageField:
    return UsageField(body=(("usage", name),), stream=(("response", "usage", name),))


DIALECT = Dialect(
    name="openai_responses",
    paths=("/v1/responses",),
    read=read,
    error_body=openai_error,
    usage=UsagePaths(
        input_fields=(_usage_field("input_tokens"),), output_fields=(_usage_field("output_tokens"),)
    ),
    counts="instructions and all items of the input, as the conversation that they become; functions; media by rule",
    smallest={"model": "m", "input": "Hi"},
)
