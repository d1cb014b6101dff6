"""From a request's bytes to its tokens, by the very steps that the service takes, without a service."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from extproc.adapters.json_body import read_json
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.adapters.tokens.mistral_tokens import PromptTokens
from extproc.cli.tokens_source import SourceRequest
from extproc.dialects.reading import LARGEST_COUNT, BadRequest, Dialect, InferenceRequest
from extproc.dialects.registry import dialect_for
from extproc.domain.media import MediaKind, MediaRule
from extproc.domain.outcome import Reason
from extproc.domain.policy import Limits, Policy
from extproc.domain.prompt import AtLeast, Count, Counted, CountFailed

OFFLINE_LIMITS = Limits(
    body_bytes=1024**3,
    json_depth=64,
    prefill_weight_permille=1000,
    lease_ttl_ms=15_000,
    orphan_grace_ms=600_000,
)
"""Where no policy sets limits: as deep as a policy's default, and as large as a policy may allow."""

ALONE = "model"
"""The name of the one model that is counted for without a policy."""


class NotCounted(Exception):
    """The gateway would refuse this request. The message says why and quotes nothing of it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A request as its dialect reads it, and the policy's name of its model."""

    dialect: Dialect
    request: InferenceRequest
    model: str
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What one request costs. `count_us` is processor time from bytes to count, on the thread that counts."""

    number: int
    dialect: str | None
    model: str | None
    sequences: int = 0
    input_tokens: int | None = None
    output_limit_tokens: int | None = None
    choices: int = 1
    count_us: int = 0
    reason: Reason | None = None
    problem: str | None = None


class Counting:
    """Counts requests for the models of a policy, or for one model."""

    def __init__(
        self, models: Mapping[str, PromptTokens], *, policy: Policy | None, model: str | None
    ) -> None:
        """`model` names the model of requests that name none."""
        self._policy = policy
        self._default = model
        self._limits = OFFLINE_LIMITS if policy is None else policy.limits
        self._models = models
        # Everything is counted in this thread: there is no event loop to keep free.
        self._counter = ExactTokenCounter(models, threads=1, inline_us=1 << 60)

    def close(self) -> None:
        """Count no more."""
        self._counter.close()

    def tokens_of(self, model: str) -> PromptTokens:
        """The counting of the model with this name in the policy."""
        return self._models[model]

    def read(self, source: SourceRequest) -> Read:
        """The request as the gateway reads it. Raises `NotCounted`."""
        dialect = dialect_for(source.path)
        if dialect is None:
            raise NotCounted(
                Reason.INVALID_PARAMETER, "the path is no inference route that is counted; set --path"
            )
        try:
            body = read_json(source.raw, content_encoding=None, content_type=None, limits=self._limits)
            request = dialect.read(body, source.path)
        except BadRequest as bad:
            raise NotCounted(bad.reason, bad.message) from None
        if self._policy is None:
            return Read(
                dialect=dialect,
                request=self._priced(request, {}),
                model=ALONE,
                context_tokens=LARGEST_COUNT,
            )
        only = next(iter(self._policy.models)) if len(self._policy.models) == 1 else None
        found = self._policy.names.get(request.model or self._default or only or "")
        if found is None:
            raise NotCounted(
                Reason.INVALID_PARAMETER,
                "the policy has no model of that name; set --model where none is named",
            )
        return Read(
            dialect=dialect,
            request=self._priced(request, found.media),
            model=found.name,
            context_tokens=found.context_tokens,
        )

    @staticmethod
    def _priced(request: InferenceRequest, rules: Mapping[MediaKind, MediaRule]) -> InferenceRequest:
        try:
            return request.priced(rules)
        except BadRequest as bad:
            raise NotCounted(bad.reason, bad.message) from None

    def counted(self, read: Read) -> tuple[int, ...]:
        """What the tokenizer counts for each sequence of the prompt. Raises `NotCounted`."""
        answers: list[Count] = []
        self._counter.count(
            model=read.model,
            prompt=read.request.prompt,
            limit_tokens=LARGEST_COUNT,
            tenant="offline",
            deliver=answers.append,
        )
        (answer,) = answers
        match answer:
            case Counted(per_sequence_tokens=counted):
                return counted
            case CountFailed(reason=reason, detail=detail):
                raise NotCounted(reason, detail)
            case AtLeast(input_tokens=least):
                raise NotCounted(Reason.CONTEXT_LIMIT, f"the prompt has at least {least} tokens")

    def tally(self, source: SourceRequest) -> tuple[Tally, Read | None]:
        """What the request costs, or why it would be refused; and the request, if it could be read."""
        begun_ns = time.thread_time_ns()
        read = None
        try:
            read = self.read(source)
            counted = read.request.input_tokens(self.counted(read), context_tokens=read.context_tokens)
        except NotCounted as refused:
            return Tally(
                number=source.number,
                dialect=None if read is None else read.dialect.name,
                model=None if read is None else read.model,
                reason=refused.reason,
                problem=refused.message,
            ), read
        return Tally(
            number=source.number,
            dialect=read.dialect.name,
            model=read.model,
            sequences=len(counted),
            input_tokens=sum(counted),
            output_limit_tokens=read.request.output_limit_tokens,
            choices=read.request.choices,
            count_us=(time.thread_time_ns() - begun_ns) // 1_000,
        ), read
