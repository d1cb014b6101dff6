"""Values that tests need, with every field defaulted: a test names only what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.domain.policy import (
    HeaderIdentity,
    Identity,
    Lane,
    LanePolicy,
    Limits,
    Model,
    Policy,
    Pool,
    Posture,
    Quota,
    Replica,
    RequestHeaderNames,
    Tenant,
    Tier,
)
from extproc.domain.reservation import Reservation


def a_quota(**changes: Any) -> Quota:
    """A quota without limits."""
    fields: dict[str, Any] = {
        "tokens_per_minute": None,
        "burst_tokens": None,
        "requests_per_minute": None,
        "inflight_tokens": None,
        "inflight_requests": None,
    }
    return Quota(**(fields | changes))


def a_tier(**changes: Any) -> Tier:
    """A tier that may use every lane."""
    fields: dict[str, Any] = {
        "name": "gold",
        "quota": a_quota(),
        "weight": 1,
        "lanes": frozenset(Lane),
    }
    return Tier(**(fields | changes))


def a_tenant(**changes: Any) -> Tenant:
    """An enabled tenant called acme."""
    fields: dict[str, Any] = {"id": "acme", "tier": a_tier(), "enabled": True, "key_sha256": ()}
    return Tenant(**(fields | changes))


def a_pool(**changes: Any) -> Pool:
    """A pool of one replica: 96,000 tokens, 10 % guard band."""
    fields: dict[str, Any] = {
        "name": "chat",
        "cluster": "chat",
        "replicas": (Replica(name="r0", ceiling_tokens=96_000),),
        "guard_band_permille": 100,
        "request_cap": 64,
        "prefill_tokens_per_s": 10_000,
        "decode_tokens_per_s": 50,
        "prefill_window_ms": 10_000,
    }
    return Pool(**(fields | changes))


def a_lane(lane: Lane, **changes: Any) -> LanePolicy:
    """A lane with room for anything that a_pool holds, and no queue."""
    fields: dict[str, Any] = {
        "lane": lane,
        "max_input_tokens": 4_096 if lane is Lane.INTERACTIVE else 64_000,
        "max_output_tokens": 1_024 if lane is Lane.INTERACTIVE else 8_000,
        "deadline_ms": 30_000,
        "residence_ms": 0,
        "share_permille": 1000,
        "queue_requests": 0,
        "queue_tokens": 0,
        "floor_permille": 0,
        "prefill_share_permille": 1000,
        "spare_replicas": 0,
        "posture": Posture.CLOSED,
    }
    return LanePolicy(**(fields | changes))


def a_model(**changes: Any) -> Model:
    """A model called tiny, whose lanes are interactive and bulk, both in the pool chat."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "aliases": (),
        "tokenizer": "tokenizer.json",
        "chat_template": None,
        "context_tokens": 32_768,
        "default_output_tokens": 512,
        "cost_factor_permille": 1000,
        "lanes": {Lane.INTERACTIVE: "chat", Lane.BULK: "chat"},
    }
    return Model(**(fields | changes))


def a_policy(
    *,
    models: tuple[Model, ...] | None = None,
    pools: tuple[Pool, ...] | None = None,
    lanes: Mapping[Lane, LanePolicy] | None = None,
    tenants: tuple[Tenant, ...] | None = None,
    identity: Identity | None = None,
    anonymous: Tenant | None = None,
    limits: Limits | None = None,
) -> Policy:
    """A policy for the tenant acme, told by the trusted header x-tenant."""
    return Policy(
        version="test",
        models={model.name: model for model in (models or (a_model(),))},
        lanes={lane: a_lane(lane) for lane in Lane} | dict(lanes or {}),
        pools={pool.name: pool for pool in (pools or (a_pool(),))},
        tenants={tenant.id: tenant for tenant in (tenants or (a_tenant(),))},
        identity=identity or HeaderIdentity(header="x-tenant"),
        anonymous=anonymous,
        limits=limits or a_limits(),
        request_headers=RequestHeaderNames(intent="x-lane-intent", deadline_ms="x-deadline-ms"),
    )


def a_limits(**changes: Any) -> Limits:
    """Limits of a small gateway."""
    fields: dict[str, Any] = {
        "body_bytes": 1 << 20,
        "json_depth": 100,
        "prefill_weight_permille": 1000,
        "lease_ttl_ms": 30_000,
        "orphan_grace_ms": 600_000,
    }
    return Limits(**(fields | changes))


def a_reservation(**changes: Any) -> Reservation:
    """A reservation of 100 input and 100 output tokens for acme, in a_pool."""
    fields: dict[str, Any] = {
        "lease_id": "lease-1",
        "tenant": "acme",
        "quota": a_quota(),
        "lane": Lane.INTERACTIVE,
        "lane_limit_tokens": 1_000_000,
        "pool": a_pool(),
        "input_tokens": 100,
        "output_tokens": 100,
        "deadline_in_ms": 60_000,
        "residence_ms": 2_000,
        "policy_version": "test",
    }
    fields |= changes
    fields.setdefault("work_units", fields["input_tokens"] + fields["output_tokens"])
    return Reservation(**fields)
