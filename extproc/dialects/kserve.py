"""Triton's generate extension of the KServe protocol: `/v2/models/{model}/generate` and `generate_stream`.

The model is in the path. `max_tokens` is a field of its own with TensorRT-LLM, and a member of `parameters`
or of the JSON text in `sampling_parameters` with vLLM; wherever it is found, it is the limit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.reading import (
    BadRequest,
    Dialect,
    InferenceRequest,
    UsageField,
    UsagePaths,
    decoded_path,
)
from extproc.dialects.refusals import tgi_error
from extproc.domain.prompt import TextPrompt

_MODELS = "/v2/models/"


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a request. Where no limit is found, the model's default is the limit."""
    path = decoded_path(path)
    text = fields.text(body, "text_input")
    if text is None:
        raise fields.required("text_input")
    if body.get("image") is not None:
        raise BadRequest("`image` is not accepted: it cannot be counted in tokens", param="image")
    limits_tokens: list[int] = []
    choices = 1
    for prefix, holder in _holders(body):
        limit_tokens = fields.bounded_integer(holder, "max_tokens", prefix=prefix)
        if limit_tokens is not None:
            limits_tokens.append(limit_tokens)
        choices = max(choices, fields.choices(holder, prefix=prefix))
        for name in ("beam_width", "num_return_sequences"):
            choices = max(choices, fields.bounded_integer(holder, name, at_least=1, prefix=prefix) or 1)
    return InferenceRequest(
        model=fields.model_name({"model": _model_in(path)}),
        prompt=TextPrompt(texts=(text,)),
        output_limit_tokens=max(limits_tokens) if limits_tokens else None,
        choices=choices,
        stream=path.endswith("/generate_stream") or fields.boolean(body, "stream", default=False),
    )


def _model_in(path: str) -> str:
    return path.rpartition(_MODELS)[2].partition("/")[0]


def _holders(body: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The objects that may hold parameters, each with where it is."""
    holders: list[tuple[str, Mapping[str, Any]]] = [("", body)]
    parameters = fields.mapping(body, "parameters") or {}
    if parameters:
        holders.append(("parameters.", parameters))
    for prefix, holder in tuple(holders):
        name = "sampling_parameters"
        text = fields.text(holder, name, prefix=prefix)
        if text is not None:
            holders.append((f"{prefix}{name}.", _parsed(text, prefix + name)))
    return holders


def _parsed(text: str, param: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise BadRequest(f"`{param}` must be the text of a JSON object", param=param)
    return value


DIALECT = Dialect(
    name="kserve",
    paths=(
        "/v2/models/*/generate",
        "/v2/models/*/generate_stream",
        "/v2/models/*/versions/*/generate",
        "/v2/models/*/versions/*/generate_stream",
    ),
    read=read,
    error_body=tgi_error,
    usage=UsagePaths(
        input_fields=(UsageField(body=(("num_input_tokens",),), stream=()),),
        output_fields=(UsageField(body=(("num_output_tokens",),), stream=()),),
    ),
    counts="the one text in `text_input`",
    smallest={"text_input": "Hi"},
)
