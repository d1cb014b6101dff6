"""How SGLang's own generation request is read: `text` or `input_ids`, and `sampling_params`.

It has no route to itself: `/generate` is TGI's too (see `shared_generate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.prompts import text_or_token_ids
from extproc.dialects.reading import BadRequest, InferenceRequest, UsagePaths
from extproc.dialects.reading import UsageField as Field
from extproc.domain.prompt import TextPrompt

DEFAULT_LIMIT_TOKENS = 128
"""`SamplingParams.max_new_tokens` of SGLang."""

UNCOUNTED = ("session_params", "input_embeds", "image_data", "video_data", "audio_data")
"""Fields whose content no tokenizer can count, or that stand for what the engine holds already."""

USAGE = UsagePaths(
    input_fields=(Field(body=(("meta_info", "prompt_tokens"),), stream=(("meta_info", "prompt_tokens"),)),),
    output_fields=(
        Field(body=(("meta_info", "completion_tokens"),), stream=(("meta_info", "completion_tokens"),)),
    ),
)
"""For a single prompt. A batch is answered with a list, in which Envoy's filters find nothing."""


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a request. In a batch with parameters for each prompt, the largest ones count for all."""
    del path
    for name in UNCOUNTED:
        if body.get(name):
            raise BadRequest(f"`{name}` is not accepted: it cannot be counted here", param=name)
    name = "text" if body.get("text") is not None else "input_ids"
    if body.get(name) is None:
        raise fields.required("text")
    prompt = text_or_token_ids(body[name], name)
    if isinstance(prompt, TextPrompt) != (name == "text"):
        raise BadRequest(f"`{name}` must hold {'text' if name == 'text' else 'token ids'}", param=name)
    sequences = len(prompt.texts if isinstance(prompt, TextPrompt) else prompt.lengths_tokens)
    limits_tokens: list[int] = []
    choices: list[int] = []
    for prefix, parameters in _parameters(body, sequences=sequences):
        limit_tokens = fields.bounded_integer(parameters, "max_new_tokens", prefix=prefix)
        limits_tokens.append(DEFAULT_LIMIT_TOKENS if limit_tokens is None else limit_tokens)
        choices.append(fields.choices(parameters, prefix=prefix))
    return InferenceRequest(
        model=fields.optional_model_name(body),
        prompt=prompt,
        output_limit_tokens=max(limits_tokens),
        choices=max(choices),
        stream=fields.boolean(body, "stream", default=False),
    )


def _parameters(body: Mapping[str, Any], *, sequences: int) -> list[tuple[str, Mapping[str, Any]]]:
    name = "sampling_params"
    if not isinstance(body.get(name), list):
        return [(f"{name}.", fields.mapping(body, name) or {})]
    listed = fields.mappings(body, name) or []
    if len(listed) != sequences:
        raise BadRequest(f"`{name}` must be one object, or one for each prompt", param=name)
    return [(f"{name}[{index}].", parameters) for index, parameters in enumerate(listed)]
