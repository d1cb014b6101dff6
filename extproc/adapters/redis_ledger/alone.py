"""What a worker grants while the store is away: its share of every limit, from books in this process.

The books begin with everything that this worker holds, counted in some at a time so that the event loop does
not stall; until that is done nothing is granted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice

from extproc.domain.books import Books
from extproc.domain.lease import UNDYING, Claim
from extproc.domain.reservation import Denied, Granted, Reservation
from extproc.domain.share import share_of

SEEDED_AT_ONCE = 100


class Alone:
    """The books of one outage. `now_ms` is this worker's own time, `still_held` tells which claims still hold."""

    def __init__(
        self, held: Iterable[Claim], *, now_ms: Callable[[], int], still_held: Callable[[str], bool]
    ) -> None:
        self._books = Books()
        self._claims = iter(held)
        self._now_ms = now_ms
        self._still_held = still_held
        self._is_seeded = False
        self._seed()

    def reserve(self, asked: Reservation, workers: int) -> Granted | Denied | None:
        """The answer of 1/`workers` of every limit; `None` if a share can never hold it, or not yet."""
        share = share_of(asked, workers) if self._is_seeded else None
        if share is None:
            return None
        answer = self._books.reserve(share, self._now_ms())
        return answer if isinstance(answer, Granted | Denied) else None

    def release(self, lease_id: str) -> None:
        """A stream has ended."""
        self._books.release(lease_id, self._now_ms())

    def book(self, lease_id: str, work_units: int | None) -> bool:
        """A record has come; whether it was for a lease in these books."""
        return self._books.book(lease_id, work_units, self._now_ms())

    def _seed(self) -> None:
        seeded = 0
        for claim in islice(self._claims, SEEDED_AT_ONCE):
            seeded += 1
            if self._still_held(claim.lease_id):
                self._books.reassert(claim, self._now_ms(), UNDYING)
        if seeded < SEEDED_AT_ONCE:
            self._is_seeded = True
        else:
            asyncio.get_running_loop().call_soon(self._seed)
