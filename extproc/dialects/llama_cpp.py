"""The llama.cpp server's own completion API, `/completion`: a prompt of text, of token ids, or of both mixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.elsewhere import NO_LIMIT
from extproc.dialects.prompts import text_or_token_ids
from extproc.dialects.reading import (
    BadRequest,
    Dialect,
    InferenceRequest,
    UsageField,
    UsagePaths,
)
from extproc.dialects.refusals import openai_error
from extproc.domain.prompt import Prompt


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a request. The server takes `max_tokens` for another name of `n_predict`."""
    del path
    if body.get("prompt") is None:
        raise fields.required("prompt")
    return InferenceRequest(
        model=fields.optional_model_name(body),
        prompt=_prompt(body["prompt"]),
        output_limit_tokens=_limit_tokens(body),
        choices=max(
            fields.bounded_integer(body, "n", at_least=1) or 1,
            fields.bounded_integer(body, "n_cmpl", at_least=1) or 1,
        ),
        stream=fields.boolean(body, "stream", default=False),
    )


def _limit_tokens(body: Mapping[str, Any]) -> int | None:
    name = "n_predict" if body.get("n_predict") is not None else "max_tokens"
    if type(body.get(name)) is int and body[name] == NO_LIMIT:
        return None
    return fields.bounded_integer(body, name)


def _prompt(value: object) -> Prompt:
    """A list that mixes texts and ids is one sequence to the server; it cannot be counted piece by piece."""
    if isinstance(value, list) and value and not all(isinstance(item, type(value[0])) for item in value):
        raise BadRequest("`prompt` must be all text or all token ids", param="prompt")
    return text_or_token_ids(value, "prompt")


DIALECT = Dialect(
    name="llama_cpp",
    paths=("/completion",),
    read=read,
    error_body=openai_error,
    usage=UsagePaths(
        input_fields=(UsageField(body=(("tokens_evaluated",),), stream=(("tokens_evaluated",),)),),
        output_fields=(UsageField(body=(("tokens_predicted",),), stream=(("tokens_predicted",),)),),
    ),
    counts="every prompt of the list, a text or token ids",
    smallest={"prompt": "Hi"},
)
