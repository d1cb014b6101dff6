"""Counts of what was counted before, without what was counted.

Conversations grow at their end and share their beginnings, so nearly all pieces of a request are old; and a
request that is sent again, as refused requests are, is old altogether. Each is known by a hash under a key that
this process draws at random: an entry says nothing about the text, and nobody outside can aim for a collision.
128 bits keep chance collisions away (10^6 entries, 10^12 lookups: 10^-20).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock

ENTRY_BYTES = 256
"""What an entry takes, measured over a million: 16 bytes of hash in a `bytes` object (49), the count (28), the
dictionary's slot and the list node of an `OrderedDict`."""


class CountCache:
    """The least recently used entries go first. All methods may be called from any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_entries = limit_bytes // ENTRY_BYTES
        self._counts: OrderedDict[bytes, int] = OrderedDict()
        self._lock = Lock()
        self._keyed = blake2b(digest_size=16, key=secrets.token_bytes(32))
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._counts)

    def key(self, text: bytes) -> bytes:
        """The key under which the count of `text` is kept."""
        state = self._keyed.copy()
        state.update(text)
        return state.digest()

    def known(self, keys: Sequence[bytes]) -> list[int | None]:
        """The counts under `keys`, in order; None where there is none."""
        counts = self._counts
        found: list[int | None] = []
        with self._lock:
            for key in keys:
                count = counts.get(key)
                if count is not None:
                    counts.move_to_end(key)
                found.append(count)
            missed = found.count(None)
            self.misses += missed
            self.hits += len(found) - missed
        return found

    def remember(self, key: bytes, count: int) -> None:
        """Keep a count; the entry that was not asked for longest makes room."""
        with self._lock:
            self._counts[key] = count
            self._counts.move_to_end(key)
            while len(self._counts) > self._limit_entries:
                self._counts.popitem(last=False)
