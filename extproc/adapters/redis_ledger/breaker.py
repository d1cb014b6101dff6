"""When to stop asking a store that does not answer, and when to try again. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Breaker:
    """Opens after `threshold` failures in a row; while it is open only probes may call, one per pause.

    The pause doubles with every probe up to `longest_pause_ms`; any success closes the breaker.
    """

    threshold: int = 3
    pause_ms: int = 250
    longest_pause_ms: int = 2_000
    is_open: bool = False
    opened_total: int = 0
    _failures: int = 0
    _pause_ms: int = 0
    _probe_at_ms: int = 0

    def failed(self, now_ms: int) -> bool:
        """A call was not answered in time, or could not be made. True when this opens the breaker."""
        self._failures += 1
        if self.is_open or self._failures < self.threshold:
            return False
        self.is_open = True
        self.opened_total += 1
        self._pause_ms = self.pause_ms
        self._probe_at_ms = now_ms + self._pause_ms
        return True

    def succeeded(self) -> bool:
        """A call was answered. True when this closes the breaker."""
        self._failures = 0
        was_open, self.is_open = self.is_open, False
        return was_open

    def may_probe(self, now_ms: int) -> bool:
        """Whether a probe is due. Asking takes it: the next one is a longer pause away."""
        if not self.is_open or now_ms < self._probe_at_ms:
            return False
        self._pause_ms = min(2 * self._pause_ms, self.longest_pause_ms)
        self._probe_at_ms = now_ms + self._pause_ms
        return True

    def wait_ms(self, now_ms: int) -> int:
        """How long until the store may be back, for whoever is told to come again."""
        return max(1, self._probe_at_ms - now_ms) if self.is_open else self.pause_ms
