"""The observer that logs: refusals as samples, internal faults each, admissions never."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from extproc.domain.decision import Decision, Settled
from extproc.domain.outcome import Outcome, Reason

log = logging.getLogger("extproc.refusals")

QUIET_S = 10.0
"""At most one line per reason in this time; the line tells how many it stands for."""


class RefusalLog:
    """Implements `Observer`. Memory is one entry per reason."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._quiet_until_s: dict[Reason, float] = {}
        self._unsaid: dict[Reason, int] = {}

    def decided(self, decision: Decision) -> None:
        """See `Observer.decided`."""
        reason = decision.reason
        if decision.outcome is not Outcome.REFUSED or reason is None:
            return
        now_s = self._now_s()
        if now_s < self._quiet_until_s.get(reason, 0.0):
            self._unsaid[reason] = self._unsaid.get(reason, 0) + 1
            return
        self._quiet_until_s[reason] = now_s + QUIET_S
        level = logging.ERROR if reason is Reason.INTERNAL_ERROR else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "refused", extra=_facts(decision, 1 + self._unsaid.pop(reason, 0)))

    def settled(self, settled: Settled) -> None:
        """See `Observer.settled`."""


def _facts(decision: Decision, requests: int) -> dict[str, object]:
    facts = {
        "reason": str(decision.reason),
        "requests": requests,
        "tenant": decision.tenant,
        "model": decision.model,
        "lane": None if decision.lane is None else str(decision.lane),
        "pool": decision.pool,
        "fallback": decision.fallback,
        "input_tokens": decision.input_tokens,
        "retry_after_ms": decision.retry_after_ms,
        "policy_version": decision.policy_version,
        "reservation": decision.lease_id,
        "trace_id": None if decision.trace is None else decision.trace.trace_id,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}
