"""The ledger's balances as metric values."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import AsyncIterator

from extproc.adapters.telemetry import instruments as i
from extproc.domain.snapshot import Snapshot

Balance = tuple[str, tuple[str, ...], int]
"""Instrument name, labels, value."""


SLICE_TENANTS = 500
"""Tenants that are looked at before others get their turn."""


async def balance_readings(snapshot: Snapshot, *, top_tenants: int) -> AsyncIterator[Balance]:
    """What is held, what may be held and what is left, per replica, lane and tier.

    Tenants appear only as sums of their tier, and by name the `top_tenants` that hold most.
    """
    yield i.LEASES.name, (), snapshot.leases
    yield i.ORPHANS.name, (), snapshot.orphans
    yield i.UNBOOKED_LEASES.name, (), snapshot.unbooked
    for replica in snapshot.replicas:
        labels = (replica.pool, replica.replica)
        limit_tokens = replica.ceiling_tokens - replica.guard_band_tokens
        yield i.REPLICA_CEILING.name, labels, replica.ceiling_tokens
        yield i.REPLICA_GUARD.name, labels, replica.guard_band_tokens
        yield i.REPLICA_LIMIT.name, labels, limit_tokens
        yield i.REPLICA_RESERVED.name, labels, replica.reserved_tokens
        yield i.REPLICA_HEADROOM.name, labels, max(0, limit_tokens - replica.reserved_tokens)
        yield i.REPLICA_REQUESTS.name, labels, replica.requests
        yield i.REPLICA_REQUEST_CAP.name, labels, replica.request_cap
        yield i.REPLICA_PREFILL.name, labels, replica.prefill_backlog_tokens
    for lane in snapshot.lanes:
        labels = (lane.pool, str(lane.lane))
        yield i.LANE_LIMIT.name, labels, lane.limit_tokens
        yield i.LANE_RESERVED.name, labels, lane.reserved_tokens
        yield i.LANE_HEADROOM.name, labels, max(0, lane.limit_tokens - lane.reserved_tokens)
        yield i.LANE_REQUESTS.name, labels, lane.requests
        yield i.QUEUE_REQUESTS.name, labels, lane.queued_requests
        yield i.QUEUE_TOKENS.name, labels, lane.queued_input_tokens
        yield i.QUEUE_AGE.name, labels, lane.oldest_queued_ms
    async for balance in _tenants(snapshot, top_tenants):
        yield balance


async def _tenants(snapshot: Snapshot, top_tenants: int) -> AsyncIterator[Balance]:
    tokens: defaultdict[str, int] = defaultdict(int)
    requests: defaultdict[str, int] = defaultdict(int)
    active: defaultdict[str, int] = defaultdict(int)
    largest: list[tuple[int, str, str]] = []
    for number, tenant in enumerate(snapshot.tenants, start=1):
        tokens[tenant.tier] += tenant.inflight_tokens
        requests[tenant.tier] += tenant.inflight_requests
        active[tenant.tier] += bool(tenant.inflight_tokens or tenant.inflight_requests)
        if top_tenants > 0 and tenant.inflight_tokens > 0:
            entry = (tenant.inflight_tokens, tenant.tenant, tenant.tier)
            if len(largest) < top_tenants:
                heapq.heappush(largest, entry)
            else:
                heapq.heappushpop(largest, entry)
        if number % SLICE_TENANTS == 0:
            await asyncio.sleep(0)
    for tier in tokens:
        yield i.TIER_TOKENS.name, (tier,), tokens[tier]
        yield i.TIER_REQUESTS.name, (tier,), requests[tier]
        yield i.TIER_TENANTS.name, (tier,), active[tier]
    for held_tokens, name, tier in sorted(largest, reverse=True):
        yield i.TENANT_TOKENS.name, (name, tier), held_tokens
