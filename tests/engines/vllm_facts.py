"""Single requests to vLLM that its own `usage` must agree about: what is rare, and what was counted wrongly once."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm_requests import ATTRIBUTION, MODEL, Request
from tests.tokens.engine_requests import Json

USER: Json = {"role": "user", "content": "Hi there"}
FUNCTION: Json = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL: Json = {"type": "function", "function": FUNCTION}
RESULT: Json = {"role": "tool", "tool_call_id": "c", "content": "12"}
LONG = "word " * 9_000
EMPTY_PARTS = [{"type": "text", "text": text} for text in ("", "a", "", "b", "")]


def _called(arguments: Any) -> list[Json]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT, USER]


def _answered(content: Any, **fields: Any) -> list[Json]:
    return [USER, {"role": "assistant", "content": content, **fields}]


def _output(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": []}


OPEN = {"continue_final_message": True, "add_generation_prompt": False}

_CHATS: tuple[Json, ...] = (
    *(
        {"messages": _called(text), "tools": [TOOL]}
        for text in ("{bad", "[1]", "", "7", '{"a": 1.0, "b": [1e20, NaN]}')
    ),
    {"messages": [*_answered("x", tool_calls=[]), USER]},
    {"messages": [USER, {"role": "assistant"}, USER]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "critic", "content": "Hi"}, USER]},
    {"messages": [{"role": "critic", "content": [{"type": "text", "text": "a"}, "b"]}, USER]},
    {"messages": [{"role": "developer", "content": "D", "tools": [TOOL]}, USER]},
    {"messages": [USER, {"role": "system", "content": "S"}, {"role": "developer", "content": "D"}, USER]},
    {"messages": [{"role": "system", "content": f"{ATTRIBUTION} x\nBe brief."}, USER]},
    {"messages": [{"role": "system", "content": ATTRIBUTION}, USER]},
    {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "unheard_of": 7}}],
    },
    {"messages": [USER], "tools": [{**TOOL, "defer_loading": True}]},
    {"messages": [USER], "tools": [{**TOOL, "defer_loading": False}]},
    {"messages": [USER], "tools": [TOOL], "tool_choice": None},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
    {"messages": [USER], "chat_template_kwargs": {"tools": [TOOL]}},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "chat_template_kwargs": {"tools": []}},
    {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": "auto"}},
    {"messages": [USER], "reasoning_effort": "none"},
    {"messages": [USER], "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    {"messages": _answered("  So "), **OPEN},
    {"messages": _answered("b", reasoning_content="th"), **OPEN},
    {"messages": _answered("b"), "add_generation_prompt": False},
    {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": -1},
    {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 8_000},
    {"messages": [{"role": "user", "content": "a\0b \N{PILE OF POO}"}]},
    {"messages": [USER], "n": 3},
    *(
        {"messages": [{"role": role, "content": EMPTY_PARTS}, USER]}
        for role in ("user", "assistant", "system")
    ),
    {"messages": [USER, {**RESULT, "content": EMPTY_PARTS}, USER]},
)

_COMPLETIONS: tuple[Json, ...] = (
    {"prompt": "<|im_start|>user\nHi<|im_end|>"},
    {"prompt": LONG, "truncate_prompt_tokens": -1},
    {"prompt": [5] * 9_000, "truncate_prompt_tokens": -1},
    {"prompt": [[5] * 300, [6] * 9], "truncate_prompt_tokens": 100},
    {"prompt": "a b c", "echo": True, "logprobs": 1},
    {"prompt": ["a", "b c"], "n": 2},
)

_RESPONSES: tuple[Json, ...] = (
    {"input": ""},
    {"input": LONG, "truncation": "auto"},
    {"input": [{"role": "user", "content": []}]},
    {"input": [USER], "tools": [{"type": "custom", "name": "g", "description": "free"}]},
    {
        "input": [
            USER,
            {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": 'free "text"'},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "12"},
        ]
    },
    {
        "input": [
            USER,
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "ns", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "12"},
        ],
        "tools": [
            {
                "type": "namespace",
                "name": "ns",
                "description": "n",
                "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "inside"}],
            },
            {"type": "web_search"},
        ],
    },
    {
        "input": [
            USER,
            {
                "type": "message",
                "role": "assistant",
                "id": "m",
                "status": "completed",
                "content": [_output("A"), _output("B")],
            },
            USER,
        ]
    },
    {
        "input": [
            USER,
            {
                "type": "message",
                "role": "assistant",
                "id": "m",
                "status": "in_progress",
                "content": [_output("A")],
            },
        ]
    },
    {
        "input": [
            USER,
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "th"}]},
            *_answered("x"),
            USER,
        ]
    },
    {"input": [USER], "reasoning": {"effort": "none"}},
    {"input": [USER], "chat_template_kwargs": {"enable_thinking": False}},
)

_MESSAGES: tuple[Json, ...] = (
    {"messages": [USER], "system": f"{ATTRIBUTION} x\nBe brief."},
    {
        "messages": [USER],
        "system": [{"type": "text", "text": f"{ATTRIBUTION} x\nBe brief."}, {"type": "text", "text": "B"}],
    },
    {"messages": [USER, {"role": "system", "content": f"{ATTRIBUTION} x\nBe brief."}, USER]},
    {"messages": [USER, {"role": "system", "content": "inline"}, USER], "system": "S"},
    {"messages": _answered("So")},
    {"messages": [*_answered([]), USER]},
    {
        "messages": [
            *_answered([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "y"}]),
            USER,
        ]
    },
    {"messages": [USER], "tools": [{"name": "f", "input_schema": {}}]},
    {"messages": [USER], "thinking": {"type": "disabled"}},
    {"messages": [USER], "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
    {
        "messages": [
            *_answered(
                [{"type": "tool_use", "id": "t", "name": "f", "input": {}}, {"type": "text", "text": "after"}]
            ),
            {
                "role": "user",
                "content": [{"type": "text", "text": "before"}, {"type": "tool_result", "tool_use_id": "t"}],
            },
        ]
    },
)

FACTS: list[Request] = [
    *(("/v1/chat/completions", {"model": MODEL, "max_tokens": 1, **body}) for body in _CHATS),
    *(("/v1/completions", {"model": MODEL, "max_tokens": 1, **body}) for body in _COMPLETIONS),
    *(("/v1/responses", {"model": MODEL, "max_output_tokens": 1, **body}) for body in _RESPONSES),
    *(("/v1/messages", {"model": MODEL, "max_tokens": 1, **body}) for body in _MESSAGES),
]
