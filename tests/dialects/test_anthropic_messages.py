from __future__ import annotations

from typing import Any

import pytest

from extproc.dialects import openai_chat
from extproc.dialects.anthropic_messages import ATTRIBUTION, DIALECT
from extproc.dialects.reading import BadRequest, InferenceRequest
from extproc.domain.prompt import ChatPrompt

USER = {"role": "user", "content": "Name three rivers."}


def read(**body: Any) -> InferenceRequest:
    return DIALECT.read({"model": "m", "max_tokens": 10, "messages": [USER], **body}, "/v1/messages")


def prompt(**body: Any) -> ChatPrompt:
    read_prompt = read(**body).prompt
    assert isinstance(read_prompt, ChatPrompt)
    return read_prompt


def refused_param(**body: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        read(**body)
    return caught.value.param


def test_the_least_request() -> None:
    """A request is one conversation with one answer of at most `max_tokens`."""
    assert read() == InferenceRequest(model="m", prompt=ChatPrompt(messages=[USER]), output_limit_tokens=10)


@pytest.mark.parametrize("value", [None, 0, -1, True, 1.0, "10"], ids=repr)
def test_max_tokens_is_required(value: Any) -> None:
    """TOK-04: this API has no default limit, and none below 1."""
    assert refused_param(max_tokens=value) == "max_tokens"


BLOCKS = [{"type": "text", "text": f"{ATTRIBUTION}: cch=1;"}, {"type": "text", "text": "Be brief."}]
SYSTEMS: list[tuple[Any, Any]] = [
    (None, None),
    ("", None),
    ([], None),
    ([{"type": "text", "text": ""}], None),
    ("Be brief.", "Be brief."),
    (
        [{**BLOCKS[0], "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": ""}, BLOCKS[1]],
        BLOCKS,
    ),
]


@pytest.mark.parametrize(("system", "content"), SYSTEMS, ids=lambda value: repr(value)[:50])
def test_system_text_is_a_first_message(system: Any, content: Any) -> None:
    """System blocks stay blocks, for engines differ in what they make of them; empty ones are nothing."""
    first = [] if content is None else [{"role": "system", "content": content}]
    read_prompt = prompt(system=system)
    assert read_prompt.messages == [*first, USER]
    assert read_prompt.system_in_blocks == isinstance(content, list)


def test_blocks_become_the_chat_that_the_engine_makes() -> None:
    """Results come before the message they came in; thinking, calls and text are one assistant message."""
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "How deep?", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "get_depth", "input": {"river": "Po"}},
                {"type": "tool_use", "id": "t2", "name": "now"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Both!"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}] * 2},
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "Go on."},
                {"type": "text", "text": ""},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "12:00"}]},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "system", "content": f"{ATTRIBUTION}: x"},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
    ]
    assert prompt(messages=messages).messages == [
        {"role": "user", "content": "How deep?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "t1",
                    "function": {"name": "get_depth", "arguments": {"river": "Po"}},
                },
                {"type": "function", "id": "t2", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "4\n4"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "Both!"}, {"type": "text", "text": "Go on."}]},
        {"role": "tool", "tool_call_id": "t2", "content": "12:00"},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "system", "content": [{"type": "text", "text": f"{ATTRIBUTION}: x"}]},
        {"role": "assistant", "content": None},
    ]


SCHEMA = {"properties": {"river": {"type": "string"}}, "required": ["river"]}


def test_a_tool_is_the_same_tool_in_both_apis() -> None:
    """TOK-02: a tool with `input_schema` gives the prompt that it gives in the chat API."""
    anthropic = [{"name": "get_depth", "description": "Depth in metres.", "input_schema": SCHEMA}]
    function = {
        "name": "get_depth",
        "description": "Depth in metres.",
        "parameters": SCHEMA | {"type": "object"},
    }
    chat = openai_chat.DIALECT.read({"model": "m", "messages": [USER], "tools": [{"function": function}]}, "")
    assert prompt(tools=anthropic) == chat.prompt
    assert "type" not in SCHEMA


def test_no_tools_are_an_empty_list_to_the_template() -> None:
    """The engine hands an empty list on, and templates may tell it from none."""
    assert prompt(tools=[]).tools == []
    assert prompt(tools=None).tools is None


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"output_config": {}, "chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)
def test_thinking_reaches_the_template(body: dict[str, Any], variables: dict[str, Any]) -> None:
    """How much to think is a template variable to the engine."""
    assert prompt(**body).template_kwargs == variables


def message(*blocks: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages"),
    ({"messages": message({"type": "text", "text": ""})}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": message("x")}, "messages[0].content"),
    ({"messages": message({})}, "messages[0].content[0].type"),
    ({"messages": message({"type": ["text"]})}, "messages[0].content[0].type"),
    ({"messages": message({"type": "search_result", "source": {}})}, "messages[0].content[0].type"),
    ({"messages": message({"type": "container_upload"})}, "messages[0].content[0].type"),
    ({"messages": message({"type": "text"})}, "messages[0].content[0].text"),
    ({"messages": message({"type": "thinking"}, role="assistant")}, "messages[0].content[0].thinking"),
    ({"messages": message({"type": "tool_use", "name": "f"})}, "messages[0].content[0].type"),
    ({"messages": message({"type": "tool_use"}, role="assistant")}, "messages[0].content[0].name"),
    (
        {"messages": message({"type": "tool_use", "name": "f", "input": 1}, role="assistant")},
        "messages[0].content[0].input",
    ),
    ({"messages": message({"type": "tool_result"}, role="assistant")}, "messages[0].content[0].type"),
    ({"messages": message({"type": "tool_result", "content": 1})}, "messages[0].content[0].content"),
    (
        {"messages": message({"type": "tool_result", "content": [{"type": "search_result"}]})},
        "messages[0].content[0].content[0].type",
    ),
    ({"messages": message({"type": "tool_result", "tool_use_id": 1})}, "messages[0].content[0].tool_use_id"),
    ({"system": 1}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].input_schema"),
    ({"thinking": 1}, "thinking"),
    ({"output_config": {"effort": 1}}, "output_config.effort"),
    ({"stream": 1}, "stream"),
    ({"chat_template": "x"}, "chat_template"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: repr(value)[:70])
def test_other_shapes_are_refused_where_they_stand(body: dict[str, Any], param: str) -> None:
    """What the engine would not render, or nobody could count, is refused at the exact place."""
    assert refused_param(**body) == param
