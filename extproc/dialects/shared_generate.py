"""`/generate`, a route that TGI and SGLang both have: the prompt's field tells whose request it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import sglang, tgi
from extproc.dialects.reading import Dialect, InferenceRequest, merged_usage
from extproc.dialects.refusals import tgi_error


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read `inputs` as TGI does, `text` and `input_ids` as SGLang does. Neither engine knows the other's."""
    is_sglang = body.get("text") is not None or body.get("input_ids") is not None
    if is_sglang and body.get("inputs") is None:
        return sglang.read(body, path)
    return tgi.read(body, path)


DIALECT = Dialect(
    name="generate",
    paths=("/generate",),
    read=read,
    error_body=tgi_error,
    usage=merged_usage(tgi.USAGE, sglang.USAGE),
    counts="TGI's `inputs`; or SGLang's `text` or `input_ids`, all of a batch (128 output tokens by default then)",
    smallest={"inputs": "Hi"},
)
