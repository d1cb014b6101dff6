"""Why a request was refused and how an exchange ended: two small closed sets, made to be metric labels."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a request did not reach a GPU. The value is the machine-readable code that clients see."""

    MALFORMED_REQUEST = "malformed_request"
    INVALID_PARAMETER = "invalid_parameter"
    TENANT_UNKNOWN = "tenant_unknown"
    TENANT_DISABLED = "tenant_disabled"
    BODY_TOO_LARGE = "body_too_large"
    CONTEXT_LIMIT = "context_limit"
    LANE_LIMIT = "lane_limit"
    EXCEEDS_QUOTA = "exceeds_quota"
    EXCEEDS_CAPACITY = "exceeds_capacity"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    TENANT_RATE = "tenant_rate"
    TENANT_INFLIGHT = "tenant_inflight"
    TOKEN_BUDGET_EXHAUSTED = "token_budget_exhausted"  # noqa: S105 - a reason, not a credential
    QUEUE_FULL = "queue_full"
    RESIDENCE_EXPIRED = "residence_expired"
    DEADLINE_INFEASIBLE = "deadline_infeasible"
    LANE_SUSPENDED = "lane_suspended"
    RETRY_PENALTY = "retry_penalty"
    NO_CAPACITY = "no_capacity"
    BREAKER_OPEN = "breaker_open"
    LEDGER_UNAVAILABLE = "ledger_unavailable"
    TOKENIZER_OVERLOADED = "tokenizer_overloaded"
    DRAINING = "draining"
    INTERNAL_ERROR = "internal_error"


class Outcome(StrEnum):
    """How an exchange ended, seen from the stream."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    ABANDONED = "abandoned"  # the client left before there was an answer
    PASSED = "passed"  # not an inference request; none of our business
