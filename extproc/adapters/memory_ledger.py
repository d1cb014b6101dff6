"""The ledger of a single worker: the domain's books, in this process, on this process's clock."""

from __future__ import annotations

from collections.abc import Callable

from extproc.domain.books import Books
from extproc.domain.policy import Policy
from extproc.domain.reservation import Answer, Booking, Reservation
from extproc.domain.snapshot import Snapshot
from extproc.ports import Clock

UNBOOKED_MS = 60_000
"""How long a released lease waits for its access-log record, which normally takes milliseconds. After that
its charge stays at what was reserved: never zero, and counted as unbooked."""


class MemoryLedger:
    """Answers every question at once. Nothing survives the process, and no other worker is known."""

    def __init__(self, clock: Clock) -> None:
        self.books = Books()
        self.unbooked_total = 0
        self._clock = clock

    def now_ms(self) -> int:
        """The ledger's own time."""
        return self._clock.now_us() // 1000

    def reserve(self, reservation: Reservation, deliver: Callable[[Answer], None]) -> None:
        """See `Ledger.reserve`."""
        now_ms = self.now_ms()
        self.unbooked_total += len(self.books.forget_unbooked(now_ms - UNBOOKED_MS, most=8))
        deliver(self.books.reserve(reservation, now_ms))

    def release(self, lease_id: str) -> None:
        """See `Ledger.release`."""
        self.books.release(lease_id, self.now_ms())

    def book(self, booking: Booking) -> None:
        """See `Ledger.book`."""
        self.books.book(booking.lease_id, booking.work_units, self.now_ms())

    async def snapshot(self, policy: Policy) -> Snapshot:
        """See `Ledger.snapshot`."""
        return self.books.snapshot(policy, self.now_ms())
