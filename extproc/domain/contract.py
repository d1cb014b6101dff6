"""The client contract: for each reason one status, and whether asking again can help.

This table is the law. Statuses that official SDKs retry at once whatever the answer says (408, 409, 504)
are never used, a request that can never fit is 413, and only rows marked LATER carry a Retry-After.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from extproc.domain.outcome import Reason


class Retry(Enum):
    """Whether the same request may succeed at another time."""

    NEVER = auto()
    LATER = auto()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the contract: HTTP status, retry, and the error type each API family uses for it."""

    status: int
    retry: Retry
    openai_type: str
    anthropic_type: str
    tgi_type: str


_WHO = ("authentication_error", "authentication_error", "validation")
_INVALID = ("invalid_request_error", "invalid_request_error", "validation")
_TOO_LARGE = ("invalid_request_error", "request_too_large", "validation")
_BUSY = ("rate_limit_error", "rate_limit_error", "overloaded")
_DOWN = ("service_unavailable_error", "overloaded_error", "overloaded")

CONTRACT: Mapping[Reason, Row] = {
    Reason.MALFORMED_REQUEST: Row(400, Retry.NEVER, *_INVALID),
    Reason.INVALID_PARAMETER: Row(400, Retry.NEVER, *_INVALID),
    Reason.TENANT_UNKNOWN: Row(
        401, Retry.NEVER, "authentication_error", "authentication_error", "validation"
    ),
    Reason.TENANT_DISABLED: Row(403, Retry.NEVER, "permission_error", "permission_error", "validation"),
    Reason.BODY_TOO_LARGE: Row(413, Retry.NEVER, *_TOO_LARGE),
    Reason.CONTEXT_LIMIT: Row(413, Retry.NEVER, *_TOO_LARGE),
    Reason.LANE_LIMIT: Row(413, Retry.NEVER, *_TOO_LARGE),
    Reason.EXCEEDS_QUOTA: Row(413, Retry.NEVER, *_TOO_LARGE),
    Reason.EXCEEDS_CAPACITY: Row(413, Retry.NEVER, *_TOO_LARGE),
    Reason.UNSUPPORTED_ENCODING: Row(415, Retry.NEVER, *_INVALID),
    Reason.TENANT_RATE: Row(429, Retry.LATER, *_BUSY),
    Reason.TENANT_INFLIGHT: Row(429, Retry.LATER, *_BUSY),
    Reason.TOKEN_BUDGET_EXHAUSTED: Row(429, Retry.LATER, *_BUSY),
    Reason.QUEUE_FULL: Row(429, Retry.LATER, *_BUSY),
    Reason.RESIDENCE_EXPIRED: Row(429, Retry.LATER, *_BUSY),
    Reason.DEADLINE_INFEASIBLE: Row(429, Retry.LATER, *_BUSY),
    Reason.LANE_SUSPENDED: Row(429, Retry.LATER, *_BUSY),
    Reason.RETRY_PENALTY: Row(429, Retry.LATER, *_BUSY),
    Reason.NO_CAPACITY: Row(503, Retry.LATER, *_DOWN),
    Reason.BREAKER_OPEN: Row(503, Retry.LATER, *_DOWN),
    Reason.LEDGER_UNAVAILABLE: Row(503, Retry.LATER, *_DOWN),
    Reason.TOKENIZER_OVERLOADED: Row(503, Retry.LATER, *_DOWN),
    Reason.DRAINING: Row(503, Retry.LATER, *_DOWN),
    Reason.INTERNAL_ERROR: Row(503, Retry.LATER, "api_error", "api_error", "overloaded"),
}

REDIRECT_STATUS = 307
"""The one answer beside the table: the client repeats the same request, method and body, at another gateway."""

LONGEST_OBEYED_WAIT_MS = 60_000
"""Some SDKs ignore a longer Retry-After and retry within half a second, others sleep for whatever is asked:
beyond this the answer keeps the true value and tells clients not to retry by themselves."""

