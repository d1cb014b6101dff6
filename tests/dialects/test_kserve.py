from __future__ import annotations

from typing import Any

import pytest

from extproc.dialects.kserve import DIALECT
from extproc.dialects.reading import BadRequest

PATH = "/v2/models/m/generate"


def limit_and_choices(**body: Any) -> tuple[int | None, int]:
    request = DIALECT.read({"text_input": "a", **body}, PATH)
    return request.output_limit_tokens, request.choices


@pytest.mark.parametrize(
    ("path", "model", "stream"),
    [
        (PATH, "m", False),
        ("/v2/models/m/generate_stream", "m", True),
        ("/v2/models/m/versions/3/generate_stream?x=/generate", "m", True),
        ("/team/v2/models/my%20m/generate?a=b", "my m", False),
    ],
)
def test_the_path_names_the_model_and_the_kind(path: str, model: str, stream: bool) -> None:
    """The model is the path's segment after `models`, read as Triton's own router reads it."""
    request = DIALECT.read({"text_input": "a"}, path)
    assert (request.model, request.stream) == (model, stream)


LIMITS: list[tuple[dict[str, Any], tuple[int | None, int]]] = [
    ({}, (None, 1)),
    ({"max_tokens": None, "parameters": None}, (None, 1)),
    ({"max_tokens": 20}, (20, 1)),
    ({"parameters": {"max_tokens": 20, "n": 2}}, (20, 2)),
    ({"sampling_parameters": '{"max_tokens": 20, "best_of": 3}'}, (20, 3)),
    ({"parameters": {"sampling_parameters": '{"max_tokens": 20}'}}, (20, 1)),
    ({"max_tokens": 5, "parameters": {"max_tokens": 20}}, (20, 1)),
    ({"max_tokens": 5, "beam_width": 4, "parameters": {"num_return_sequences": 2}}, (5, 4)),
]


@pytest.mark.parametrize(("body", "expected"), LIMITS, ids=lambda value: repr(value)[:60])
def test_limits_are_found_wherever_back_ends_look(
    body: dict[str, Any], expected: tuple[int | None, int]
) -> None:
    """Back ends look in different places: the largest limit found is reserved."""
    assert limit_and_choices(**body) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_input": None}, "text_input"),
        ({"text_input": ["a"]}, "text_input"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"parameters": 1}, "parameters"),
        ({"parameters": {"max_tokens": True}}, "parameters.max_tokens"),
        ({"sampling_parameters": {}}, "sampling_parameters"),
        ({"sampling_parameters": "{"}, "sampling_parameters"),
        ({"sampling_parameters": "[]"}, "sampling_parameters"),
        ({"sampling_parameters": "[" * 100_000}, "sampling_parameters"),
        ({"sampling_parameters": '{"max_tokens": NaN}'}, "sampling_parameters.max_tokens"),
        ({"image": "AAAA"}, "image"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_other_shapes_are_refused_where_they_stand(body: dict[str, Any], param: str) -> None:
    """A refused member is named with the place where it stands, nested JSON text included."""
    with pytest.raises(BadRequest) as caught:
        limit_and_choices(**body)
    assert caught.value.param == param
