"""A look into a store from outside, for operators: who holds what, since when; and what a dead worker left.

Everything is read in pages and with the ledger user's own rights, so a store under load hardly notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.adapters.redis_ledger import wire
from extproc.adapters.redis_ledger.address import Address, Locator
from extproc.adapters.redis_ledger.connection import Connection, ReplyError
from extproc.adapters.redis_ledger.scripts import BATCH, keys_of
from extproc.domain.holdings import Held
from extproc.domain.lease import Holder, LeaseState

PAGE = 500
AT_ONCE = 128
TIMEOUT_S = 5.0
REDIRECTIONS = 5
KEPT_MS = 3_600_000
"""What an operator writes expires after an hour if no worker comes; what workers have set stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHolder:
    """A worker, as its last sign of life left it. `alive_for_ms` is negative for one that is overdue."""

    id: str
    alive_for_ms: int
    leases: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLease:
    """One lease as it is stored. `due_in_ms` is when its next step is due."""

    id: str
    holder: str
    state: LeaseState
    tenant: str
    lane: str
    pool: str
    replica: str
    tokens: int
    age_ms: int
    due_in_ms: int | None
    policy_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScope:
    """What one tenant, lane or replica holds."""

    kind: str
    name: str
    tokens: int
    requests: int


class Inspection:
    """One connection to a ledger domain's store. `connect` first, `close` at the end."""

    def __init__(self, address: Address, domain: str) -> None:
        self._locator = Locator(address)
        self._keys = keys_of(domain)
        self._connection: Connection | None = None

    async def connect(self) -> None:
        """Find the server that owns the domain. Raises `OSError`, `TimeoutError`, `ReplyError`, `Lost`."""
        for _ in range(REDIRECTIONS):
            self._connection = await self._locator.connect(lambda _: None, TIMEOUT_S)
            try:
                await self._connection.ask("PTTL", self._keys[0])
            except ReplyError as error:
                if error.code != "MOVED":
                    raise
                host, _, port = str(error).rpartition(" ")[2].rpartition(":")
                self._locator.moved_to(host, int(port))
                self.close()
            else:
                return
        raise TimeoutError("the cluster's nodes do not agree on who owns the ledger's slot")

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.abort()

    async def now_ms(self) -> int:
        """The store's time."""
        seconds, micros = await self._ask("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def scopes(self) -> list[StoredScope]:
        """Everything that holds something, by kind and name."""
        found = []
        for field, stored in await self._scan(self._keys[0]):
            kind = {"T": "tenant", "L": "lane", "R": "replica"}.get(field[0])
            if kind is not None:
                held = Held(*wire.decode(stored)[:4])
                name = " / ".join(field[1:].split("\0"))
                found.append(StoredScope(kind=kind, name=name, tokens=held.tokens, requests=held.requests))
        return sorted(found, key=lambda one: (one.kind, one.name))

    async def leases(self, holder: str | None = None) -> list[StoredLease]:
        """All leases, or one holder's, oldest first."""
        now_ms = await self.now_ms()
        dues = dict(await self._scores(self._keys[2]))
        found = []
        for lease_id, stored in await self._scan(self._keys[1]):
            numbers = wire.decode(stored)
            if holder is not None and numbers[0] != holder:
                continue
            pool, lane = numbers[2][1:].split("\0")
            due_at_ms = dues.get(lease_id)
            found.append(
                StoredLease(
                    id=lease_id,
                    holder=numbers[0],
                    state=LeaseState(numbers[13]),
                    tenant=numbers[1][1:],
                    lane=lane,
                    pool=pool,
                    replica=numbers[3].partition("\0")[2],
                    tokens=numbers[4],
                    age_ms=now_ms - numbers[9],
                    due_in_ms=None if due_at_ms is None else due_at_ms - now_ms,
                    policy_version=numbers[12],
                )
            )
        return sorted(found, key=lambda one: (-one.age_ms, one.id))

    async def holders(self, leases: Sequence[StoredLease]) -> list[StoredHolder]:
        """Workers that have given a sign of life or hold any of `leases`."""
        now_ms = await self.now_ms()
        until_ms = dict(await self._scores(self._keys[3]))
        live = [lease for lease in leases if lease.state is not LeaseState.RELEASED]
        return [
            StoredHolder(
                id=name,
                alive_for_ms=until_ms.get(name, 0) - now_ms,
                leases=sum(lease.holder == name for lease in live),
                tokens=sum(lease.tokens for lease in live if lease.holder == name),
            )
            for name in sorted({*until_ms, *(lease.holder for lease in live)})
        ]

    async def give_back(self, lease_ids: Sequence[str], *, at_once: bool) -> int:
        """Make orphans of held leases, or free them `at_once`. How many were changed."""
        made = wire.release_op if at_once else wire.orphan_op
        changed = 0
        for chunk in _chunks(lease_ids):
            argument = wire.batch(
                [made(lease_id) for lease_id in chunk],
                holder=Holder(id="operator", lease_ttl_ms=1, orphan_grace_ms=0),
                keep_ms=KEPT_MS,
                reclaim_most=0,
            )
            reply = await self._ask("EVAL", BATCH.text, len(self._keys), *self._keys, argument)
            changed += sum(wire.decode(reply)[4])
        return changed

    async def _ask(self, *arguments: bytes | int | str) -> Any:
        assert self._connection is not None, "connect first"
        return await self._connection.ask(*arguments)

    async def _scan(self, key: bytes) -> list[tuple[str, bytes]]:
        found: dict[bytes, bytes] = {}
        cursor: bytes | str = "0"
        while True:
            cursor, page = await self._ask("HSCAN", key, cursor, "COUNT", PAGE)
            found |= dict(zip(page[::2], page[1::2], strict=True))
            if cursor == b"0":
                return [(name.decode(), value) for name, value in found.items()]

    async def _scores(self, key: bytes) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        while True:
            page = await self._ask(
                "ZRANGEBYSCORE", key, "-inf", "+inf", "WITHSCORES", "LIMIT", len(found), PAGE
            )
            found += [(name.decode(), int(score)) for name, score in zip(page[::2], page[1::2], strict=True)]
            if len(page) < 2 * PAGE:
                return found


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), AT_ONCE):
        yield names[first : first + AT_ONCE]
