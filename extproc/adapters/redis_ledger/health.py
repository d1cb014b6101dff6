"""How the store has been, for metrics and operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerHealth:
    """Totals count from the start of this worker. `fault` is empty, or the kind of what went wrong last."""

    available: bool
    fault: str
    workers: int
    leases_held: int
    waiting_ops: int
    calls_total: int
    ops_total: int
    connections_total: int
    breaker_opened_total: int
    unanswered_total: int
    late_grants_total: int
    local_grants_total: int
    reasserted_total: int
    orphaned_total: int
    reclaimed_total: int
    unbooked_total: int
    settles_dropped_total: int
    failed_ops_total: int


@dataclass(slots=True)
class Totals:
    """What is counted on the way."""

    calls: int = 0
    ops: int = 0
    unanswered: int = 0
    late_grants: int = 0
    local_grants: int = 0
    reasserted: int = 0
    orphaned: int = 0
    reclaimed: int = 0
    unbooked: int = 0
    failed_ops: int = 0
