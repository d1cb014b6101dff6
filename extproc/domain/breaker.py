"""When to stop sending requests to a replica, and when to try it again. Pure: time is an argument.

Three states. Closed: all is well, or not yet known to be otherwise. Open: the replica gets nothing, for at least
`open_ms`. Half open: it gets `trial_requests`, for as long again. An answer that succeeds closes the breaker, one
that fails opens it anew, and so does a probe that finds nobody.

Law: it opens only on evidence, stays open for `open_ms` at least, and without further failures it is closed
`2 * open_ms` after the last one, whether or not anybody comes to try. So it neither flaps nor stays shut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from extproc.domain.policy import BreakerPolicy


class BreakerState(StrEnum):
    """What a replica gets: everything, nothing, or a few trials."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """One replica's breaker. `opened_total` counts how often it has opened."""

    rules: BreakerPolicy
    opened_total: int = 0
    _unreached_in_row: int = 0
    _failed_in_row: int = 0
    _open_until_ms: int | None = None
    _trials: int = 0
    # Outcomes of this half of the window and of the one before it.
    _half_since_ms: int = 0
    _ended: int = 0
    _failed: int = 0
    _ended_before: int = 0
    _failed_before: int = 0

    def state(self, now_ms: int) -> BreakerState:
        """What it is now: time alone moves it on."""
        if self._open_until_ms is None:
            return BreakerState.CLOSED
        if now_ms < self._open_until_ms:
            return BreakerState.OPEN
        if now_ms < self._open_until_ms + self.rules.open_ms:
            return BreakerState.HALF_OPEN
        self._close()
        return BreakerState.CLOSED

    def admits(self, now_ms: int) -> bool:
        """Whether the replica may get one more request now."""
        state = self.state(now_ms)
        if state is BreakerState.HALF_OPEN:
            return self._trials < self.rules.trial_requests
        return state is BreakerState.CLOSED

    def wait_ms(self, now_ms: int) -> int:
        """How long until the replica may get a request, if nothing else fails; 0 if it may now."""
        if self.admits(now_ms):
            return 0
        assert self._open_until_ms is not None
        if now_ms < self._open_until_ms:
            return self._open_until_ms - now_ms
        return self._open_until_ms + self.rules.open_ms - now_ms

    def granted(self, now_ms: int) -> None:
        """The replica gets a request."""
        if self._open_until_ms is not None and self.state(now_ms) is BreakerState.HALF_OPEN:
            self._trials += 1

    def probed(self, *, reached: bool, now_ms: int) -> None:
        """A probe was answered, whatever it was told; or found nobody."""
        if reached:
            self._unreached_in_row = 0
            return
        self._unreached_in_row += 1
        if self.state(now_ms) is not BreakerState.CLOSED or self._unreached_in_row >= self.rules.failures:
            self._open(now_ms)

    def ended(self, *, failed: bool, now_ms: int) -> None:
        """An answer of the replica's has ended. While it is open, that is news from before."""
        state = self.state(now_ms)
        if state is BreakerState.OPEN:
            return
        if state is BreakerState.HALF_OPEN:
            if failed:
                self._open(now_ms)
            else:
                self._close()
            return
        self._count(failed=failed, now_ms=now_ms)
        self._failed_in_row = self._failed_in_row + 1 if failed else 0
        ended, rules = self._ended + self._ended_before, self.rules
        share_is_bad = (
            failed
            and ended >= rules.least_requests
            and (self._failed + self._failed_before) * 1000 >= rules.error_permille * ended
        )
        if self._failed_in_row >= rules.failures or share_is_bad:
            self._open(now_ms)

    def _count(self, *, failed: bool, now_ms: int) -> None:
        half_ms = max(1, self.rules.window_ms // 2)
        halves = (now_ms - self._half_since_ms) // half_ms
        if halves > 0:
            recent = halves == 1
            self._ended_before = self._ended if recent else 0
            self._failed_before = self._failed if recent else 0
            self._ended = self._failed = 0
            self._half_since_ms += halves * half_ms
        self._ended += 1
        self._failed += failed

    def _open(self, now_ms: int) -> None:
        if self.state(now_ms) is not BreakerState.OPEN:
            self.opened_total += 1
        self._open_until_ms = now_ms + self.rules.open_ms
        self._trials = self._failed_in_row = 0
        self._ended = self._failed = self._ended_before = self._failed_before = 0

    def _close(self) -> None:
        self._open_until_ms = None
        self._trials = self._failed_in_row = self._unreached_in_row = 0