SHORTEST_WAIT_MS = 250
"""A wait below this is a hot retry in disguise."""

JITTER_PERMILLE = 250
"""Refused together must not mean returning together: up to a quarter of the wait is added per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitView:
    """What the tenant may still use, told on every refusal that was decided for a known tenant."""

    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_ms: int | None = None
    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused, with everything a caller can act on and nothing it typed.

    `maximums` are the accepted maximums that matter for the reason, by name. `retry_after_ms` is `None`
    exactly when the contract says never; `retry_helps` is false where the row would allow a retry but the
    same request would fail the same way. `waited_ms` is how long the request waited in vain, and
    `ahead_requests` how many others would have gone first, where there was a line.
    """

    reason: Reason
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    retry_helps: bool = True
    input_tokens: int | None = None
    output_tokens: int | None = None
    maximums: Mapping[str, int] | None = None
    waited_ms: int | None = None
    ahead_requests: int | None = None
    rate_limit: RateLimitView | None = None

    @property
    def row(self) -> Row:
        """This refusal's line of the contract."""
        return CONTRACT[self.reason]


def jittered_wait_ms(estimate_ms: int, *, spread: int) -> int:
    """A wait to tell one caller: the estimate, never shorter, plus up to a quarter of it.

    `spread` is any integer that differs between requests, such as a hash of the request id.
    Monotone in the estimate for a given spread.
    """
    wait_ms = max(estimate_ms, SHORTEST_WAIT_MS)
    return wait_ms + wait_ms * (spread % (JITTER_PERMILLE + 1)) // 1000


def refusal_headers(
    refusal: Refusal, *, lane: str | None, policy_version: str, request_id: str
) -> list[tuple[str, str]]:
    """Headers of a refusal, in order.

    `retry-after` is whole seconds, rounded up, at least 1; `retry-after-ms` is the same wait for the SDKs
    that prefer it. `x-should-retry: false` stops SDKs where asking again cannot help, or not soon.
    """
    headers = [("x-admission-reason", str(refusal.reason))]
    if lane is not None:
        headers.append(("x-admission-lane", lane))
    headers.append(("x-admission-policy", policy_version))
    headers.append(("x-request-id", request_id))
    headers.append(("request-id", request_id))  # where Anthropic's SDKs look for it
    wait_ms = refusal.retry_after_ms
    if wait_ms is not None:
        headers.append(("retry-after", str(max(1, -(-wait_ms // 1000)))))
        headers.append(("retry-after-ms", str(max(1, wait_ms))))
    if wait_ms is None or wait_ms > LONGEST_OBEYED_WAIT_MS or not refusal.retry_helps:
        headers.append(("x-should-retry", "false"))
    if refusal.rate_limit is not None:
        headers.extend(rate_limit_headers(refusal.rate_limit))
    return headers


def rate_limit_headers(view: RateLimitView) -> list[tuple[str, str]]:
    """The OpenAI-style `x-ratelimit-*` headers and the IETF draft's `ratelimit` and `ratelimit-policy`."""
    headers: list[tuple[str, str]] = []
    policies: list[str] = []
    states: list[str] = []
    for unit, limit, remaining, reset_ms in (
        ("tokens", view.limit_tokens, view.remaining_tokens, view.reset_tokens_ms),
        ("requests", view.limit_requests, view.remaining_requests, view.reset_requests_ms),
    ):
        if limit is None or remaining is None or reset_ms is None:
            continue
        reset_s = -(-reset_ms // 1000)
        headers.append((f"x-ratelimit-limit-{unit}", str(limit)))
        headers.append((f"x-ratelimit-remaining-{unit}", str(remaining)))
        headers.append((f"x-ratelimit-reset-{unit}", f"{reset_s}s"))
        policies.append(f'"{unit}";q={limit};w=60')
        states.append(f'"{unit}";r={remaining};t={reset_s}')
    if policies:
        headers.append(("ratelimit-policy", ", ".join(policies)))
        headers.append(("ratelimit", ", ".join(states)))
    return headers
