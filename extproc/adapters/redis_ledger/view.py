"""The stored balances beside the limits of a policy: the shared ledger's half of `Snapshot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from extproc.adapters.redis_ledger import wire
from extproc.domain.policy import Policy
from extproc.domain.snapshot import LaneState, ReplicaState, Snapshot, TenantState


def fields_of(policy: Policy) -> list[str]:
    """The stored fields that a snapshot of `policy` needs."""
    fields = [wire.LEASE_COUNTS_FIELD]
    for pool in policy.pools.values():
        fields += [wire.replica_field(pool.name, replica.name) for replica in pool.replicas]
        fields += [wire.lane_field(pool.name, lane) for lane in policy.lanes]
    return fields + [wire.tenant_field(tenant) for tenant in policy.tenants]


def snapshot_of(
    stored: Mapping[str, Sequence[int]],
    waits: Sequence[tuple[str, str, int, int, int]],
    policy: Policy,
    now_ms: int,
) -> Snapshot:
    """Every balance beside its limit.

    `waits` tells of each pool's lane how many wait, with how much input, and for how long the oldest has.
    """
    waiting = {(pool, lane): numbers for pool, lane, *numbers in waits}
    replicas: list[ReplicaState] = []
    lanes: list[LaneState] = []
    for pool in policy.pools.values():
        for replica in pool.replicas:
            book = wire.replica_book_of(stored[wire.replica_field(pool.name, replica.name)])
            replicas.append(
                ReplicaState(
                    pool=pool.name,
                    replica=replica.name,
                    ceiling_tokens=replica.ceiling_tokens,
                    guard_band_tokens=pool.guard_band_tokens(replica),
                    reserved_tokens=book.held.tokens,
                    requests=book.held.requests,
                    request_cap=pool.request_cap,
                    prefill_backlog_tokens=book.backlog_tokens(pool, now_ms),
                )
            )
        for lane, lane_policy in policy.lanes.items():
            held = wire.held_of(stored[wire.lane_field(pool.name, lane)])
            queued_requests, queued_input_tokens, oldest_queued_ms = waiting.get((pool.name, lane), (0, 0, 0))
            lanes.append(
                LaneState(
                    pool=pool.name,
                    lane=lane,
                    limit_tokens=pool.lane_limit_tokens(lane_policy.share_permille),
                    reserved_tokens=held.tokens,
                    requests=held.requests,
                    queued_requests=queued_requests,
                    queued_input_tokens=queued_input_tokens,
                    oldest_queued_ms=oldest_queued_ms,
                )
            )
    tenants: list[TenantState] = []
    for tenant in policy.tenants.values():
        tenant_book = wire.tenant_book_of(stored[wire.tenant_field(tenant.id)])
        quota = tenant.tier.quota
        token_rate, request_rate = quota.tokens_per_minute, quota.requests_per_minute
        balance = wire.balance_of(
            quota,
            tenant_book.token_debt.parts_at(token_rate, now_ms) if token_rate is not None else 0,
            tenant_book.request_debt.parts_at(request_rate, now_ms) if request_rate is not None else 0,
        )
        tenants.append(
            TenantState(
                tenant=tenant.id,
                tier=tenant.tier.name,
                inflight_tokens=tenant_book.held.tokens,
                inflight_requests=tenant_book.held.requests,
                tokens_remaining=balance.tokens_remaining,
                requests_remaining=balance.requests_remaining,
            )
        )
    held_count, orphaned, released, promised = stored[wire.LEASE_COUNTS_FIELD]
    return Snapshot(
        at_ms=now_ms,
        replicas=tuple(replicas),
        lanes=tuple(lanes),
        tenants=tuple(tenants),
        leases=held_count + orphaned + promised,
        orphans=orphaned,
        unbooked=released,
    )
