"""Text Generation Inference's own API: `/generate_stream`, and the root, which streams if the body says so.

`/generate` is SGLang's as well (see `shared_generate`). The API names no model. Its usage is in `details`,
which a plain answer only has when asked for, and in headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.reading import (
    Dialect,
    InferenceRequest,
    Truncation,
    UsageField,
    UsagePaths,
    decoded_path,
)
from extproc.dialects.refusals import tgi_error
from extproc.domain.prompt import TextPrompt

_PARAMETERS = "parameters."


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a generation request. No `max_new_tokens`, or null, leaves the ceiling to the server's setting."""
    inputs = fields.text(body, "inputs")
    if inputs is None:
        raise fields.required("inputs")
    parameters = fields.mapping(body, "parameters") or {}
    keep_tokens = fields.bounded_integer(parameters, "truncate", at_least=1, prefix=_PARAMETERS)
    best_of = fields.bounded_integer(parameters, "best_of", at_least=1, prefix=_PARAMETERS)
    streams_by_path = decoded_path(path).endswith("/generate_stream")
    return InferenceRequest(
        model=fields.optional_model_name(body),
        prompt=TextPrompt(texts=(inputs,)),
        output_limit_tokens=fields.bounded_integer(
            parameters, "max_new_tokens", at_least=1, prefix=_PARAMETERS
        ),
        choices=best_of or 1,
        stream=streams_by_path or fields.boolean(body, "stream", default=False),
        truncation=None if keep_tokens is None else Truncation(keep_tokens=keep_tokens),
    )


USAGE = UsagePaths(
    input_fields=(UsageField(body=(), stream=(("details", "input_length"),)),),
    output_fields=(
        UsageField(body=(("details", "generated_tokens"),), stream=(("details", "generated_tokens"),)),
    ),
    input_header="x-prompt-tokens",
    output_header="x-generated-tokens",
)

DIALECT = Dialect(
    name="tgi",
    paths=("/generate_stream",),
    exact_paths=("/",),
    read=read,
    error_body=tgi_error,
    usage=USAGE,
    counts="the one text in `inputs`",
    smallest={"inputs": "Hi"},
)
