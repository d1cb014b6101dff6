"""What is held, by whom, and what happens to it next.

A lease always has one next moment, `due_at_ms` on the ledger's clock, and its state says what happens then:

    HELD      its holder has not renewed it in time        -> ORPHANED
    PROMISED  its holder has not been told of it in time   -> taken back, as if it had never been granted
    ORPHANED  what was left of its residence, or the grace, is over -> RELEASED: tokens and slots are free
    RELEASED  its access-log record has not come           -> forgotten: the reserved amount stays charged

Renewing makes any of them HELD again: a living holder knows that the stream is open. A release and a record
end it in either order; nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from extproc.domain.policy import Lane

RECORD_WAIT_MS = 60_000
"""How long a released lease waits for its access-log record, which normally takes milliseconds. After that
its charge stays at what was reserved: never zero, and counted."""


ALWAYS_MS = 1_000_000_000_000
"""Longer than anything lasts."""


class LeaseState(IntEnum):
    """What a lease waits for. The numbers are stored by the shared ledger."""

    HELD = 0
    ORPHANED = 1
    RELEASED = 2
    PROMISED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds leases: one worker's run, and for how long its word counts.

    A lease that is not renewed for `lease_ttl_ms` is an orphan. Envoy goes on serving an orphan's answer, so
    it stays counted for what is left of its residence, `orphan_grace_ms` at most. A holder that waits for
    room asks for its news more often than every `reply_ms`; one that does not has died.
    """

    id: str
    lease_ttl_ms: int
    orphan_grace_ms: int
    reply_ms: int = ALWAYS_MS


UNDYING = Holder(id="", lease_ttl_ms=ALWAYS_MS, orphan_grace_ms=0)
"""The holder of leases that live in the same process as their books."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a living holder knows of a lease that its ledger has lost, `age_ms` after the grant.

    `charge_units` are taken from the tenant's rate once more when the charge was never seen by this ledger
    (it was granted while the store was away); 0 otherwise.
    """

    lease_id: str
    tenant: str
    lane: Lane
    pool: str
    replica: str
    tokens: int
    charge_units: int
    rate_per_minute: int | None
    residence_ms: int
    age_ms: int
    policy_version: str


@dataclass(slots=True)
class Lease:
    """One granted reservation, until it is released and booked.

    `rate_per_minute` is `None` when nothing was charged to the tenant's token rate; otherwise
    `level_parts` is what the tenant owed right after `work_units` were charged, at `charged_at_ms` (see
    `Debt.refund`).
    """

    lease_id: str
    holder: str
    tenant: str
    lane: Lane
    pool: str
    replica: str
    tokens: int
    work_units: int
    rate_per_minute: int | None
    level_parts: int
    residence_ms: int
    granted_at_ms: int
    charged_at_ms: int
    orphan_grace_ms: int
    policy_version: str
    state: LeaseState
    due_at_ms: int

    def orphaned_until_ms(self, orphaned_at_ms: int) -> int:
        """When this lease is reclaimed if it becomes an orphan at `orphaned_at_ms`; perhaps before that."""
        return min(orphaned_at_ms + self.orphan_grace_ms, self.granted_at_ms + self.residence_ms)
