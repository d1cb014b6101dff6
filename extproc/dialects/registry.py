"""Which dialect a request path belongs to. A new dialect is one module and one line in `DIALECTS`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from extproc.dialects import (
    anthropic_messages,
    kserve,
    llama_cpp,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    sagemaker,
    shared_generate,
    tgi,
    vllm_tokens,
)
from extproc.dialects.reading import Dialect, decoded_path

DIALECTS: tuple[Dialect, ...] = (
    openai_chat.DIALECT,
    openai_completions.DIALECT,
    openai_responses.DIALECT,
    openai_embeddings.DIALECT,
    anthropic_messages.DIALECT,
    tgi.DIALECT,
    shared_generate.DIALECT,
    kserve.DIALECT,
    vllm_tokens.DIALECT,
    llama_cpp.DIALECT,
    sagemaker.DIALECT,
)

UNCOUNTED_PATHS: tuple[str, ...] = (
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/classify",
    "/pooling",
    "/v2/embed",
    "/infill",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/generative_scoring",
    "/cohere/v2/chat",
)
"""Routes on which engines do work that no dialect counts. They pass the gate without a reservation, so an
operator who lets them reach an engine at all gives them a pool of their own."""

_Pattern = tuple[str, ...]


def _patterns_by_last_segment() -> Mapping[str, tuple[tuple[_Pattern, Dialect], ...]]:
    index: dict[str, list[tuple[_Pattern, Dialect]]] = {}
    for dialect in DIALECTS:
        for path in dialect.paths:
            pattern = tuple(path.strip("/").split("/"))
            index.setdefault(pattern[-1], []).append((pattern, dialect))
    # The longest pattern first: `/v2/models/*/generate` before `/generate`.
    return {
        last: tuple(sorted(found, key=lambda entry: len(entry[0]), reverse=True))
        for last, found in index.items()
    }


_BY_LAST_SEGMENT = _patterns_by_last_segment()
_BY_EXACT_PATH: Mapping[str, Dialect] = {
    path: dialect for dialect in DIALECTS for path in dialect.exact_paths
}
_MOST_SEGMENTS = max(len(pattern) for found in _BY_LAST_SEGMENT.values() for pattern, _ in found)


# Services see a handful of paths over and over; a client that invents them pays for its own look-ups only.
@lru_cache(maxsize=256)
def dialect_for(path: str) -> Dialect | None:
    """The dialect of `path` (a request's `:path`, query and all), or `None` where it is no inference route.

    Percent escapes are decoded once, as the engines' servers do before they route: a spelling that reaches an
    engine's route must not be a way around the gate. Nothing else is normalised, for nothing else is there.
    """
    path = decoded_path(path)
    exact = _BY_EXACT_PATH.get(path)
    if exact is not None:
        return exact
    segments = path.rsplit("/", _MOST_SEGMENTS)[1:]
    if not segments:
        return None
    for pattern, dialect in _BY_LAST_SEGMENT.get(segments[-1], ()):
        if len(pattern) <= len(segments) and _matches(segments[-len(pattern) :], pattern):
            return dialect
    return None


def _matches(segments: list[str], pattern: _Pattern) -> bool:
    return all(
        segment == expected or (expected == "*" and segment)
        for segment, expected in zip(segments, pattern, strict=True)
    )
