from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects.reading import LARGEST_COUNT, BadRequest, InferenceRequest
from extproc.dialects.registry import dialect_for
from extproc.domain.outcome import Reason
from extproc.domain.prompt import ChatPrompt, TextPrompt, TokenIdPrompt

CANARY = "canary-7f3a"

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
        {"role": "developer", "content": "d", "tools": [TOOL]},
    ],
    "max_tokens": 1,
    "max_completion_tokens": 2,
    "n": 1,
    "best_of": 1,
    "stream": False,
    "tools": [TOOL],
    "tool_choice": "auto",
    "documents": [{"text": "x"}],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "truncate_prompt_tokens": 5,
    "n_predict": 3,
    "kv_transfer_params": {"do_remote_decode": True},
}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"model": "m", "messages": CHAT["messages"], "functions": [TOOL["function"]]}),
    (
        "/v1/completions",
        {"model": "m", "prompt": ["a"], "suffix": "b", "max_tokens": 1, "n": 1, "best_of": 2},
    ),
    ("/v1/completions", {"model": "m", "prompt": [[1, 2], [3]], "add_special_tokens": True}),
    (
        "/v1/responses",
        {
            "model": "m",
            "instructions": "i",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "summary": [{"text": "s"}], "content": [{"text": "t"}]},
                {"type": "function_call", "name": "f", "call_id": "1", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "o"},
                {"type": "message", "role": "assistant", "content": "b", "status": "completed"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "max_output_tokens": 5,
            "reasoning": {"effort": "low"},
            "truncation": "auto",
            "stream": True,
        },
    ),
    ("/v1/embeddings", {"model": "m", "input": ["a", "b"], "truncate_prompt_tokens": -1, "padding": None}),
    ("/v1/embeddings", {"model": "m", "messages": CHAT["messages"]}),
    (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 1,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t"},
                        {"type": "text", "text": "b"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "1",
                            "content": [{"type": "text", "text": "c"}],
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "thinking": {"type": "enabled"},
            "output_config": {"effort": "low"},
        },
    ),
    ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 1, "best_of": 1, "truncate": 1}}),
    ("/generate", {"text": ["a"], "sampling_params": [{"max_new_tokens": 1, "n": 1}], "stream": False}),
    ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}),
    ("/v2/models/m/generate", {"text_input": "a", "parameters": {"max_tokens": 1}, "max_tokens": 1}),
    ("/v2/models/m/generate_stream", {"text_input": "a", "sampling_parameters": '{"max_tokens": 1}'}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1, "n": 1}}),
    ("/completion", {"prompt": "a", "n_predict": 5, "n": 1}),
    ("/invocations", {"model": "m", "messages": CHAT["messages"]}),
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**63), max_value=2**64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from([CANARY, "text", "user", "assistant", "function", "system", "tool", "message", -1, 0, 1]),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=20,
)


def outcome(path: str, body: dict[str, Any]) -> InferenceRequest | None:
    """What a dialect makes of a body, checked in every respect that a caller relies on; `None` if refused."""
    dialect = dialect_for(path)
    assert dialect is not None
    before = copy.deepcopy(body)
    request: InferenceRequest | None = None
    try:
        request = dialect.read(body, path)
    except BadRequest as caught:
        check_refusal(caught)
    assert body == before
    if request is not None:
        check(request)
    return request


def check_refusal(refusal: BadRequest) -> None:
    assert CANARY not in refusal.message
    assert len(refusal.message) <= 200
    assert refusal.reason in {Reason.MALFORMED_REQUEST, Reason.INVALID_PARAMETER}
    assert refusal.param is not None
    assert CANARY not in refusal.param
    assert refusal.param.split("[")[0].split(".")[0] in refusal.message


def check(request: InferenceRequest) -> None:
    assert request.model is None or 1 <= len(request.model) <= 256
    limit_tokens = request.output_limit_tokens
    assert limit_tokens is None or (type(limit_tokens) is int and 0 <= limit_tokens <= LARGEST_COUNT)
    assert 1 <= request.choices <= LARGEST_COUNT
    assert type(request.stream) is bool
    match request.prompt:
        case TextPrompt(texts=texts):
            assert texts
            assert all(isinstance(text, str) for text in texts)
        case TokenIdPrompt(lengths_tokens=lengths_tokens):
            assert lengths_tokens
            assert all(length_tokens > 0 for length_tokens in lengths_tokens)
        case ChatPrompt() as prompt:
            render(prompt)


def render(prompt: ChatPrompt) -> str:
    """What templates do with a conversation, without asking first: it must not fail."""
    assert prompt.messages
    out = [""]
    for message in prompt.messages:
        content = message["content"]
        if isinstance(content, list):
            assert all(part["type"] == "text" for part in content)
            content = "\n".join(part["text"] for part in content)
        out.append(message["role"] + (content or "").strip() + message.get("reasoning", ""))
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            assert arguments is None or isinstance(arguments, str | dict)
            out.append(call["function"]["name"] + call.get("id", ""))
        out.append(message.get("tool_call_id", "") + message.get("name", ""))
    for tool in prompt.tools or []:
        assert tool["function"]["parameters"] is None or isinstance(tool["function"]["parameters"], dict)
        out.append(tool["type"] + tool["function"]["name"] + (tool["function"]["description"] or ""))
    assert all(isinstance(document, dict) for document in prompt.documents or [])
    assert all(isinstance(name, str) for name in prompt.template_kwargs)
    return "".join(out)


PATHS = sorted({path for path, _ in VALID})


@pytest.mark.parametrize(("path", "body"), VALID, ids=lambda value: str(value)[:40])
def test_the_bodies_that_are_damaged_below_are_whole(path: str, body: dict[str, Any]) -> None:
    """Each body that the next test damages is a request before it is damaged."""
    assert outcome(path, body) is not None


@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.text(max_size=12), json_values, max_size=6))
def test_any_object_is_read_or_refused(path: str, body: dict[str, Any]) -> None:
    """Whatever object arrives, a dialect reads it or raises `BadRequest`."""
    outcome(path, body)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in `value`, so that what is there can be replaced."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        found.append((value, key))
        if isinstance(item, dict | list):
            found.extend(places(item))
    return found


@given(which=st.sampled_from(VALID), data=st.data())
def test_any_damage_is_read_or_refused(which: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    """Replacing any values of a valid request by any others never fails otherwise than by `BadRequest`."""
    path, valid = which
    body = copy.deepcopy(valid)
    for _ in range(data.draw(st.integers(min_value=1, max_value=3))):
        found = places(body)
        if not found:
            break
        holder, key = data.draw(st.sampled_from(found))
        holder[key] = data.draw(json_values)
    outcome(path, body)


@given(which=st.sampled_from(VALID), data=st.data())
def test_null_is_the_same_as_absent(which: tuple[str, dict[str, Any]], data: st.DataObject) -> None:
    """TOK-04: for any field of a request, null and absence have the same outcome."""
    path, valid = which
    name = data.draw(st.sampled_from(sorted(valid)))
    absent = {key: value for key, value in valid.items() if key != name}
    assert outcome(path, {**absent, name: None}) == outcome(path, absent)
