"""What is held right now, beside what may be held: the view of operators and of the idle rule."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.domain.policy import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica: its ceiling, what of it is guard band, and what is held."""

    pool: str
    replica: str
    ceiling_tokens: int
    guard_band_tokens: int
    reserved_tokens: int
    requests: int
    request_cap: int
    prefill_backlog_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneState:
    """One lane in one pool: what it may hold, what it holds, and who waits for it.

    `oldest_queued_ms` is how long the one that waits longest has waited; 0 when nobody waits.
    """

    pool: str
    lane: Lane
    limit_tokens: int
    reserved_tokens: int
    requests: int
    queued_requests: int = 0
    queued_input_tokens: int = 0
    oldest_queued_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantState:
    """One tenant: what it has in flight, and what its rates still allow (`None`: no such limit)."""

    tenant: str
    tier: str
    inflight_tokens: int
    inflight_requests: int
    tokens_remaining: int | None
    requests_remaining: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All balances at one instant of the ledger's clock.

    `orphans` are those of the `leases` whose holder has gone; `unbooked` ones hold nothing any more and wait
    for their access-log record.
    """

    at_ms: int
    replicas: tuple[ReplicaState, ...]
    lanes: tuple[LaneState, ...]
    tenants: tuple[TenantState, ...]
    leases: int
    orphans: int
    unbooked: int

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held anywhere, and nobody waits."""
        return self.leases == 0 and not any(
            (
                *(replica.reserved_tokens or replica.requests for replica in self.replicas),
                *(lane.reserved_tokens or lane.requests or lane.queued_requests for lane in self.lanes),
                *(tenant.inflight_tokens or tenant.inflight_requests for tenant in self.tenants),
            )
        )
