"""The client contract is a table: every row, its status, its retry, and the headers that carry it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.contract import (
    CONTRACT,
    JITTER_PERMILLE,
    LONGEST_OBEYED_WAIT_MS,
    RateLimitView,
    Refusal,
    Retry,
    jittered_wait_ms,
    rate_limit_headers,
    refusal_headers,
)
from extproc.domain.outcome import Reason

NEVER = {
    400: {Reason.MALFORMED_REQUEST, Reason.INVALID_PARAMETER},
    401: {Reason.TENANT_UNKNOWN},
    403: {Reason.TENANT_DISABLED},
    413: {
        Reason.BODY_TOO_LARGE,
        Reason.CONTEXT_LIMIT,
        Reason.LANE_LIMIT,
        Reason.EXCEEDS_QUOTA,
        Reason.EXCEEDS_CAPACITY,
    },
    415: {Reason.UNSUPPORTED_ENCODING},
}
LATER = {
    429: {
        Reason.TENANT_RATE,
        Reason.TENANT_INFLIGHT,
        Reason.TOKEN_BUDGET_EXHAUSTED,
        Reason.QUEUE_FULL,
        Reason.RESIDENCE_EXPIRED,
        Reason.DEADLINE_INFEASIBLE,
        Reason.LANE_SUSPENDED,
        Reason.RETRY_PENALTY,
    },
    503: {
        Reason.NO_CAPACITY,
        Reason.BREAKER_OPEN,
        Reason.LEDGER_UNAVAILABLE,
        Reason.TOKENIZER_OVERLOADED,
        Reason.DRAINING,
        Reason.INTERNAL_ERROR,
    },
}


def test_every_reason_has_the_status_and_retry_that_the_contract_promises() -> None:
    """Written out a second time: a slip in the table is a difference here."""
    promised = {
        reason: (status, retry)
        for retry, rows in ((Retry.NEVER, NEVER), (Retry.LATER, LATER))
        for status, reasons in rows.items()
        for reason in reasons
    }
    assert promised == {reason: (row.status, row.retry) for reason, row in CONTRACT.items()}
    assert set(CONTRACT) == set(Reason)


def test_no_status_that_sdks_retry_at_once_is_ever_used() -> None:
    """408, 409 and 504 are retried within half a second, whatever the answer says."""
    assert not {408, 409, 504} & {row.status for row in CONTRACT.values()}


def headers_of(refusal: Refusal) -> dict[str, str]:
    """Headers by name; each name once."""
    headers = refusal_headers(refusal, lane="bulk", policy_version="v1", request_id="req-1")
    assert len(dict(headers)) == len(headers)
    return dict(headers)


@pytest.mark.parametrize("reason", list(Reason))
def test_what_never_helps_says_so_and_what_may_help_says_when(reason: Reason) -> None:
    """Retry-After exactly where asking again can help; elsewhere SDKs are told to stop."""
    later = CONTRACT[reason].retry is Retry.LATER
    headers = headers_of(Refusal(reason=reason, message="m", retry_after_ms=1500 if later else None))
    assert headers["x-admission-reason"] == reason
    assert headers["x-request-id"] == headers["request-id"] == "req-1"
    assert ("retry-after" in headers) == ("retry-after-ms" in headers) == later
    assert (headers.get("x-should-retry") == "false") == (not later)


@given(st.integers(0, 10**9))
def test_a_wait_is_whole_seconds_rounded_up_and_its_milliseconds(wait_ms: int) -> None:
    """Never 0, never a fraction, never a date; both headers are one instant; long waits stop SDKs."""
    headers = headers_of(Refusal(reason=Reason.TENANT_RATE, message="m", retry_after_ms=wait_ms))
    seconds, milliseconds = int(headers["retry-after"]), int(headers["retry-after-ms"])
    assert re.fullmatch("[1-9][0-9]*", headers["retry-after"])
    assert (seconds - 1) * 1000 < max(milliseconds, 1) <= seconds * 1000
    assert ("x-should-retry" in headers) == (wait_ms > LONGEST_OBEYED_WAIT_MS)


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 2**32))
def test_jitter_only_adds_and_keeps_the_order_of_loads(one_ms: int, other_ms: int, spread: int) -> None:
    """Never earlier than the estimate, at most a quarter later, and monotone for one caller."""
    low, high = sorted((one_ms, other_ms))
    waits = jittered_wait_ms(low, spread=spread), jittered_wait_ms(high, spread=spread)
    assert waits[0] <= waits[1]
    assert low <= waits[0] <= max(low, 250) * (1000 + JITTER_PERMILLE) // 1000


def test_jitter_spreads_callers() -> None:
    """Those who were refused together do not return together."""
    assert len({jittered_wait_ms(10_000, spread=spread) for spread in range(1000)}) > 200


def test_rates_are_told_in_both_forms() -> None:
    """The OpenAI-style headers and the IETF draft's say the same."""
    view = RateLimitView(
        limit_tokens=1000,
        remaining_tokens=10,
        reset_tokens_ms=1500,
        limit_requests=60,
        remaining_requests=0,
        reset_requests_ms=59_001,
    )
    assert dict(rate_limit_headers(view)) == {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "10",
        "x-ratelimit-reset-tokens": "2s",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60s",
        "ratelimit-policy": '"tokens";q=1000;w=60, "requests";q=60;w=60',
        "ratelimit": '"tokens";r=10;t=2, "requests";r=0;t=60',
    }
    assert rate_limit_headers(RateLimitView()) == []
