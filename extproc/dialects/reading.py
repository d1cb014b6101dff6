"""What every dialect produces and refuses: the vocabulary that the dialect modules share.

A dialect is one module with one `DIALECT` value. It reads a parsed JSON body into an `InferenceRequest`, or
raises `BadRequest`, and it words a refusal the way its clients expect. It never sees bytes, headers or I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from urllib.parse import unquote

from extproc.domain.contract import Refusal
from extproc.domain.frozen import frozen
from extproc.domain.media import MediaKind, MediaPart, MediaRule, media_tokens
from extproc.domain.outcome import Reason
from extproc.domain.prompt import Prompt

LARGEST_COUNT = 10_000_000
"""No engine serves a limit or a number of choices above this; larger numbers are mistakes or attacks."""


_PLURALS: Mapping[MediaKind, str] = {
    MediaKind.IMAGE: "images",
    MediaKind.AUDIO: "recordings",
    MediaKind.VIDEO: "videos",
    MediaKind.FILE: "files",
}


@frozen
class Truncation:
    """The client asks the engine to cut each prompt to `keep_tokens`; `None` means its window."""

    keep_tokens: int | None

    def kept_tokens(self, counted_tokens: int, *, window_tokens: int) -> int:
        """How much of a prompt of `counted_tokens` the engine reads, if it may read `window_tokens` at most."""
        keep_tokens = window_tokens if self.keep_tokens is None else self.keep_tokens
        return min(counted_tokens, keep_tokens)


@frozen
class InferenceRequest:
    """One request as a dialect reads it.

    `model` is `None` where the API names none: whoever routes the request knows. `output_limit_tokens` is the
    client's own ceiling per answer, or the dialect's fixed default; `None` leaves it to the model's default.
    `choices` is how many answers each prompt gets (`n`, `best_of`). `extra_input_tokens` is input that is
    counted by rule and not by the tokenizer; `media` are the images and the like that a rule has yet to count
    (`priced`). `truncation` is what the client asked the engine to cut: nobody else ever cuts a prompt.
    """

    model: str | None
    prompt: Prompt
    output_limit_tokens: int | None
    choices: int = 1
    stream: bool = False
    extra_input_tokens: int = 0
    truncation: Truncation | None = None
    media: tuple[MediaPart, ...] = ()

    def priced(self, rules: Mapping[MediaKind, MediaRule]) -> InferenceRequest:
        """The same request with its media counted by a model's `rules`.

        Raises `BadRequest` for the first medium that there is no rule for.
        """
        if not self.media:
            return self
        tokens = media_tokens(rules, self.media)
        if isinstance(tokens, MediaPart):
            raise BadRequest(
                f"`{tokens.param}` is not accepted: the policy of this gateway does not say how many tokens "
                f"{_PLURALS[tokens.kind]} cost this model",
                param=tokens.param,
            )
        return replace(self, extra_input_tokens=self.extra_input_tokens + tokens, media=())

    def kept_tokens(self, counted: tuple[int, ...], *, context_tokens: int) -> tuple[int, ...]:
        """What is left of sequences of so many tokens after the truncation that the client asks for, if any."""
        if self.truncation is None:
            return counted
        # vLLM keeps one token of the window free for an answer whose length the request limits.
        window_tokens = context_tokens - 1 if self.output_limit_tokens else context_tokens
        return tuple(self.truncation.kept_tokens(tokens, window_tokens=window_tokens) for tokens in counted)

    def input_tokens(self, counted: tuple[int, ...], *, context_tokens: int) -> tuple[int, ...]:
        """Input tokens per sequence as the engine will have them, from what a tokenizer counted for the prompt."""
        counted = self.kept_tokens(counted, context_tokens=context_tokens)
        if self.extra_input_tokens:
            first, *rest = counted
            counted = (first + self.extra_input_tokens, *rest)
        return counted


class BadRequest(Exception):
    """The body is not a request of this dialect. `message` never quotes the body's values.

    `param` names the field; `reason` is malformed_request for a wrong shape, invalid_parameter for a value.
    """

    def __init__(
        self, message: str, *, param: str | None = None, reason: Reason = Reason.INVALID_PARAMETER
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason


def decoded_path(path: str) -> str:
    """A request's `:path` without its query, percent escapes decoded once, as servers do before they route."""
    path = path.partition("?")[0]
    return unquote(path) if "%" in path else path


JsonPath = tuple[str, ...]
"""The keys that lead to a value, outermost first: what Envoy's metadata filters take as a selector."""


@frozen
class UsageField:
    """One number of an answer's usage, and every place where it may stand.

    `body` is for a plain JSON answer, `stream` for the events of a stream. Where several places hold a
    number, or one place holds it in several events, the last one that is not null counts: never a sum.
    """

    body: tuple[JsonPath, ...]
    stream: tuple[JsonPath, ...]


@frozen
class UsagePaths:
    """Where an answer reports what it used: the tokens of a side are the sum of that side's fields.

    An empty side means that the engine does not say in the body. The headers are for engines that report
    there; `None` for those that do not.
    """

    input_fields: tuple[UsageField, ...] = ()
    output_fields: tuple[UsageField, ...] = ()
    input_header: str | None = None
    output_header: str | None = None


def merged_usage(*usages: UsagePaths) -> UsagePaths:
    """For a route that several engines have: every place of each, field by field."""
    headers_in = [usage.input_header for usage in usages if usage.input_header is not None]
    headers_out = [usage.output_header for usage in usages if usage.output_header is not None]
    return UsagePaths(
        input_fields=_merged_fields([usage.input_fields for usage in usages]),
        output_fields=_merged_fields([usage.output_fields for usage in usages]),
        input_header=headers_in[0] if headers_in else None,
        output_header=headers_out[0] if headers_out else None,
    )


def _merged_fields(sides: list[tuple[UsageField, ...]]) -> tuple[UsageField, ...]:
    columns = [[field for field in column if field is not None] for column in zip_longest(*sides)]
    return tuple(
        UsageField(
            body=tuple(path for field in column for path in field.body),
            stream=tuple(path for field in column for path in field.stream),
        )
        for column in columns
    )


@frozen
class Dialect:
    """One inference API: its routes, how a body is read, where usage is found, how a refusal is worded.

    `paths` match a request's path without its query, exactly or after a prefix (`/team/v1/completions`); a
    segment `*` stands for any one segment. `exact_paths` match as they are. `read(body, path)` gets the `:path`
    as it arrived, because some APIs name the model or the kind of answer there. `error_body(refusal,
    request_id)` is a JSON value in the shape that the API's clients parse. `counts` says for the documentation
    what is counted as input, and `smallest` is the body of a smallest request, from which the rest is shown.
    """

    name: str
    paths: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], InferenceRequest]
    error_body: Callable[[Refusal, str], dict[str, Any]]
    usage: UsagePaths
    counts: str
    smallest: Mapping[str, Any]
    exact_paths: tuple[str, ...] = ()
