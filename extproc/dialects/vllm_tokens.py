"""vLLM's tokens-in, tokens-out API, `/inference/v1/generate`: the prompt is `token_ids`, already complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.openai_chat import OPENAI_USAGE
from extproc.dialects.prompts import text_or_token_ids
from extproc.dialects.reading import BadRequest, Dialect, InferenceRequest
from extproc.dialects.refusals import openai_error
from extproc.domain.prompt import TokenIdPrompt

DEFAULT_LIMIT_TOKENS = 16
"""`SamplingParams.max_tokens` of vLLM, which this API takes as it is."""

_PARAMETERS = "sampling_params"


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a request for one prompt."""
    del path
    if body.get("content_parts"):
        raise BadRequest(
            "`content_parts` is not accepted: it cannot be counted in tokens", param="content_parts"
        )
    if body.get("token_ids") is None:
        raise fields.required("token_ids")
    prompt = text_or_token_ids(body["token_ids"], "token_ids")
    if not isinstance(prompt, TokenIdPrompt) or len(prompt.lengths_tokens) != 1:
        raise BadRequest("`token_ids` must be one list of token ids", param="token_ids")
    parameters = fields.mapping(body, _PARAMETERS) or {}
    prefix = f"{_PARAMETERS}."
    limit_tokens = fields.bounded_integer(parameters, "max_tokens", prefix=prefix)
    return InferenceRequest(
        model=fields.optional_model_name(body),
        prompt=prompt,
        output_limit_tokens=DEFAULT_LIMIT_TOKENS if limit_tokens is None else limit_tokens,
        choices=fields.choices(parameters, prefix=prefix),
        stream=fields.boolean(body, "stream", default=False),
    )


DIALECT = Dialect(
    name="vllm_tokens",
    paths=("/inference/v1/generate",),
    read=read,
    error_body=openai_error,
    usage=OPENAI_USAGE,
    counts="the length of `token_ids`",
    smallest={"token_ids": [1, 2]},
)
