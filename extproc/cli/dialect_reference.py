"""The table of dialects, written from the registry: which APIs are counted, and how each is read and answered."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.dialects.reading import BadRequest, Dialect, InferenceRequest, JsonPath, UsageField
from extproc.dialects.registry import DIALECTS, UNCOUNTED_PATHS
from extproc.domain.contract import Refusal
from extproc.domain.outcome import Reason

_INTRODUCTION = """\
<!-- Written by `extproc schema --dialects`; change the dialects, not this file. -->
# Dialects

An API is known by its path: exactly, or behind a prefix (`/team/v1/completions`); `*` stands for one segment. What
a request's body does not say comes from the policy's model: `window` below is its `default_output_tokens`, or what
its context window leaves. Fields that make an engine read another prompt (`prompt_token_ids` beside messages,
sessions, embeddings instead of text, a chat template in the request) are refused, as are types of content that no
rule counts.

Counts are held to real engines by tests: llama.cpp in every run, vLLM in a slow lane. What is said here of TGI,
SGLang and Triton follows their sources and is not tried.
"""

_UNCOUNTED = """\
## Not counted

Engines work on these routes too, and no dialect counts them. They pass without a reservation: an operator who lets
them reach an engine gives them a pool of their own.

"""


def as_markdown() -> str:
    """The tables, as a page."""
    parts = [
        _INTRODUCTION,
        "## What is counted\n",
        *_requests(),
        "",
        "## What is answered\n",
        *_answers(),
        "",
    ]
    return "\n".join(parts) + "\n" + _UNCOUNTED + "".join(f"- `{path}`\n" for path in UNCOUNTED_PATHS)


def _requests() -> Iterator[str]:
    yield "| dialect | routes | counted as input | output ceiling if none is sent | model | streams |"
    yield "|---|---|---|---|---|---|"
    for dialect in DIALECTS:
        request = _read(dialect)
        routes = " ".join(f"`{path}`" for path in (*dialect.paths, *dialect.exact_paths))
        yield (
            f"| {dialect.name} | {routes} | {dialect.counts} | {_ceiling(dialect, request)} | "
            f"{_model(dialect)} | {_streams(dialect)} |"
        )


def _answers() -> Iterator[str]:
    yield "| dialect | input tokens: in an answer | in a stream | output tokens: in an answer | in a stream | error |"
    yield "|---|---|---|---|---|---|"
    for dialect in DIALECTS:
        usage = dialect.usage
        cells = (
            _places(usage.input_fields, usage.input_header, stream=False),
            _places(usage.input_fields, None, stream=True),
            _places(usage.output_fields, usage.output_header, stream=False),
            _places(usage.output_fields, None, stream=True),
        )
        yield f"| {dialect.name} | {' | '.join(cells)} | {_error(dialect)} |"


def _read(dialect: Dialect, **changes: object) -> InferenceRequest:
    return dialect.read({**dialect.smallest, **changes}, _path(dialect))


def _path(dialect: Dialect) -> str:
    return (*dialect.paths, *dialect.exact_paths)[0].replace("*", "m")


def _ceiling(dialect: Dialect, request: InferenceRequest) -> str:
    without = {key: value for key, value in dialect.smallest.items() if not key.startswith("max_")}
    if without != dialect.smallest:
        try:
            request = dialect.read(without, _path(dialect))
        except BadRequest:
            return "the request must have one"
    return "window" if request.output_limit_tokens is None else f"{request.output_limit_tokens}"


def _model(dialect: Dialect) -> str:
    if "m" in _path(dialect).split("/"):
        return "in the path"
    without = {key: value for key, value in dialect.smallest.items() if key != "model"}
    try:
        dialect.read(without, _path(dialect))
    except BadRequest:
        return "required"
    return "optional"


def _streams(dialect: Dialect) -> str:
    if _read(dialect).stream:
        return "always" if not dialect.exact_paths else "by route, or `stream`"
    by_route = any(path.endswith("_stream") for path in dialect.paths)
    if not _read(dialect, stream=True).stream:
        return "never"
    return "by route, or `stream`" if by_route else "`stream`"


def _places(fields: tuple[UsageField, ...], header: str | None, *, stream: bool) -> str:
    """The sum of the fields, each with its places; a header comes last."""
    sums = []
    for field in fields:
        places: tuple[JsonPath, ...] = field.stream if stream else field.body
        if places:
            sums.append(" or ".join(f"`{'.'.join(path)}`" for path in places))
    text = " + ".join(sums)
    if header is not None:
        text = f"{text} or header `{header}`" if text else f"header `{header}`"
    return text or "not told"


def _error(dialect: Dialect) -> str:
    body = dialect.error_body(Refusal(reason=Reason.CONTEXT_LIMIT, message="m"), "r")
    error = body["error"]
    if isinstance(error, dict):
        return f"`{{{', '.join(body)}}}`, `error: {{{', '.join(list(error)[:4])}, …}}`"
    return f"`{{{', '.join(list(body)[:3])}, …}}`"
