"""JSON documents of the admin port, as bytes, built in slices that give others their turn."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, TypeVar

import orjson

from extproc.adapters.admin_http.sources import ServiceStatus
from extproc.domain.load import PoolLoad, ReplicaLoad
from extproc.domain.policy import (
    ApiKeyIdentity,
    HeaderIdentity,
    Identity,
    Lane,
    MetadataIdentity,
    Policy,
    Quota,
    Tenant,
    Tier,
)
from extproc.domain.snapshot import Snapshot, TenantState

SLICE_ITEMS = 200
"""Items that are handled before others get their turn: some hundred microseconds."""

SLICE_MEMBERS = 50
"""The same for members of a document that are rendered one by one."""

_Item = TypeVar("_Item")


async def in_slices(items: Iterable[_Item], size: int = SLICE_ITEMS) -> AsyncIterator[_Item]:
    """The items, with a pause for others after each `size` of them."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % size == 0:
            await asyncio.sleep(0)


async def state_document(
    status: ServiceStatus,
    policy: Policy,
    snapshot: Snapshot | None,
    ledger_error: str | None,
    *,
    load: Iterable[PoolLoad | ReplicaLoad] = (),
    most_tenants: int,
    tenant: str | None,
) -> bytes:
    """The state of the service and of its ledger.

    Tenants are those that hold most, at most `most_tenants`, or the one asked for; `tenants_total` tells how
    many there are.
    """
    document: dict[str, Any] = {
        "service": {
            "version": status.version,
            "now_ms": status.now_ms,
            "started_at_ms": status.started_at_ms,
            "uptime_s": max(0, status.now_ms - status.started_at_ms) // 1000,
            "open_streams": status.open_streams,
            "draining": status.draining,
            "ledger": status.ledger,
            **status.details,
        },
        "policy": {
            "version": policy.version,
            "loaded_at_ms": status.policy_loaded_at_ms,
            "last_reload_error": status.policy_error,
        },
        "ledger_error": ledger_error,
    }
    if snapshot is not None:
        tenants = await _tenants(snapshot, most_tenants=most_tenants, tenant=tenant)
        document |= {
            "at_ms": snapshot.at_ms,
            "idle": _is_idle(snapshot),
            "leases": snapshot.leases,
            "unbooked": snapshot.unbooked,
            "orphans": snapshot.orphans,
            "pools": await with_load(_pools(snapshot, policy), load),
            "tenants": [_tenant_state(one) for one in tenants],
            "tenants_total": len(snapshot.tenants),
        }
    return orjson.dumps(document)


async def policy_document(policy: Policy) -> bytes:
    """The policy in force, without the digests of keys. Long lists are built in slices."""
    tiers = {tier.name: tier for tier in await _tiers(policy)}
    parts = {
        "version": orjson.dumps(policy.version),
        "models": await _object(policy.models, _model),
        "lanes": orjson.dumps({str(lane): row for lane, row in policy.lanes.items()}),
        "pools": await _object(policy.pools, _as_it_is),
        "tiers": await _object(tiers, _tier),
        "identity": orjson.dumps(_identity(policy.identity)),
        "anonymous": orjson.dumps(None if policy.anonymous is None else _tenant(policy.anonymous)),
        "limits": orjson.dumps(policy.limits),
        "request_headers": orjson.dumps(policy.request_headers),
        "tenants": await _object(policy.tenants, _tenant),
    }
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), part) for name, part in parts.items()) + b"}"


async def _object(items: Mapping[str, _Item], shown: Callable[[_Item], Any]) -> bytes:
    """A JSON object with a member for each item, built in slices."""
    members = [
        orjson.dumps(name) + b":" + orjson.dumps(shown(item))
        async for name, item in in_slices(items.items(), SLICE_MEMBERS)
    ]
    return b"{" + b",".join(members) + b"}"


def _as_it_is(value: Any) -> Any:
    return value


async def _tenants(snapshot: Snapshot, *, most_tenants: int, tenant: str | None) -> list[TenantState]:
    if tenant is not None:
        return [one async for one in in_slices(snapshot.tenants, 1_000) if one.tenant == tenant]
    largest: list[tuple[int, int, TenantState]] = []
    number = 0
    async for one in in_slices(snapshot.tenants, 1_000):
        number += 1
        entry = (one.inflight_tokens, -number, one)
        if len(largest) < most_tenants:
            heapq.heappush(largest, entry)
        elif largest and entry > largest[0]:
            heapq.heapreplace(largest, entry)
    return [one for _, _, one in sorted(largest, reverse=True)]


def _is_idle(snapshot: Snapshot) -> bool:
    """`Snapshot.is_idle` without the walk through all tenants, which hold only what a replica holds."""
    return snapshot.leases == 0 and not any(
        replica.reserved_tokens or replica.requests for replica in snapshot.replicas
    )


