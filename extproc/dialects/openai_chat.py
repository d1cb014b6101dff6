"""The OpenAI chat API, `/v1/chat/completions`, as vLLM, SGLang, TGI and llama.cpp serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields, messages
from extproc.dialects.elsewhere import larger_limit, refuse_hidden_prompts
from extproc.dialects.reading import BadRequest, Dialect, InferenceRequest, UsageField, UsagePaths
from extproc.dialects.refusals import openai_error
from extproc.dialects.template_variables import template_variables
from extproc.domain.media import MediaPart
from extproc.domain.prompt import ChatPrompt

OPENAI_USAGE = UsagePaths(
    input_fields=(UsageField(body=(("usage", "prompt_tokens"),), stream=(("usage", "prompt_tokens"),)),),
    output_fields=(
        UsageField(body=(("usage", "completion_tokens"),), stream=(("usage", "completion_tokens"),)),
    ),
)
"""A stream has it in its last event before `[DONE]`, and only if the client or the engine's configuration
asks for it (`stream_options.include_usage`)."""


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read a chat request. `max_completion_tokens` wins over the older `max_tokens`."""
    del path
    refuse_hidden_prompts(body)
    limit_tokens = fields.bounded_integer(body, "max_tokens")
    newer_limit_tokens = fields.bounded_integer(body, "max_completion_tokens")
    media: list[MediaPart] = []
    prompt = chat_prompt(body, media)
    return InferenceRequest(
        model=fields.model_name(body),
        prompt=prompt,
        output_limit_tokens=larger_limit(
            body, limit_tokens if newer_limit_tokens is None else newer_limit_tokens
        ),
        choices=fields.choices(body),
        stream=fields.boolean(body, "stream", default=False),
        truncation=fields.truncation(body),
        media=tuple(media),
    )


def chat_prompt(body: Mapping[str, Any], media: list[MediaPart]) -> ChatPrompt:
    """What the template will see, vLLM's own fields included. What is not text is added to `media`."""
    continue_final = fields.boolean(body, "continue_final_message", default=False)
    add_generation = fields.boolean(body, "add_generation_prompt", default=True)
    if continue_final and add_generation:
        raise BadRequest(
            "`continue_final_message` needs `add_generation_prompt` to be false",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=messages.conversation(body, media),
        tools=messages.tools(body),
        documents=fields.mappings(body, "documents", may_be_empty=True),
        add_generation_prompt=add_generation,
        continue_final_message=continue_final,
        add_special_tokens=fields.boolean(body, "add_special_tokens", default=False),
        template_kwargs=template_variables(body, effort=fields.text(body, "reasoning_effort")),
    )


DIALECT = Dialect(
    name="openai_chat",
    paths=("/v1/chat/completions", "/chat/completions"),
    read=read,
    error_body=openai_error,
    usage=OPENAI_USAGE,
    counts="messages, tools and functions in the chat template, with reasoning, calls and results; media by rule",
    smallest={"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
)
