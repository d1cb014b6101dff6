"""The OpenAI text completion API, `/v1/completions`: one or many prompts, as text or as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from extproc.dialects import fields
from extproc.dialects.elsewhere import larger_limit, refuse_hidden_prompts
from extproc.dialects.openai_chat import OPENAI_USAGE
from extproc.dialects.prompts import text_or_token_ids
from extproc.dialects.reading import BadRequest, Dialect, InferenceRequest
from extproc.dialects.refusals import openai_error
from extproc.domain.prompt import TextPrompt

DEFAULT_LIMIT_TOKENS = 16
"""The API's own default, kept by OpenAI, vLLM and SGLang: absent and null mean 16 here, not "no limit"."""

INFILL_MARKERS = 3
"""A prompt with a suffix is rendered between three marker tokens (prefix, suffix, middle)."""


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a completion request. `echo` repeats the prompt in the answer and costs nothing."""
    del path
    refuse_hidden_prompts(body)
    if body.get("prompt") is None:
        raise fields.required("prompt")
    prompt = text_or_token_ids(
        body["prompt"], "prompt", add_special_tokens=fields.boolean(body, "add_special_tokens", default=True)
    )
    markers = 0
    suffix = fields.text(body, "suffix")
    if suffix:
        if not isinstance(prompt, TextPrompt):
            raise BadRequest("`suffix` needs a `prompt` that is text", param="suffix")
        prompt = replace(prompt, texts=tuple(text + suffix for text in prompt.texts))
        markers = INFILL_MARKERS * len(prompt.texts)
    limit_tokens = fields.bounded_integer(body, "max_tokens")
    return InferenceRequest(
        model=fields.model_name(body),
        prompt=prompt,
        output_limit_tokens=larger_limit(
            body, DEFAULT_LIMIT_TOKENS if limit_tokens is None else limit_tokens
        ),
        choices=fields.choices(body),
        stream=fields.boolean(body, "stream", default=False),
        extra_input_tokens=markers,
        truncation=fields.truncation(body),
    )


DIALECT = Dialect(
    name="openai_completions",
    paths=("/v1/completions", "/completions"),
    read=read,
    error_body=openai_error,
    usage=OPENAI_USAGE,
    counts="every prompt of the list, a text or token ids; a suffix and its three markers",
    smallest={"model": "m", "prompt": "Hi"},
)
