"""The observer that says when an engine counts otherwise than we did: a sample per model, without text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from extproc.domain.decision import Decision, Settled

log = logging.getLogger("extproc.drift")

QUIET_S = 60.0
"""At most one line per model in this time; the line tells how many requests it stands for."""

MOST_MODELS = 256
"""Models that are told apart; those beyond share one line."""


class DriftLog:
    """Implements `Observer`. Memory is one entry per model."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._quiet_until_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def decided(self, decision: Decision) -> None:
        """See `Observer.decided`."""

    def settled(self, settled: Settled) -> None:
        """See `Observer.settled`."""
        used_tokens = settled.used_input_tokens
        if used_tokens is None or used_tokens == settled.input_tokens:
            return
        model = settled.model
        if model not in self._quiet_until_s and len(self._quiet_until_s) >= MOST_MODELS:
            model = ""
        now_s = self._now_s()
        if now_s < self._quiet_until_s.get(model, 0.0):
            self._unsaid[model] = self._unsaid.get(model, 0) + 1
            return
        self._quiet_until_s[model] = now_s + QUIET_S
        log.warning(
            "the engine counts otherwise",
            extra={
                "model": settled.model,
                "pool": settled.pool,
                "replica": settled.replica,
                "reservation": settled.lease_id,
                "input_tokens": settled.input_tokens,
                "used_input_tokens": used_tokens,
                "requests": 1 + self._unsaid.pop(model, 0),
            },
        )
