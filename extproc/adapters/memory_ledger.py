"""The ledger of a single worker: the domain's books, in this process, on this process's clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from extproc.domain.books import Books
from extproc.domain.lease import UNDYING, Holder
from extproc.domain.policy import Policy
from extproc.domain.reservation import (
    Answer,
    Balance,
    Booking,
    Denied,
    Granted,
    Queued,
    Reservation,
    Scope,
)
from extproc.domain.snapshot import Snapshot
from extproc.ports import Clock

RECLAIMED_AT_ONCE = 8
"""Leases that one call may move on: more than one, so that reclaiming keeps up; few, so that no call stalls."""

SWEEP_EVERY_MS = 100
SWEPT_AT_ONCE = 8
"""Tenants and replicas that are looked at so often, to forget those that hold and owe nothing."""

TOLD_AT_ONCE = 8
"""Waiting callers that are told in one go: each is a whole decision, and the event loop has others to serve."""

RECHECK_MS = 1_000
"""While anybody waits, the books are looked at this often even if nothing seems due."""


class MemoryLedger:
    """Answers at once, or when those who wait may go. Nothing survives the process: leases need no renewal.

    `unbooked_total` counts leases whose access-log record never came: they stay charged as reserved.
    """

    def __init__(self, clock: Clock, *, books: Books | None = None, holder: Holder = UNDYING) -> None:
        self.books = books if books is not None else Books()
        self.unbooked_total = 0
        self._clock = clock
        self._holder = holder
        self._policy: Policy | None = None
        self._callers: dict[str, Callable[[Answer], None]] = {}
        self._news: deque[tuple[str, Granted | Denied]] = deque()
        self._telling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ms = 0
        self._swept_at_ms = 0

    def now_ms(self) -> int:
        """The ledger's own time."""
        return self._clock.now_us() // 1000

    def reserve(self, reservation: Reservation, deliver: Callable[[Answer], None]) -> None:
        """See `Ledger.reserve`."""
        now_ms = self.now_ms()
        self._tidy(now_ms)
        answer = self.books.reserve(reservation, now_ms, self._holder)
        if isinstance(answer, Queued):
            self._callers[reservation.lease_id] = deliver
            if self._policy is not None and reservation.policy_version != self._policy.version:
                self._resize(reservation.pool.name, now_ms)  # it began under the policy before: with its pool
        else:
            deliver(answer)
        self._tell()

    def withdraw(self, lease_id: str) -> None:
        """See `Ledger.withdraw`."""
        if self.books.withdraw(lease_id, self.now_ms()):
            deliver = self._callers.pop(lease_id)
            deliver(Denied(scope=Scope.WITHDRAWN, wait_ms=0, balance=Balance()))
            self._tell()

    def release(self, lease_id: str) -> None:
        """See `Ledger.release`."""
        self.withdraw(lease_id)
        self.books.release(lease_id, self.now_ms())
        self._tell()

    def book(self, booking: Booking) -> None:
        """See `Ledger.book`."""
        self.books.book(booking.lease_id, booking.work_units, self.now_ms())
        self._tell()

    async def snapshot(self, policy: Policy) -> Snapshot:
        """See `Ledger.snapshot`."""
        now_ms = self.now_ms()
        self._tidy(now_ms)
        self._tell()
        return self.books.snapshot(policy, now_ms)

    def policy_changed(self, policy: Policy) -> None:
        """A new policy is in force: whoever waits is measured by its pools."""
        self._policy = policy
        now_ms = self.now_ms()
        for name in policy.pools:
            self._resize(name, now_ms)
        self._tell()

    def _resize(self, name: str, now_ms: int) -> None:
        assert self._policy is not None
        pool = self._policy.pools.get(name)
        if pool is not None:
            self.books.change_capacity(pool, self._policy.lane_limits_tokens(pool), now_ms)

    def _tidy(self, now_ms: int) -> None:
        self.unbooked_total += self.books.reclaim(now_ms, most=RECLAIMED_AT_ONCE).forgotten
        if now_ms - self._swept_at_ms >= SWEEP_EVERY_MS:
            self._swept_at_ms = now_ms
            self.books.sweep(now_ms, most=SWEPT_AT_ONCE)

    # Those who wait.

    def _tell(self) -> None:
        """Tell waiting callers what has been decided, a few at a time, and see to it that time is noticed.

        A caller that is told may ask, release and withdraw from within.
        """
        if self._telling or not (self._callers or self._news):
            return
        self._telling = True
        try:
            for _ in range(TOLD_AT_ONCE):
                self._news.extend(self.books.take_news(self._holder, self.now_ms()))
                if not self._news:
                    break
                lease_id, answer = self._news.popleft()
                self._callers.pop(lease_id)(answer)
        finally:
            self._telling = False
        self._set_timer()

    def _set_timer(self) -> None:
        if not self._callers:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        now_ms = self.now_ms()
        at_ms = now_ms + RECHECK_MS
        wake_at_ms = self.books.wake_at_ms()
        if self._news:
            at_ms = now_ms
        elif wake_at_ms is not None:
            at_ms = min(at_ms, wake_at_ms)
        if self._timer is not None:
            if self._timer_at_ms <= at_ms:
                return  # it comes early enough; it sets the next one itself
            self._timer.cancel()
        self._timer_at_ms = at_ms
        # A timer may come a moment early by this ledger's clock; it is then set again for the rest.
        delay_s = max(0, at_ms - now_ms) / 1000
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ms = self.now_ms()
        self.books.wake(now_ms)
        self._tidy(now_ms)
        self._tell()
        self._set_timer()