def _pools(snapshot: Snapshot, policy: Policy) -> list[dict[str, Any]]:
    pools: dict[str, dict[str, Any]] = {}
    for replica in snapshot.replicas:
        pool = pools.setdefault(replica.pool, _empty_pool(replica.pool, policy))
        limit_tokens = replica.ceiling_tokens - replica.guard_band_tokens
        pool["ceiling_tokens"] += replica.ceiling_tokens
        pool["guard_band_tokens"] += replica.guard_band_tokens
        pool["limit_tokens"] += limit_tokens
        pool["reserved_tokens"] += replica.reserved_tokens
        pool["requests"] += replica.requests
        pool["request_cap"] += replica.request_cap
        pool["replicas"].append(
            {
                "replica": replica.replica,
                "ceiling_tokens": replica.ceiling_tokens,
                "guard_band_tokens": replica.guard_band_tokens,
                "limit_tokens": limit_tokens,
                "reserved_tokens": replica.reserved_tokens,
                "headroom_tokens": max(0, limit_tokens - replica.reserved_tokens),
                "requests": replica.requests,
                "request_cap": replica.request_cap,
                "prefill_backlog_tokens": replica.prefill_backlog_tokens,
            }
        )
    for lane in snapshot.lanes:
        pool = pools.setdefault(lane.pool, _empty_pool(lane.pool, policy))
        pool["lanes"].append(
            {
                "lane": str(lane.lane),
                "limit_tokens": lane.limit_tokens,
                "reserved_tokens": lane.reserved_tokens,
                "headroom_tokens": max(0, lane.limit_tokens - lane.reserved_tokens),
                "requests": lane.requests,
                "queued_requests": lane.queued_requests,
                "queued_input_tokens": lane.queued_input_tokens,
                "oldest_queued_ms": lane.oldest_queued_ms,
            }
        )
    return list(pools.values())


async def with_load(
    pools: list[dict[str, Any]], loads: Iterable[PoolLoad | ReplicaLoad]
) -> list[dict[str, Any]]:
    """The pools, with what is known of their engines where anything is."""
    known: dict[str, PoolLoad] = {}
    engines: dict[tuple[str, str], dict[str, Any]] = {}
    async for one in in_slices(loads, SLICE_MEMBERS):
        if isinstance(one, ReplicaLoad):
            engines[one.pool, one.replica] = _engine(one)
        else:
            known[one.pool] = one
    for pool in pools:
        found = known.get(pool["pool"])
        if found is None:
            continue
        pool["pressure_permille"] = found.pressure_permille
        for replica in pool["replicas"]:
            replica["engine"] = engines.get((found.pool, replica["replica"]))
        for lane in pool["lanes"]:
            lane["suspended"] = found.lanes.get(Lane(lane["lane"]), False)
    return pools


def _engine(load: ReplicaLoad) -> dict[str, Any]:
    """What is known of one engine; what it does not tell, or what is too old to be believed, is null."""
    signal = load.signal
    return {
        "breaker": str(load.breaker),
        "breaker_wait_ms": load.breaker_wait_ms,
        "is_probed": load.is_probed,
        "is_stale": load.is_stale,
        "age_ms": load.age_ms,
        "waiting_requests": None if signal is None else signal.waiting_requests,
        "running_requests": None if signal is None else signal.running_requests,
        "kv_used_permille": None if signal is None else signal.kv_used_permille,
        "probes": {str(result): number for result, number in load.probes.items()},
    }


def _empty_pool(name: str, policy: Policy) -> dict[str, Any]:
    pool = policy.pools.get(name)
    return {
        "pool": name,
        "cluster": pool.cluster if pool is not None else None,
        "ceiling_tokens": 0,
        "guard_band_tokens": 0,
        "limit_tokens": 0,
        "reserved_tokens": 0,
        "requests": 0,
        "request_cap": 0,
        "replicas": [],
        "lanes": [],
    }


def _tenant_state(tenant: TenantState) -> Mapping[str, Any]:
    return {
        "tenant": tenant.tenant,
        "tier": tenant.tier,
        "inflight_tokens": tenant.inflight_tokens,
        "inflight_requests": tenant.inflight_requests,
        "tokens_remaining": tenant.tokens_remaining,
        "requests_remaining": tenant.requests_remaining,
    }


async def _tiers(policy: Policy) -> list[Tier]:
    tiers: dict[str, Tier] = {}
    async for tenant in in_slices(policy.tenants.values(), 1_000):
        tiers.setdefault(tenant.tier.name, tenant.tier)
    if policy.anonymous is not None:
        tiers.setdefault(policy.anonymous.tier.name, policy.anonymous.tier)
    return list(tiers.values())


def _tier(tier: Tier) -> dict[str, Any]:
    quota: Quota = tier.quota
    return {"quota": quota, "weight": tier.weight, "lanes": sorted(map(str, tier.lanes))}


def _tenant(tenant: Tenant) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "tier": tenant.tier.name,
        "enabled": tenant.enabled,
        "keys": len(tenant.key_sha256),
    }


def _model(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "aliases": model.aliases,
        "tokenizer": model.tokenizer,
        "chat_template": model.chat_template,
        "context_tokens": model.context_tokens,
        "default_output_tokens": model.default_output_tokens,
        "cost_factor_permille": model.cost_factor_permille,
        "lanes": {str(lane): pool for lane, pool in model.lanes.items()},
    }


def _identity(identity: Identity) -> dict[str, Any]:
    match identity:
        case HeaderIdentity(header=header):
            return {"kind": "header", "header": header}
        case ApiKeyIdentity(header=header):
            return {"kind": "api_key", "header": header}
        case MetadataIdentity(namespace=namespace, path=path):
            return {"kind": "metadata", "namespace": namespace, "path": path}
