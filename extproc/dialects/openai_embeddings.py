"""The OpenAI embeddings API, `/v1/embeddings`: input only, one sequence per text, or vLLM's one conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields, messages
from extproc.dialects.prompts import text_or_token_ids
from extproc.dialects.reading import BadRequest, Dialect, InferenceRequest, UsageField, UsagePaths
from extproc.dialects.refusals import openai_error
from extproc.dialects.template_variables import template_variables
from extproc.domain.media import MediaPart
from extproc.domain.prompt import ChatPrompt, Prompt


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read an embeddings request. Nothing is generated, so nothing is asked for."""
    del path
    media: list[MediaPart] = []
    prompt = _prompt(body, media)
    return InferenceRequest(
        model=fields.model_name(body),
        prompt=prompt,
        output_limit_tokens=0,
        truncation=fields.truncation(body),
        media=tuple(media),
    )


def _prompt(body: Mapping[str, Any], media: list[MediaPart]) -> Prompt:
    if body.get("messages") is not None:
        return ChatPrompt(
            messages=messages.conversation(body, media),
            add_generation_prompt=fields.boolean(body, "add_generation_prompt", default=False),
            continue_final_message=fields.boolean(body, "continue_final_message", default=False),
            add_special_tokens=fields.boolean(body, "add_special_tokens", default=False),
            template_kwargs=template_variables(body, effort=None),
        )
    if body.get("input") is None:
        raise fields.required("input")
    if body.get("padding") not in (None, "do_not_pad"):
        raise BadRequest(
            "`padding` is not accepted: it makes every input as long as the window", param="padding"
        )
    return text_or_token_ids(
        body["input"], "input", add_special_tokens=fields.boolean(body, "add_special_tokens", default=True)
    )


DIALECT = Dialect(
    name="openai_embeddings",
    paths=("/v1/embeddings", "/embeddings"),
    read=read,
    error_body=openai_error,
    usage=UsagePaths(input_fields=(UsageField(body=(("usage", "prompt_tokens"),), stream=()),)),
    counts="every input of the list, a text or token ids; or one conversation; nothing is generated",
    smallest={"model": "m", "input": "Hi"},
)
