from __future__ import annotations

from typing import Any

import pytest

from extproc.dialects.openai_responses import DIALECT
from extproc.dialects.reading import BadRequest, InferenceRequest, Truncation
from extproc.domain.prompt import ChatPrompt


def read(**body: Any) -> InferenceRequest:
    return DIALECT.read({"model": "m", "input": "Name three rivers.", **body}, "/v1/responses")


def prompt(**body: Any) -> ChatPrompt:
    read_prompt = read(**body).prompt
    assert isinstance(read_prompt, ChatPrompt)
    return read_prompt


def test_text_is_a_user_message() -> None:
    """The least request is one user message, after the instructions if there are any."""
    user = {"role": "user", "content": "Name three rivers."}
    assert read() == InferenceRequest(
        model="m", prompt=ChatPrompt(messages=[user], add_special_tokens=True), output_limit_tokens=None
    )
    assert prompt(instructions="Be brief.").messages == [{"role": "system", "content": "Be brief."}, user]


def test_items_become_the_chat_that_the_engine_makes() -> None:
    """What the assistant did in a row is one message, until it does the same again."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How deep?"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "function_call", "call_id": "1", "name": "get_depth", "arguments": '{"river":"Po"}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "ls"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4 m."}]},
        {"type": "message", "role": "assistant", "content": "Anything else?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "developer", "content": "Be brief."},
    ]
    assert prompt(input=items).messages == [
        {"role": "user", "content": [{"type": "text", "text": "How deep?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "1",
                    "function": {"name": "get_depth", "arguments": '{"river":"Po"}'},
                },
                {"type": "function", "id": "2", "function": {"name": "run", "arguments": {"input": "ls"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "4 m."},
        {"role": "assistant", "content": "Anything else?", "reasoning": "so", "reasoning_content": "so"},
        {"role": "assistant", "content": None, "reasoning": "", "reasoning_content": ""},
        {"role": "developer", "content": "Be brief."},
    ]


def test_custom_tools_and_groups_of_tools_are_shown_as_functions() -> None:
    """A custom tool takes one text; the functions of a group bear its name, in their calls too."""
    inner = [{"type": "function", "name": "f", "description": "d"}, {"type": "custom", "name": "inside"}]
    shown = prompt(
        tools=[
            {"type": "custom", "name": "run", "description": "free"},
            {"type": "namespace", "name": "ns", "tools": inner},
        ]
    ).tools
    assert shown is not None
    custom, grouped = [tool["function"] for tool in shown]
    assert (custom["name"], custom["description"]) == ("run", "free")
    assert custom["parameters"]["required"] == ["input"]
    assert grouped == {"name": "ns__f", "description": "d", "parameters": None}
    call = {"type": "function_call", "call_id": "1", "namespace": "ns", "name": "f", "arguments": "{}"}
    (message,) = prompt(input=[call]).messages
    assert message["tool_calls"][0]["function"]["name"] == "ns__f"


def test_of_an_answers_parts_the_first_is_shown() -> None:
    """The engine takes the first text of an earlier answer and leaves the others out."""
    parts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert prompt(input=[{"role": "assistant", "content": parts}]).messages[0]["content"] == "a"
    assert prompt(input=[{"role": "assistant", "content": []}]).messages[0]["content"] == ""


def test_functions_are_shown_and_other_tools_are_not() -> None:
    """A flat function is the chat API's tool; what the engine runs by itself is not in the prompt."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "web_search"}]
    assert prompt(tools=tools).tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": {"type": "object"}},
        }
    ]
    assert prompt(tools=[{"type": "web_search"}]).tools is None
    assert prompt(tools=[]).tools is None


@pytest.mark.parametrize("status", ["in_progress", "incomplete"])
def test_an_unfinished_answer_is_continued(status: str) -> None:
    """A last item that is not finished is left open, and no new turn is started."""
    last = {"type": "message", "role": "assistant", "content": "The Po", "status": status}
    unfinished = prompt(input=[{"role": "user", "content": "a"}, last])
    assert (unfinished.add_generation_prompt, unfinished.continue_final_message) == (False, True)
    assert prompt(input=[{**last, "type": None}]).continue_final_message
    assert prompt(input=[{"type": "reasoning", "summary": [], "status": status}]).continue_final_message


FINISHED: list[dict[str, Any]] = [
    {"role": "assistant", "content": "The Po", "status": "completed"},
    {"role": "assistant", "content": "The Po"},
    {"role": "assistant", "content": "The Po", "status": ["incomplete"]},
    {"type": "function_call", "name": "f", "status": "incomplete"},
]


@pytest.mark.parametrize("last", FINISHED, ids=repr)
def test_a_finished_answer_gets_a_new_turn(last: dict[str, Any]) -> None:
    """Only messages and reasoning are ever continued, and only if they say that they are not finished."""
    finished = prompt(input=[{"role": "user", "content": "a"}, last])
    assert (finished.add_generation_prompt, finished.continue_final_message) == (True, False)


def test_limits_truncation_and_effort() -> None:
    """The remaining fields that change what is reserved."""
    request = read(max_output_tokens=7, stream=True, truncation="auto", reasoning={"effort": "low"})
    assert (request.output_limit_tokens, request.stream) == (7, True)
    assert request.truncation == Truncation(keep_tokens=None)
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    assert read(truncation="disabled", max_output_tokens=None) == read()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": 1}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [1]}, "input"),
    ({"input": 1}, "input"),
    ({"input": [{"type": "message"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": 1}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": {}}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "content": [{"text": 1}]}]}, "input[0].content[0].text"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"instructions": 1}, "instructions"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"truncation": "left"}, "truncation"),
    ({"truncation": []}, "truncation"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"),
    ({"reasoning": "low"}, "reasoning"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": 1}, "tools"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED, ids=lambda value: repr(value)[:70])
def test_what_cannot_be_counted_is_refused_where_it_stands(body: dict[str, Any], param: str) -> None:
    """What the engine has stored, what outlives its stream, and what is not text are refused by name."""
    with pytest.raises(BadRequest) as caught:
        read(**body)
    assert caught.value.param == param
