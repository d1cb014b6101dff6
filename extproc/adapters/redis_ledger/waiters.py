"""Callers of this worker that wait for room in the shared ledger, and when to look what has become of them.

Nobody polls. What is decided while this worker talks to the store comes back with the same call; what others
decide rings this worker's bell (see `Bell`); what time alone decides has a known moment. Should a bell or a
moment be missed, a look every `RECHECK_MS` finds out; it also tells the ledger that this worker is alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from extproc.domain.reservation import Answer, Reservation

RECHECK_MS = 1_000

REPLY_MS = 4 * RECHECK_MS
"""A worker that has not looked for this long has died: its callers are dropped from the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """One caller. It has waited since `since_s`, and is told until `until_s`, on the event loop's clock."""

    asked: Reservation
    deliver: Callable[[Answer], None]
    since_s: float
    until_s: float

    def asks_again(self, now_s: float) -> Reservation:
        """The reservation with the time that is left to it."""
        waited_ms = int((now_s - self.since_s) * 1000)
        return replace(
            self.asked,
            hold_ms=max(0, self.asked.hold_ms - waited_ms),
            deadline_in_ms=max(0, self.asked.deadline_in_ms - waited_ms),
        )


class Waiters:
    """Those who wait. `look` asks the store; `overdue` is called with one that should have been told long ago."""

    def __init__(self, *, look: Callable[[], None], overdue: Callable[[Waiter], None]) -> None:
        self._look = look
        self._overdue = overdue
        self._waiters: dict[str, Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiters)

    def enter(self, asked: Reservation, deliver: Callable[[Answer], None], expires_in_ms: int) -> None:
        """One more waits, for at most so long."""
        now_s = asyncio.get_running_loop().time()
        self._waiters[asked.lease_id] = Waiter(
            asked=asked, deliver=deliver, since_s=now_s, until_s=now_s + expires_in_ms / 1000
        )
        self.look_in(min(expires_in_ms, RECHECK_MS))

    def leave(self, lease_id: str) -> Waiter | None:
        """One that does not wait any more; `None` if it does not wait here."""
        return self._waiters.pop(lease_id, None)

    def leave_all(self) -> tuple[Waiter, ...]:
        """All of them, none of whom waits any more."""
        waiters = tuple(self._waiters.values())
        self._waiters.clear()
        return waiters

    def look_in(self, delay_ms: int) -> None:
        """Look in so long at the latest. A look that is due earlier stays."""
        if self._stopped:
            return
        loop = asyncio.get_running_loop()
        at_s = loop.time() + max(1, delay_ms) / 1000
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._on_timer)

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        late_s = asyncio.get_running_loop().time() - RECHECK_MS / 1000
        for waiter in [one for one in self._waiters.values() if one.until_s < late_s]:
            del self._waiters[waiter.asked.lease_id]
            self._overdue(waiter)
        self._look()
        if self._waiters:
            self.look_in(RECHECK_MS)
