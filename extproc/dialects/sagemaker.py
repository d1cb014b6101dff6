"""`/invocations`, SageMaker's one route for everything: the body's fields tell which API it is.

vLLM, SGLang and TGI all serve it, so a gate that did not know it would have a hole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import openai_chat, openai_completions, openai_embeddings, shared_generate
from extproc.dialects.reading import Dialect, InferenceRequest, merged_usage
from extproc.dialects.refusals import openai_error

BY_FIELD = (
    ("messages", openai_chat.DIALECT),
    ("prompt", openai_completions.DIALECT),
    ("input", openai_embeddings.DIALECT),
)
"""In the order in which vLLM tries them."""


def read(body: Mapping[str, Any], path: str) -> InferenceRequest:
    """Read the request as the first API whose field it has."""
    for name, dialect in BY_FIELD:
        if body.get(name) is not None:
            return dialect.read(body, path)
    return shared_generate.read(body, path)


DIALECT = Dialect(
    name="sagemaker",
    paths=("/invocations",),
    read=read,
    error_body=openai_error,
    usage=merged_usage(openai_chat.OPENAI_USAGE, shared_generate.DIALECT.usage),
    counts="what the API counts whose field the body has: `messages`, `prompt`, `input`, `inputs` or `text`",
    smallest={"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
)
