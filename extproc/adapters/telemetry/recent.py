"""The observer that remembers a little: the last decisions, and refusals by reason over the last minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from extproc.domain.decision import Decision, Settled
from extproc.domain.outcome import Outcome

DECISIONS = 60
SLOT_S = 15
SLOTS = 40
"""Ten minutes, which is as far back as somebody looks who asks what is happening now."""


class Recent:
    """Implements `Observer`. Memory is bounded by its two constants and the number of reasons.

    `now_s` is the wall clock in seconds since the epoch.
    """

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._decisions: deque[tuple[float, Decision]] = deque(maxlen=DECISIONS)
        self._slots: deque[tuple[int, dict[str, int]]] = deque(maxlen=SLOTS)

    def decided(self, decision: Decision) -> None:
        """See `Observer.decided`."""
        now_s = self._now_s()
        self._decisions.append((now_s, decision))
        number = int(now_s) // SLOT_S
        slots = self._slots
        if not slots or slots[-1][0] < number:
            slots.append((number, {}))
        counts = slots[-1][1]
        key = decision.reason or decision.outcome
        counts[key] = counts.get(key, 0) + 1

    def settled(self, settled: Settled) -> None:
        """See `Observer.settled`."""

    def decisions(self) -> Sequence[Mapping[str, Any]]:
        """The last decisions as JSON objects, newest first. Every text in them is the policy's."""
        return [
            {
                "at_ms": int(at_s * 1_000),
                "decision": str(decision.outcome),
                "reason": None if decision.reason is None else str(decision.reason),
                "tenant": decision.tenant,
                "model": decision.model,
                "lane": None if decision.lane is None else str(decision.lane),
                "pool": decision.pool,
                "replica": decision.replica,
                "fallback": decision.fallback,
                "input_tokens": decision.input_tokens,
                "output_tokens": decision.output_tokens,
                "decided_us": decision.decided_us,
                "retry_after_ms": decision.retry_after_ms,
                "reservation": decision.lease_id,
            }
            for at_s, decision in reversed(self._decisions)
        ]

    def history(self) -> Mapping[str, Any]:
        """Decisions per slot of time, oldest first, up to now: by reason for refusals, else by outcome."""
        now = int(self._now_s()) // SLOT_S
        counts = {number: counts for number, counts in self._slots if number > now - SLOTS}
        keys = sorted({key for one in counts.values() for key in one}, key=str)
        numbers = range(now - SLOTS + 1, now + 1)
        return {
            "slot_s": SLOT_S,
            "counts": {str(key): [counts.get(number, {}).get(key, 0) for number in numbers] for key in keys},
            "refusals": [str(key) for key in keys if key not in OUTCOMES],
        }


OUTCOMES = frozenset(map(str, Outcome))
