from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from extproc.dialects.reading import JsonPath, UsageField, UsagePaths, merged_usage
from extproc.dialects.registry import DIALECTS

USAGE = {dialect.name: dialect.usage for dialect in DIALECTS}


def at(value: Any, path: JsonPath) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def number(places: Sequence[JsonPath], events: Iterable[Any]) -> int | None:
    """What Envoy's filters leave behind: the last value that is a number, over all events in order."""
    found = [at(event, path) for event in events for path in places]
    numbers = [value for value in found if type(value) is int]
    return numbers[-1] if numbers else None


def used(usage: UsagePaths, *, body: Any = None, events: Sequence[Any] = ()) -> tuple[int, int]:
    def side(fields: tuple[UsageField, ...]) -> int:
        if body is not None:
            return sum(number(field.body, [body]) or 0 for field in fields)
        return sum(number(field.stream, events) or 0 for field in fields)

    return side(usage.input_fields), side(usage.output_fields)


def openai(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


RESPONSE = {"id": "r", "usage": {"input_tokens": 13, "output_tokens": 8, "total_tokens": 21}}

BODIES: list[tuple[str, Any, tuple[int, int]]] = [
    ("openai_chat", openai(12, 8), (12, 8)),
    ("openai_completions", openai(3, 16), (3, 16)),
    ("openai_responses", RESPONSE, (13, 8)),
    ("openai_embeddings", {"data": [], "usage": {"prompt_tokens": 6, "total_tokens": 6}}, (6, 0)),
    ("anthropic_messages", {"usage": {"input_tokens": 12, "output_tokens": 8}}, (12, 8)),
    (
        "anthropic_messages",
        {
            "usage": {
                "input_tokens": 18,
                "cache_read_input_tokens": 8831,
                "cache_creation_input_tokens": 100,
                "output_tokens": 426,
            }
        },
        (8949, 426),
    ),
    (
        "anthropic_messages",
        {"usage": {"input_tokens": 12, "cache_read_input_tokens": None, "output_tokens": 8}},
        (12, 8),
    ),
    ("generate", {"generated_text": "a", "details": {"generated_tokens": 7, "prefill": []}}, (0, 7)),
    ("generate", {"text": "a", "meta_info": {"prompt_tokens": 5, "completion_tokens": 7}}, (5, 7)),
    ("kserve", {"text_output": "a", "num_input_tokens": 5, "num_output_tokens": 7}, (5, 7)),
    ("llama_cpp", {"content": "a", "tokens_evaluated": 5, "tokens_predicted": 7}, (5, 7)),
    ("sagemaker", openai(12, 8), (12, 8)),
    ("sagemaker", {"meta_info": {"prompt_tokens": 5, "completion_tokens": 7}}, (5, 7)),
    ("vllm_tokens", openai(12, 8), (12, 8)),
]


@pytest.mark.parametrize(("name", "body", "expected"), BODIES)
def test_usage_is_found_in_an_answer(name: str, body: Any, expected: tuple[int, int]) -> None:
    """The paths lead to what each engine reports in a plain answer."""
    assert used(USAGE[name], body=body) == expected


def anthropic(start: dict[str, Any] | None, delta: dict[str, Any]) -> list[Any]:
    return [
        {"type": "message_start", "message": {"role": "assistant"} | ({"usage": start} if start else {})},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": delta},
        {"type": "message_stop"},
    ]


DELTA = {"choices": [{"delta": {"content": "a"}}], "usage": None}

STREAMS: list[tuple[str, list[Any], tuple[int, int]]] = [
    ("openai_chat", [DELTA, DELTA, openai(11, 3)], (11, 3)),
    ("openai_chat", [openai(11, 1), openai(11, 2), openai(11, 3)], (11, 3)),
    ("openai_chat", [DELTA, DELTA], (0, 0)),
    ("openai_completions", [{"choices": [{"text": "a"}]}, openai(3, 2)], (3, 2)),
    (
        "openai_responses",
        [
            {"type": "response.created", "response": {"usage": None}},
            {"type": "response.output_text.delta", "delta": "a"},
            {"type": "response.completed", "response": RESPONSE},
        ],
        (13, 8),
    ),
    (
        "anthropic_messages",
        anthropic(
            {"input_tokens": 9, "cache_read_input_tokens": 1, "output_tokens": 1},
            {"input_tokens": 9, "cache_read_input_tokens": 1, "output_tokens": 16},
        ),
        (10, 16),
    ),
    ("anthropic_messages", anthropic(None, {"input_tokens": 27, "output_tokens": 47}), (27, 47)),
    (
        "anthropic_messages",
        anthropic(
            {"input_tokens": 8834, "output_tokens": 0},
            {"input_tokens": 18, "cache_read_input_tokens": 8831, "output_tokens": 426},
        ),
        (8849, 426),
    ),
    ("anthropic_messages", anthropic({"input_tokens": 9, "output_tokens": 1}, {"output_tokens": 5}), (9, 5)),
    (
        "tgi",
        [
            {"index": 1, "token": {"id": 1}, "details": None},
            {"index": 7, "details": {"generated_tokens": 7, "input_length": 4}},
        ],
        (4, 7),
    ),
    (
        "generate",
        [
            {"meta_info": {"prompt_tokens": 5, "completion_tokens": 1}},
            {"meta_info": {"prompt_tokens": 5, "completion_tokens": 2}},
        ],
        (5, 2),
    ),
    (
        "llama_cpp",
        [
            {"content": "a", "tokens_evaluated": 5, "tokens_predicted": 1},
            {"content": "", "tokens_evaluated": 5, "tokens_predicted": 2},
        ],
        (5, 2),
    ),
]


@pytest.mark.parametrize(("name", "events", "expected"), STREAMS)
def test_usage_is_found_in_a_stream(name: str, events: list[Any], expected: tuple[int, int]) -> None:
    """STR-05: in a stream the last number of each field counts, and is never added to an earlier one."""
    assert used(USAGE[name], events=events) == expected


def test_tgi_reports_in_headers_too() -> None:
    """A plain TGI answer tells its usage in headers even where it has no details."""
    assert (USAGE["tgi"].input_header, USAGE["tgi"].output_header) == (
        "x-prompt-tokens",
        "x-generated-tokens",
    )
    assert USAGE["generate"].input_header == "x-prompt-tokens"


def test_a_place_means_the_same_in_every_dialect() -> None:
    """One set of Envoy rules serves all answers, so no path may be two different fields."""
    meanings: dict[JsonPath, set[tuple[str, int]]] = {}
    for usage in USAGE.values():
        for side, fields in (("input", usage.input_fields), ("output", usage.output_fields)):
            for index, field in enumerate(fields):
                for path in (*field.body, *field.stream):
                    meanings.setdefault(path, set()).add((side, index))
    assert all(len(meaning) == 1 for meaning in meanings.values())


def test_merging_keeps_every_place() -> None:
    """A shared route has the places of each engine, and sides of different length stay apart."""
    one = UsagePaths(
        input_fields=(UsageField(body=(("a",),), stream=()), UsageField(body=(("b",),), stream=(("c",),))),
        output_header="x-out",
    )
    two = UsagePaths(input_fields=(UsageField(body=(("d",),), stream=(("e",),)),), input_header="x-in")
    assert merged_usage(one, two) == UsagePaths(
        input_fields=(
            UsageField(body=(("a",), ("d",)), stream=(("e",),)),
            UsageField(body=(("b",),), stream=(("c",),)),
        ),
        input_header="x-in",
        output_header="x-out",
    )
