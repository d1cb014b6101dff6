"""What callers are told when it is the exchange itself that refuses them, not a plan and not the ledger.

`spread` differs between requests and spreads the waits (see `jittered_wait_ms`).
"""

from __future__ import annotations

from extproc.domain.contract import CONTRACT, Refusal, Retry, jittered_wait_ms
from extproc.domain.outcome import Reason
from extproc.domain.prompt import CountFailed
from extproc.domain.retries import Penalty, Wrong

DRAIN_WAIT_MS = 2000
"""A draining worker's clients find another one within two health-check intervals."""

FAULT_WAIT_MS = 1000
"""After a fault of our own."""

NO_BODY = Refusal(reason=Reason.MALFORMED_REQUEST, message="The request has no body.")


def too_large(most_bytes: int) -> Refusal:
    """The body has more bytes than any may have."""
    return Refusal(
        reason=Reason.BODY_TOO_LARGE,
        message=f"The request body is larger than {most_bytes} bytes.",
        maximums={"body_bytes": most_bytes},
    )


def drained(spread: int) -> Refusal:
    """The worker stops."""
    return Refusal(
        reason=Reason.DRAINING,
        message="This worker is about to stop; another one will answer.",
        retry_after_ms=jittered_wait_ms(DRAIN_WAIT_MS, spread=spread),
    )


def penalized(penalty: Penalty, spread: int) -> Refusal:
    """The caller does not keep to what it was told."""
    return Refusal(
        reason=Reason.RETRY_PENALTY,
        message=(
            "This request has come back again and again before the time it was told. Wait as told here."
            if penalty.wrong is Wrong.EARLY
            else "More of the tenant's requests are retries than its budget for retries allows."
        ),
        retry_after_ms=jittered_wait_ms(penalty.wait_ms, spread=spread),
    )


def uncounted(failed: CountFailed, spread: int) -> Refusal:
    """The prompt could not be counted."""
    later = CONTRACT[failed.reason].retry is Retry.LATER
    return Refusal(
        reason=failed.reason,
        message=failed.detail,
        retry_after_ms=jittered_wait_ms(FAULT_WAIT_MS, spread=spread) if later else None,
    )


def without_ledger(wait_ms: int, spread: int) -> Refusal:
    """The lane admits nobody while the ledger cannot be asked."""
    return Refusal(
        reason=Reason.LEDGER_UNAVAILABLE,
        message="The ledger of reservations cannot be reached, and this lane is closed without it.",
        retry_after_ms=jittered_wait_ms(wait_ms, spread=spread),
    )


def engine_gone(wait_ms: int, spread: int, *, waited_ms: int) -> Refusal:
    """The replica that was granted has gone while the request waited for it."""
    return Refusal(
        reason=Reason.BREAKER_OPEN,
        message="The engine that had room for this request does not answer any more.",
        retry_after_ms=jittered_wait_ms(wait_ms, spread=spread),
        waited_ms=waited_ms or None,
    )


def our_fault(spread: int) -> Refusal:
    """Something failed here that should not have."""
    return Refusal(
        reason=Reason.INTERNAL_ERROR,
        message="The admission service failed on this request; nothing was reserved.",
        retry_after_ms=jittered_wait_ms(FAULT_WAIT_MS, spread=spread),
    )
