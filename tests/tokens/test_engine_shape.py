"""Messages in the shape in which vLLM hands them to a template."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.adapters.tokens.engine_shape import ContentFormat, as_engine_sees
from extproc.adapters.tokens.errors import Uncountable
from extproc.dialects.anthropic_messages import ATTRIBUTION
from extproc.domain.outcome import Reason

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": None}, {"type": "text", "text": ""}, "two"]


def shaped(
    message: dict[str, Any], content_format: ContentFormat = "string", *, knows_developer: bool = True
) -> Any:
    """One message, shaped."""
    (result,) = as_engine_sees([message], content_format, knows_developer=knows_developer)
    return result


@pytest.mark.parametrize(
    ("content", "as_string", "as_parts"),
    [
        ("one", "one", [{"type": "text", "text": "one"}]),
        ("", "", [{"type": "text", "text": ""}]),
        (None, "", []),
        ([], "", []),
        (PARTS, "one\ntwo", [{"type": "text", "text": text} for text in ("one", "", "two")]),
    ],
)
def test_content_is_what_the_template_expects(
    content: object, as_string: str, as_parts: list[object]
) -> None:
    """Text of parts that have some is joined by line ends for templates that want text, others get all parts."""
    message = {"role": "user", "content": content}
    assert shaped(message)["content"] == as_string
    assert shaped(message, "openai")["content"] == as_parts


def test_media_show_their_type_to_templates_that_read_parts() -> None:
    """What is not text is there for templates that loop over parts, and not there for those that want text."""
    message = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "one"}, {"type": "audio"}],
    }
    assert shaped(message)["content"] == "one"
    assert shaped(message, "openai")["content"] == message["content"]
    assert shaped({**message, "role": "tool"}, "openai")["content"] == "one"


def test_a_tools_answer_is_text_for_every_template() -> None:
    """Clients send a tool's answer in parts, templates only ever expect text there."""
    message = {"role": "tool", "content": PARTS, "tool_call_id": "c1"}
    assert shaped(message, "openai") == {"role": "tool", "content": "one\n\ntwo", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("arguments", "decoded"),
    [
        ('{"river": "Rhine", "n": 1.50}', {"river": "Rhine", "n": 1.5}),
        ({"river": "Rhine"}, {"river": "Rhine"}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ("12", {}),
        ('{"cut', {}),
        (7, {}),
    ],
)
def test_the_arguments_of_a_call_are_an_object(arguments: object, decoded: object) -> None:
    """JSON text is decoded; what is no object becomes an empty one, so that a broken turn does not end a chat."""
    call = {"id": "c1", "type": "function", "function": {"name": "depth", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert shaped(message)["tool_calls"][0]["function"] == {"name": "depth", "arguments": decoded}
    assert call["function"]["arguments"] == arguments  # type: ignore[index]


def test_no_calls_and_null_fields_are_as_if_absent() -> None:
    """An empty list of calls and every null field is left out."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [],
        "name": None,
        "reasoning": "r",
    }
    assert shaped(message) == {"role": "assistant", "content": "a", "reasoning": "r"}


def test_developers_are_system_for_templates_that_do_not_know_them() -> None:
    """All system messages become one in front, but only if a developer message had to be renamed."""
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d", "tools": [1]},
        {"role": "system", "content": ""},
    ]
    assert as_engine_sees(messages, "string", knows_developer=False) == [
        {"role": "system", "content": "s\n\nd"},
        {"role": "user", "content": "u"},
    ]
    assert as_engine_sees(messages, "openai", knows_developer=False)[0]["content"] == "s\n\nd"
    assert [m["role"] for m in as_engine_sees(messages, "string", knows_developer=True)] == [
        "system",
        "user",
        "developer",
        "system",
    ]
    first = [{"role": "developer", "content": "d", "tools": [1]}, {"role": "user", "content": "u"}]
    assert as_engine_sees(first, "string", knows_developer=False)[0] == {"role": "system", "content": "d"}


ATTRIBUTED: list[tuple[Any, str]] = [
    (f"{ATTRIBUTION}: x\nBe\nbrief.", "Be\nbrief."),
    (ATTRIBUTION, ""),
    ([{"type": "text", "text": f"{ATTRIBUTION}: x\n"}, {"type": "text", "text": "Be brief."}], "Be brief."),
    (f" {ATTRIBUTION}: x\nb", f" {ATTRIBUTION}: x\nb"),
]


@pytest.mark.parametrize(("content", "left"), ATTRIBUTED, ids=lambda value: repr(value)[:50])
def test_an_agents_attribution_is_left_out_of_system_text(content: Any, left: str) -> None:
    """Its line only, at the start only, of system messages only, and only for engines that do so."""
    system, user = {"role": "system", "content": content}, {"role": "user", "content": content}
    made = as_engine_sees([system, user], "string", knows_developer=True, drops_attribution=True)
    whole = as_engine_sees([system, user], "string", knows_developer=True)
    assert made[0]["content"] == left
    assert made[1] == whole[1]
    assert whole[0]["content"] == whole[1]["content"]


@pytest.mark.parametrize(
    ("message", "reason", "where"),
    [
        ("SECRET", Reason.MALFORMED_REQUEST, "messages[0]"),
        ({"content": "SECRET"}, Reason.MALFORMED_REQUEST, "messages[0]"),
        ({"role": "user", "content": 7}, Reason.MALFORMED_REQUEST, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "SECRET"}}]},
            Reason.INVALID_PARAMETER,
            "messages[0].content[0]",
        ),
        (
            {"role": "assistant", "tool_calls": ["SECRET"]},
            Reason.MALFORMED_REQUEST,
            "messages[0].tool_calls[0]",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a":' * 50_000}}]},
            Reason.MALFORMED_REQUEST,
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_no_engine_accepts_is_refused_by_its_place(message: object, reason: Reason, where: str) -> None:
    """The refusal names the place and never the content."""
    with pytest.raises(Uncountable) as refused:
        as_engine_sees([message], "string", knows_developer=True)
    assert refused.value.reason is reason
    assert refused.value.detail.startswith(where)
    assert "SECRET" not in refused.value.detail
