"""The ledger of a single worker: the domain's books, in this process, on this process's clock."""

from __future__ import annotations

from collections.abc import Callable

from extproc.domain.books import Books
from extproc.domain.lease import UNDYING, Holder
from extproc.domain.policy import Policy
from extproc.domain.reservation import Answer, Booking, Reservation
from extproc.domain.snapshot import Snapshot
from extproc.ports import Clock

RECLAIMED_AT_ONCE = 8
"""Leases that one call may move on: more than one, so that reclaiming keeps up; few, so that no call stalls."""

SWEPT_AT_ONCE = 1
"""Tenants and replicas that one call looks at, to forget those that hold and owe nothing."""


class MemoryLedger:
    """Answers every question at once. Nothing survives the process, so its leases need no renewal.

    `unbooked_total` counts leases whose access-log record never came: they stay charged as reserved.
    """

    def __init__(self, clock: Clock, *, books: Books | None = None, holder: Holder = UNDYING) -> None:
        self.books = books if books is not None else Books()
        self.unbooked_total = 0
        self._clock = clock
        self._holder = holder

    def now_ms(self) -> int:
        """The ledger's own time."""
        return self._clock.now_us() // 1000

    def reserve(self, reservation: Reservation, deliver: Callable[[Answer], None]) -> None:
        """See `Ledger.reserve`."""
        now_ms = self.now_ms()
        self._tidy(now_ms)
        deliver(self.books.reserve(reservation, now_ms, self._holder))

    def release(self, lease_id: str) -> None:
        """See `Ledger.release`."""
        self.books.release(lease_id, self.now_ms())

    def book(self, booking: Booking) -> None:
        """See `Ledger.book`."""
        self.books.book(booking.lease_id, booking.work_units, self.now_ms())

    async def snapshot(self, policy: Policy) -> Snapshot:
        """See `Ledger.snapshot`."""
        now_ms = self.now_ms()
        self._tidy(now_ms)
        return self.books.snapshot(policy, now_ms)

    def _tidy(self, now_ms: int) -> None:
        self.unbooked_total += self.books.reclaim(now_ms, most=RECLAIMED_AT_ONCE).forgotten
        self.books.sweep(now_ms, most=SWEPT_AT_ONCE)
