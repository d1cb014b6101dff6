"""Workers that share a ledger: the one in memory, and the one in a real store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from extproc.adapters.memory_ledger import MemoryLedger
from extproc.adapters.redis_ledger.address import Address
from extproc.adapters.redis_ledger.ledger import LedgerOptions, RedisLedger
from extproc.domain.books import Books
from extproc.domain.policy import Lane, Policy, Posture
from extproc.domain.reservation import Answer, Reservation
from extproc.ports import Ledger
from tests import builders

SETTLE_TIMEOUT_S = 5.0
PATIENT_MS = 2_000
"""A budget that a busy test machine keeps."""


class SteadyClock:
    """This machine's clock, or one that a test has set wrong by `offset_us`."""

    def __init__(self, offset_us: int = 0) -> None:
        self.offset_us = offset_us

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return time.monotonic_ns() // 1000 + self.offset_us


@dataclass(slots=True)
class SetPolicy:
    """A policy source that a test can change."""

    current: Policy


def ledger_policy(
    posture: Posture = Posture.CLOSED, *, lease_ttl_ms: int = 30_000, grace_ms: int = 600_000
) -> Policy:
    """A policy whose lanes all have the same posture, and whose version is that of test reservations."""
    policy = builders.a_policy(
        lanes={lane: builders.a_lane(lane, posture=posture) for lane in Lane},
        limits=builders.a_limits(lease_ttl_ms=lease_ttl_ms, orphan_grace_ms=grace_ms),
    )
    return replace(policy, version="v1")


async def ask(ledger: Ledger, reservation: Reservation) -> Answer:
    """The ledger's answer."""
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    ledger.reserve(reservation, answered.set_result)
    return await answered


async def eventually(check: Callable[[], bool], *, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
    """Wait until `check` holds; fails if it does not in time."""
    until = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < until, "it did not happen in time"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def worker(
    url: str,
    name: str,
    *,
    policy: Policy | None = None,
    options: LedgerOptions | None = None,
    clock: SteadyClock | None = None,
) -> AsyncIterator[RedisLedger]:
    """One worker of the store at `url`, from its start to its orderly end."""
    ledger = RedisLedger(
        Address.parse(url),
        holder_id=name,
        policy=SetPolicy(policy or ledger_policy()),
        clock=clock or SteadyClock(),
        options=options or LedgerOptions(budget_ms=PATIENT_MS, domain="test"),
    )
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.stop()


@dataclass(slots=True)
class Workplace:
    """Opens workers that share one ledger; `url` is `None` for the one in memory."""

    url: str | None
    stack: AsyncExitStack
    books: Books = field(default_factory=Books)

    async def worker(self, name: str, *, policy: Policy | None = None) -> MemoryLedger | RedisLedger:
        """One more worker, with its policy."""
        if self.url is None:
            ledger = MemoryLedger(SteadyClock(), books=self.books)
            if policy is not None:
                ledger.policy_changed(policy)
            return ledger
        return await self.stack.enter_async_context(worker(self.url, name, policy=policy))


def policy_of(*reservations: Reservation) -> Policy:
    """A policy that knows the tenants, lanes and pools of these reservations, for snapshots."""
    policy = ledger_policy()
    tenants = {
        one.tenant: builders.a_tenant(id=one.tenant, tier=builders.a_tier(quota=one.quota))
        for one in reservations
    }
    return replace(policy, pools={one.pool.name: one.pool for one in reservations}, tenants=tenants)
