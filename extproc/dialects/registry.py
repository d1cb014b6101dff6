"""Which dialect a request path belongs to. A new dialect is one module and one line in `DIALECTS`."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from extproc.dialects import openai_chat, openai_completions, tgi
from extproc.dialects.reading import Dialect

DIALECTS: tuple[Dialect, ...] = (
    openai_chat.DIALECT,
    openai_completions.DIALECT,
    tgi.DIALECT,
)

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


def decoded_path(path: str) -> str:
    """`path` without its query, percent escapes decoded."""
    path = path.partition("?")[0]
    return unquote(path) if "%" in path else path


def _matches(segments: list[str], pattern: _Pattern) -> bool:
    return all(
        segment == expected or (expected == "*" and segment)
        for segment, expected in zip(segments, pattern, strict=True)
    )
