"""A policy as a document again, with every default filled in; and the version that names its content.

The document has the shape of a policy file: saved as one, it is the same policy with the same version.
What changes no decision is not in it or is in one order: comments, how a number is written, the order of
keys, tiers that nobody has, and the place of a tokenizer (its content counts instead).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from extproc.adapters.policy_file.schema import NOBODY
from extproc.domain.media import MediaKind, MediaRule
from extproc.domain.policy import (
    ApiKeyIdentity,
    Fallback,
    HeaderIdentity,
    Identity,
    Lane,
    LanePolicy,
    Model,
    ModelFallback,
    Policy,
    Pool,
    PoolFallback,
    Tier,
)

VERSION_BYTES = 6
"""Twelve hex digits: short enough for every log line; versions of one service do not collide by chance."""


def effective_document(policy: Policy) -> dict[str, Any]:
    """The policy in the shape of its file, in plain JSON values."""
    tiers = {tenant.tier.name: tenant.tier for tenant in policy.tenants.values()}
    limits = policy.limits
    return {
        "version": 1,
        "models": {name: _model(model) for name, model in sorted(policy.models.items())},
        "lanes": {str(lane): _lane(policy.lanes[lane]) for lane in Lane},
        "pools": {name: _pool(pool) for name, pool in sorted(policy.pools.items())},
        "tenants": {
            "identity": _identity(policy.identity),
            "anonymous": NOBODY if policy.anonymous is None else policy.anonymous.id,
            "tiers": {name: _tier(tier) for name, tier in sorted(tiers.items())},
            "members": {
                id_: {
                    "tier": tenant.tier.name,
                    "enabled": tenant.enabled,
                    "key_sha256": sorted(tenant.key_sha256),
                }
                for id_, tenant in sorted(policy.tenants.items())
            },
        },
        "limits": {
            "body_bytes": limits.body_bytes,
            "json_depth": limits.json_depth,
            "prefill_weight_permille": limits.prefill_weight_permille,
            "lease_ttl_ms": limits.lease_ttl_ms,
            "orphan_grace_ms": limits.orphan_grace_ms,
        },
        "request_headers": {
            "intent": policy.request_headers.intent,
            "deadline_ms": policy.request_headers.deadline_ms,
        },
        "retries": {
            "window_ms": policy.retries.window_ms,
            "early_most": policy.retries.early_most,
            "penalty_ms": policy.retries.penalty_ms,
            "budget_permille": policy.retries.budget_permille,
            "budget_burst": policy.retries.budget_burst,
        },
    }


def version_of(document: Mapping[str, Any], file_digests: Mapping[str, Mapping[str, str]]) -> str:
    """A short hash of an effective document, with each model's files by content."""
    models = {
        name: {key: value for key, value in model.items() if key not in ("tokenizer", "chat_template")}
        | {"files": dict(file_digests.get(name, {}))}
        for name, model in document["models"].items()
    }
    canonical = json.dumps({**document, "models": models}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=VERSION_BYTES).hexdigest()


def without_key_digests(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with key digests cut to their first characters: enough to tell, too little to attack."""
    members = {
        id_: {**member, "key_sha256": [f"{digest[:8]}…" for digest in member["key_sha256"]]}
        for id_, member in document["tenants"]["members"].items()
    }
    return {**document, "tenants": {**document["tenants"], "members": members}}


def _model(model: Model) -> dict[str, Any]:
    factor, rest = divmod(model.cost_factor_permille, 1000)
    return _given(
        {
            "aliases": sorted(model.aliases),
            "tokenizer": model.tokenizer,
            "chat_template": model.chat_template,
            "engine": str(model.engine),
            "context_tokens": model.context_tokens,
            "default_output_tokens": model.default_output_tokens,
            "cost_factor": model.cost_factor_permille / 1000 if rest else factor,
            "media": {
                str(kind): _media_rule(kind, model.media[kind]) for kind in MediaKind if kind in model.media
            }
            or None,
            "lanes": {str(lane): model.lanes[lane] for lane in Lane if lane in model.lanes},
            "fallback": [_fallback(fallback) for fallback in model.fallbacks],
        }
    )


def _media_rule(kind: MediaKind, rule: MediaRule) -> dict[str, Any]:
    tile = rule.tile
    return _given(
        {
            "max_tokens": rule.max_tokens,
            "base_tokens": rule.base_tokens if kind in (MediaKind.IMAGE, MediaKind.AUDIO) else None,
            "tile_width_px": None if tile is None else tile.width_px,
            "tile_height_px": None if tile is None else tile.height_px,
            "tokens_per_tile": None if tile is None else tile.tokens,
            "tokens_per_s": rule.tokens_per_s,
        }
    )


def _fallback(fallback: Fallback) -> dict[str, str]:
    if isinstance(fallback, PoolFallback):
        return {"pool": fallback.pool}
    if isinstance(fallback, ModelFallback):
        return {"model": fallback.model}
    return {"region": fallback.origin}


def _lane(lane: LanePolicy) -> dict[str, Any]:
    caps = {"max_input_tokens": lane.max_input_tokens, "max_output_tokens": lane.max_output_tokens}
    return {
        **({} if lane.lane is Lane.OVERFLOW else caps),
        "deadline_ms": lane.deadline_ms,
        "residence_ms": lane.residence_ms,
        "share_permille": lane.share_permille,
        "queue_requests": lane.queue_requests,
        "queue_tokens": lane.queue_tokens,
        "floor_permille": lane.floor_permille,
        "prefill_share_permille": lane.prefill_share_permille,
        "spare_replicas": lane.spare_replicas,
        "posture": str(lane.posture),
    }


def _pool(pool: Pool) -> dict[str, Any]:
    overload = {} if pool.overload is None else {"overload": _given(dataclasses.asdict(pool.overload))}
    return {
        "cluster": pool.cluster,
        # Their order stays: of two replicas with equal room, the first is taken.
        "replicas": [
            _given(
                {
                    "name": replica.name,
                    "address": replica.address,
                    "ceiling_tokens": replica.ceiling_tokens,
                }
            )
            for replica in pool.replicas
        ],
        "guard_band_permille": pool.guard_band_permille,
        "request_cap": pool.request_cap,
        "prefill_tokens_per_s": pool.prefill_tokens_per_s,
        "decode_tokens_per_s": pool.decode_tokens_per_s,
        "prefill_window_ms": pool.prefill_window_ms,
        # The domain's names are the file's.
        "probe": dataclasses.asdict(pool.probe),
        "breaker": dataclasses.asdict(pool.breaker),
        **overload,
    }


def _identity(identity: Identity) -> dict[str, Any]:
    if isinstance(identity, HeaderIdentity):
        return {"header": identity.header}
    if isinstance(identity, ApiKeyIdentity):
        return {"api_key": {"header": identity.header}}
    return {"metadata": {"namespace": identity.namespace, "path": list(identity.path)}}


def _tier(tier: Tier) -> dict[str, Any]:
    return _given(
        {
            "tokens_per_minute": tier.quota.tokens_per_minute,
            "burst_tokens": tier.quota.burst_tokens,
            "requests_per_minute": tier.quota.requests_per_minute,
            "inflight_tokens": tier.quota.inflight_tokens,
            "inflight_requests": tier.quota.inflight_requests,
            "weight": tier.weight,
            "lanes": [str(lane) for lane in Lane if lane in tier.lanes],
        }
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
