"""What every dialect produces and refuses: the vocabulary that the dialect modules share.

A dialect is one module with one `DIALECT` value. It reads a parsed JSON body into an `InferenceRequest`, or
raises `BadRequest`, and it words a refusal the way its clients expect. It never sees bytes, headers or I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from extproc.domain.contract import Refusal
from extproc.domain.outcome import Reason
from extproc.domain.prompt import Prompt

LARGEST_COUNT = 10_000_000
"""No engine serves a limit or a number of choices above this; larger numbers are mistakes or attacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """One request as a dialect reads it.

    `output_limit_tokens` is the client's own ceiling per answer, or the dialect's fixed default; `None`
    leaves it to the model's default. `choices` is how many answers each prompt gets (`n`, `best_of`).
    `extra_input_tokens` is input that is counted by rule and not by the tokenizer, such as images.
    """

    model: str
    prompt: Prompt
    output_limit_tokens: int | None
    choices: int = 1
    stream: bool = False
    extra_input_tokens: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One inference API: its routes, how a body is read, and how a refusal is worded.

    `paths` match a request's path without its query, exactly or after a prefix (`/team/v1/completions`).
    `error_body(refusal, request_id)` is a JSON value in the shape that the API's clients parse.
    """

    name: str
    paths: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], InferenceRequest]
    error_body: Callable[[Refusal, str], dict[str, Any]]
