"""The shared ledger's scripts, driven directly: the books in Lua, one blocking call at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from redis.commands.core import Script

from extproc.adapters.redis_ledger import wire
from extproc.adapters.redis_ledger.scripts import BATCH, keys_of
from extproc.domain.holdings import Held
from extproc.domain.lease import Holder
from extproc.domain.policy import Pool

KEEP_MS = 3_600_000


@dataclass(slots=True)
class LuaBooks:
    """`play` runs operations in one call at a time of the test's choosing."""

    client: redis.Redis
    domain: str = "test"
    keys: Sequence[bytes] = field(init=False)
    wake_at_ms: int | None = field(default=None, init=False)
    _script: Script = field(init=False)

    def __post_init__(self) -> None:
        self.keys = keys_of(self.domain)
        self._script = self.client.register_script(BATCH.text)

    def wipe(self) -> None:
        """Forget everything."""
        self.client.delete(*self.keys)

    def play(
        self,
        ops: Sequence[wire.Op],
        *,
        holder: Holder,
        at_ms: int | None,
        pools: Sequence[Pool] = (),
        reclaim_most: int = 0,
    ) -> tuple[Sequence[Any], Sequence[int]]:
        """The reply of each operation, and (orphaned, freed, forgotten, taken back).

        `wake_at_ms` is afterwards when this call says that time next lets somebody go, where it has looked.
        """
        argument = wire.batch(
            ops,
            holder=holder,
            keep_ms=KEEP_MS,
            reclaim_most=reclaim_most,
            pools=[wire.pool_entry(pool, "v1") for pool in pools],
            at_ms=at_ms,
        )
        stored: Any = self._script(keys=self.keys, args=[argument])
        _, orphaned, freed, forgotten, replies, taken_back, wake_at_ms = wire.decode(stored)
        self.wake_at_ms = None if wake_at_ms is False else wake_at_ms
        return replies, (orphaned, freed, forgotten, taken_back)

    def scopes(self) -> dict[str, list[int]]:
        """Every stored scope."""
        stored: Any = self.client.hgetall(self.keys[0])
        return {name.decode(): wire.decode(value) for name, value in stored.items()}

    def balances(self) -> dict[object, Held]:
        """What every scope holds, under the names that the domain's books use; nothing for what holds nothing."""
        found: dict[object, Held] = {}
        for name, stored in self.scopes().items():
            if name == wire.LEASE_COUNTS_FIELD or name[0] == "F":
                continue
            kind, names = name[0], name[1:]
            key: object = ("tenant", names)
            if kind == "L":
                key = ("lane", *names.split("\0"))
            elif kind == "R":
                key = ("replica", *names.split("\0"))
            held = wire.held_of(stored)
            if held != Held():
                found[key] = held
        return found

    def owed(self, now_ms: int) -> dict[str, tuple[int, int]]:
        """What every tenant owes; nothing for who owes nothing."""
        found: dict[str, tuple[int, int]] = {}
        for name, stored in self.scopes().items():
            if name.startswith("T"):
                book = wire.tenant_book_of(stored)
                parts = [
                    debt.parts_at(debt.rate_per_minute, now_ms)
                    for debt in (book.token_debt, book.request_debt)
                ]
                if any(parts):
                    found[name[1:]] = (parts[0], parts[1])
        return found

    def leases(self) -> dict[str, list[Any]]:
        """Every stored lease."""
        stored: Any = self.client.hgetall(self.keys[1])
        return {name.decode(): wire.decode(value) for name, value in stored.items()}

    def dues(self) -> dict[str, int]:
        """When every lease's next step is due."""
        stored: Any = self.client.zrange(self.keys[2], 0, -1, withscores=True)
        return {name.decode(): int(score) for name, score in stored}

    def keys_without_expiry(self) -> list[bytes]:
        """Keys of this domain that would stay for ever."""
        return [key for key in self.keys if self.client.pttl(key) == -1]

    def waits(self) -> dict[str, Any]:
        """Everything that is stored of those who wait, by its field's name."""
        stored: Any = self.client.hgetall(self.keys[4])
        return {name.decode(): wire.decode(value) for name, value in stored.items()}

    def expiries(self) -> dict[str, int]:
        """When the time of each ticket is over."""
        stored: Any = self.client.zrange(self.keys[5], 0, -1, withscores=True)
        return {name.decode(): int(score) for name, score in stored if name}
