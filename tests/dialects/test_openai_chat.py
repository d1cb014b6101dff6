from __future__ import annotations

from typing import Any

import pytest

from extproc.dialects.openai_chat import DIALECT
from extproc.dialects.reading import LARGEST_COUNT, BadRequest, InferenceRequest, Truncation
from extproc.domain.outcome import Reason
from extproc.domain.prompt import ChatPrompt

USER = {"role": "user", "content": "Name three rivers."}


def read(**body: Any) -> InferenceRequest:
    return DIALECT.read({"model": "m", "messages": [USER], **body}, "/v1/chat/completions")


def prompt(**body: Any) -> ChatPrompt:
    read_prompt = read(**body).prompt
    assert isinstance(read_prompt, ChatPrompt)
    return read_prompt


def refused_param(**body: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        read(**body)
    return caught.value.param


def test_the_least_request_leaves_everything_to_the_engine() -> None:
    """A bare request has no ceiling of its own, one choice, and asks for the generation prompt."""
    assert read() == InferenceRequest(model="m", prompt=ChatPrompt(messages=[USER]), output_limit_tokens=None)


LIMITS: list[tuple[dict[str, Any], int | None]] = [
    ({}, None),
    ({"max_tokens": None}, None),
    ({"max_tokens": 0}, 0),
    ({"max_tokens": 16}, 16),
    ({"max_tokens": LARGEST_COUNT}, LARGEST_COUNT),
    ({"max_completion_tokens": 50, "max_tokens": 5000}, 50),
    ({"max_completion_tokens": 5000, "max_tokens": 50}, 5000),
    ({"max_completion_tokens": 0, "max_tokens": 50}, 0),
    ({"max_completion_tokens": None, "max_tokens": 50}, 50),
    ({"stream_options": None, "stream": None}, None),
]


@pytest.mark.parametrize(("body", "limit_tokens"), LIMITS)
def test_output_limits(body: dict[str, Any], limit_tokens: int | None) -> None:
    """TOK-04: absent is null is the engine's default, and the newer field wins wherever it is set."""
    assert read(**body).output_limit_tokens == limit_tokens


NO_COUNTS: list[Any] = [True, False, 16.0, 1e300, "16", "", -1, LARGEST_COUNT + 1, 10**30, [], {}, [16]]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n", "best_of"])
@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
def test_what_is_no_count_is_refused_by_name(name: str, value: Any) -> None:
    """TOK-04: whatever is not a whole number in range is invalid_parameter and names the field."""
    with pytest.raises(BadRequest) as caught:
        read(**{name: value})
    assert (caught.value.param, caught.value.reason) == (name, Reason.INVALID_PARAMETER)


@pytest.mark.parametrize("value", [value for value in NO_COUNTS if value != -1] + [-2, -1.0], ids=repr)
def test_truncation_is_a_count_or_minus_one(value: Any) -> None:
    """-1 asks the engine to cut at its window; nothing else below zero means anything."""
    assert read(truncate_prompt_tokens=-1).truncation == Truncation(keep_tokens=None)
    assert refused_param(truncate_prompt_tokens=value) == "truncate_prompt_tokens"


def test_a_bad_limit_is_refused_even_where_the_other_field_wins() -> None:
    """TOK-04: engines check both fields, so a request cannot smuggle nonsense in the one that loses."""
    assert refused_param(max_completion_tokens=5, max_tokens="x") == "max_tokens"


@pytest.mark.parametrize(
    ("body", "choices"),
    [({}, 1), ({"n": None}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5), ({"best_of": 4}, 4)],
)
def test_choices_are_the_answers_that_the_engine_makes(body: dict[str, Any], choices: int) -> None:
    """`n` answers are made, or `best_of` where that is more."""
    assert read(**body).choices == choices


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_no_answers_are_no_request(name: str) -> None:
    """Zero choices are refused."""
    assert refused_param(**{name: 0}) == name


MODELS: list[Any] = [None, 1, True, [], {}, "", "m" * 257]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: repr(model)[:12])
def test_a_model_is_a_name_of_bounded_length(model: Any) -> None:
    """BODY-02: `{"model": 1}` and the like are refused and name the field."""
    assert refused_param(model=model) == "model"
    assert read(model="m" * 256).model == "m" * 256


MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ({}, "messages"),
    ([[]], "messages"),
    ([None], "messages"),
    (["hi"], "messages"),
    ([{}], "messages[0].role"),
    ([{"role": None}], "messages[0].role"),
    ([{"role": 1, "content": "x"}], "messages[0].role"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([USER, {"role": "user", "content": 1}], "messages[1].content"),
    ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
    ([{"role": "user", "content": [1]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "thinking"}]}], "messages[0].content[0].thinking"),
    (
        [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": {"url": "x"}}]}],
        "messages[0].content[0].type",
    ),
    ([{"role": "user", "content": [{"type": "hologram"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
    ([{"role": "assistant", "reasoning": 1}], "messages[0].reasoning"),
    ([{"role": "assistant", "reasoning_content": []}], "messages[0].reasoning_content"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "messages[0].tool_calls[0]"),
    (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}],
        "messages[0].tool_calls[0].type",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
        "messages[0].tool_calls[0].function.name",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].id",
    ),
    ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0].tool_call_id"),
    ([{"role": "developer", "tools": []}], "messages[0].tools"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=lambda value: repr(value)[:60])
def test_messages_that_a_template_could_fail_on_are_refused(messages: Any, param: str) -> None:
    """Every message has the shape that templates rely on, or the request is refused at the exact place."""
    assert refused_param(messages=messages) == param


def test_what_a_template_sees_of_messages() -> None:
    """Templates see the keys that engines show them, and every kind of text part as text."""
    messages = [
        {"role": "system", "content": ["a", {"type": "text", "text": "b"}], "unknown": {"deep": 1}},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "text", "text": None}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "refusal": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4", "reasoning": 5},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "d"}], "tool_calls": []},
        {"role": "narrator", "name": "n", "content": ""},
    ]
    assert prompt(messages=messages).messages == [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
        {"role": "narrator", "name": "n", "content": ""},
    ]


GET_DEPTH = {
    "name": "get_depth",
    "description": "Return the depth of a river in metres.",
    "parameters": {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
}


def test_tools_are_shown_as_the_engine_shows_them() -> None:
    """TOK-02: absent members are null and unknown ones are gone, as in the engine's own dump of a tool."""
    tools = [
        {"type": "function", "function": {**GET_DEPTH, "x": 1}, "y": 2},
        {"function": {"name": "f", "strict": True}},
        {"function": {"name": "g"}, "defer_loading": True},
    ]
    assert prompt(tools=tools).tools == [
        {"type": "function", "function": GET_DEPTH},
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": None, "strict": True},
        },
        {
            "type": "function",
            "function": {"name": "g", "description": None, "parameters": None, "defer_loading": True},
            "defer_loading": True,
        },
    ]


def test_legacy_functions_are_tools() -> None:
    """TOK-02: the same tool in the older shape gives the same prompt."""
    modern = prompt(tools=[{"type": "function", "function": GET_DEPTH}])
    assert prompt(functions=[GET_DEPTH]) == modern


@pytest.mark.parametrize("tool_choice", ["none", "auto", "required", None, {"function": {"name": "f"}}])
def test_tools_are_in_the_prompt_whatever_the_choice(tool_choice: Any) -> None:
    """The engine renders the tools even for `none`, so they are counted even for `none`."""
    assert prompt(tools=[{"function": {"name": "f"}}], tool_choice=tool_choice).tools


TOOLS: list[tuple[Any, str]] = [
    ([], "tools"),
    ({}, "tools"),
    ("none", "tools"),
    ([1], "tools"),
    ([{}], "tools[0].function"),
    ([{"function": "f"}], "tools[0].function"),
    ([{"type": "web_search"}], "tools[0].type"),
    ([{"function": {}}], "tools[0].function.name"),
    ([{"function": {"name": 1}}], "tools[0].function.name"),
    ([{"function": {"name": "f", "description": 1}}], "tools[0].function.description"),
    ([{"function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
    ([{"function": {"name": "f", "strict": "yes"}}], "tools[0].function.strict"),
    ([{"function": {"name": "f"}, "defer_loading": 1}], "tools[0].defer_loading"),
]


@pytest.mark.parametrize(("tools", "param"), TOOLS, ids=lambda value: repr(value)[:50])
def test_tools_that_a_template_could_fail_on_are_refused(tools: Any, param: str) -> None:
    """A tool has the shape that templates rely on, or the request is refused at the exact place."""
    assert refused_param(tools=tools) == param


def test_fields_of_the_template_reach_the_prompt() -> None:
    """Fields of vLLM's own are read, not ignored: each of them changes the count."""
    read_prompt = prompt(
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        documents=[{"title": "t", "text": "x"}],
        chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": True},
        reasoning_effort="high",
    )
    assert read_prompt == ChatPrompt(
        messages=[USER],
        documents=[{"title": "t", "text": "x"}],
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        template_kwargs={"enable_thinking": False, "reasoning_effort": "high"},
    )


@pytest.mark.parametrize(("effort", "thinking"), [("none", False), ("low", True), ("max", True)])
def test_an_effort_switches_thinking(effort: str, thinking: bool) -> None:
    """As in vLLM, an effort sets `enable_thinking` where the request does not."""
    assert prompt(reasoning_effort=effort).template_kwargs == {
        "reasoning_effort": effort,
        "enable_thinking": thinking,
    }


TEMPLATE_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"documents": {}}, "documents"),
    ({"documents": ["x"]}, "documents"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_special_tokens": 0}, "add_special_tokens"),
    ({"reasoning_effort": 1}, "reasoning_effort"),
    ({"stream": "true"}, "stream"),
]


@pytest.mark.parametrize(("body", "param"), TEMPLATE_FIELDS, ids=lambda value: repr(value)[:60])
def test_fields_of_the_template_are_checked(body: dict[str, Any], param: str) -> None:
    """A template of the client's own and values of a wrong type are refused by name."""
    assert refused_param(**body) == param


def test_a_refused_template_says_who_sets_it() -> None:
    """The refusal of `chat_template` names the policy, so that the caller knows whom to ask."""
    with pytest.raises(BadRequest, match="policy"):
        read(chat_template="x")


def test_fields_that_cost_nothing_are_ignored() -> None:
    """Unknown fields and those of constrained decoding change nothing, as in the engines."""
    extras = {
        "guided_json": {},
        "structured_outputs": {"regex": "a"},
        "response_format": {"type": "json_object"},
    }
    assert read(**extras, echo=True, whatever=[1], stream_options={"include_usage": True}) == read()


@pytest.mark.parametrize(
    ("asked", "counted", "kept"), [(None, 50, 50), (10, 50, 10), (80, 50, 50), (-1, 50, 40), (0, 50, 0)]
)
def test_a_truncated_prompt_is_counted_as_the_engine_cuts_it(
    asked: int | None, counted: int, kept: int
) -> None:
    """What the engine will not read is not counted; nothing else is ever cut."""
    assert read(truncate_prompt_tokens=asked).kept_tokens((counted,), context_tokens=40) == (kept,)


def test_a_prompt_cut_to_the_window_leaves_room_for_an_answer() -> None:
    """One token of the window is kept free by vLLM where the request limits its answer."""
    cut = read(truncate_prompt_tokens=-1, max_tokens=5)
    assert cut.kept_tokens((50, 39), context_tokens=40) == (39, 39)
