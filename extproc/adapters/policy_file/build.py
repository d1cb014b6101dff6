"""From the schema to the domain's values. Call these only with values that are free of contradictions."""

from __future__ import annotations

from pathlib import Path

from extproc.adapters.policy_file.engine_schema import OverloadSpec
from extproc.adapters.policy_file.schema import (
    NOBODY,
    FallbackSpec,
    IdentitySpec,
    ImageRuleSpec,
    LaneSpec,
    MediaRuleSpec,
    MemberSpec,
    ModelSpec,
    OverflowLane,
    PolicySpec,
    PoolSpec,
    RecordingRuleSpec,
    TierSpec,
)
from extproc.domain.budget import LARGEST_AMOUNT
from extproc.domain.media import MediaRule, Tile
from extproc.domain.policy import (
    ApiKeyIdentity,
    BreakerPolicy,
    Fallback,
    HeaderIdentity,
    Identity,
    Lane,
    LanePolicy,
    Limits,
    MetadataIdentity,
    Model,
    ModelFallback,
    OverloadPolicy,
    Policy,
    Pool,
    PoolFallback,
    ProbePolicy,
    Quota,
    RegionFallback,
    Replica,
    RequestHeaderNames,
    RetryPolicy,
    Tenant,
    Tier,
)

NOWHERE = Path("/")
"""A folder for models whose files are not looked at."""


def policy_of(spec: PolicySpec, *, base_dir: Path, version: str) -> Policy:
    """The policy that the file says. Relative paths start at `base_dir`."""
    tiers = {name: tier_of(name, tier) for name, tier in spec.tenants.tiers.items()}
    tenants = {id_: tenant_of(id_, member, tiers) for id_, member in spec.tenants.members.items()}
    anonymous = None if spec.tenants.anonymous == NOBODY else tenants[spec.tenants.anonymous]
    return Policy(
        version=version,
        models={name: model_of(name, model, base_dir=base_dir) for name, model in spec.models.items()},
        lanes={lane: lane_of(lane, lane_spec) for lane, lane_spec in spec.lanes.by_lane().items()},
        pools={name: pool_of(name, pool) for name, pool in spec.pools.items()},
        tenants=tenants,
        identity=identity_of(spec.tenants.identity),
        anonymous=anonymous,
        limits=limits_of(spec),
        request_headers=RequestHeaderNames(
            intent=spec.request_headers.intent, deadline_ms=spec.request_headers.deadline_ms
        ),
        retries=RetryPolicy(
            window_ms=spec.retries.window_ms,
            early_most=spec.retries.early_most,
            penalty_ms=spec.retries.penalty_ms,
            budget_permille=spec.retries.budget_permille,
            budget_burst=spec.retries.budget_burst,
        ),
    )


def model_of(name: str, spec: ModelSpec, *, base_dir: Path) -> Model:
    """One model, with the paths of its files made absolute."""
    template = spec.chat_template
    return Model(
        name=name,
        aliases=spec.aliases,
        fallbacks=tuple(fallback_of(fallback) for fallback in spec.fallback),
        tokenizer=str(file_path(spec.tokenizer, base_dir)),
        chat_template=None if template is None else str(file_path(template, base_dir)),
        context_tokens=spec.context_tokens,
        default_output_tokens=spec.default_output_tokens,
        cost_factor_permille=int(spec.cost_factor * 1000),
        lanes=spec.lanes.pools(),
        engine=spec.engine,
        media={kind: media_rule_of(rule) for kind, rule in spec.media.rules().items()},
    )


def media_rule_of(spec: MediaRuleSpec) -> MediaRule:
    """What one kind of media costs."""
    tile = None
    if isinstance(spec, ImageRuleSpec):
        width_px, height_px, tokens = spec.tile_width_px, spec.tile_height_px, spec.tokens_per_tile
        if width_px is not None and height_px is not None and tokens is not None:
            tile = Tile(width_px=width_px, height_px=height_px, tokens=tokens)
    return MediaRule(
        max_tokens=spec.max_tokens,
        base_tokens=spec.base_tokens if isinstance(spec, ImageRuleSpec | RecordingRuleSpec) else 0,
        tile=tile,
        tokens_per_s=spec.tokens_per_s if isinstance(spec, RecordingRuleSpec) else None,
    )


def fallback_of(spec: FallbackSpec) -> Fallback:
    """The one place that is set."""
    if spec.pool is not None:
        return PoolFallback(pool=spec.pool)
    if spec.model is not None:
        return ModelFallback(model=spec.model)
    # What names no place is refused before; models are also built from specs with mistakes, to check the rest.
    return RegionFallback(origin=spec.region or "")


def file_path(path: str, base_dir: Path) -> Path:
    """Where a file that a policy names is. Symbolic links stay: they are how mounted volumes are updated."""
    return Path(base_dir, path).absolute()


def lane_of(lane: Lane, spec: LaneSpec) -> LanePolicy:
    """One lane. Overflow has no caps; the largest amount that the arithmetic allows stands for that."""
    caps = None if isinstance(spec, OverflowLane) else spec
    return LanePolicy(
        lane=lane,
        max_input_tokens=LARGEST_AMOUNT if caps is None else caps.max_input_tokens,
        max_output_tokens=LARGEST_AMOUNT if caps is None else caps.max_output_tokens,
        deadline_ms=spec.deadline_ms,
        residence_ms=spec.residence_ms,
        share_permille=spec.share_permille,
        queue_requests=spec.queue_requests,
        queue_tokens=spec.queue_tokens,
        floor_permille=spec.floor_permille,
        prefill_share_permille=spec.prefill_share_permille,
        spare_replicas=spec.spare_replicas,
        posture=spec.posture,
    )


def pool_of(name: str, spec: PoolSpec) -> Pool:
    """One pool."""
    return Pool(
        name=name,
        cluster=name if spec.cluster is None else spec.cluster,
        replicas=tuple(
            Replica(name=replica.name, ceiling_tokens=replica.ceiling_tokens, address=replica.address)
            for replica in spec.replicas
        ),
        guard_band_permille=spec.guard_band_permille,
        request_cap=spec.request_cap,
        prefill_tokens_per_s=spec.prefill_tokens_per_s,
        decode_tokens_per_s=spec.decode_tokens_per_s,
        prefill_window_ms=spec.prefill_window_ms,
        probe=ProbePolicy(
            interval_ms=spec.probe.interval_ms,
            timeout_ms=spec.probe.timeout_ms,
            stale_ms=spec.probe.stale_ms,
            path=spec.probe.path,
        ),
        breaker=BreakerPolicy(
            failures=spec.breaker.failures,
            error_permille=spec.breaker.error_permille,
            least_requests=spec.breaker.least_requests,
            window_ms=spec.breaker.window_ms,
            open_ms=spec.breaker.open_ms,
            trial_requests=spec.breaker.trial_requests,
        ),
        overload=None if spec.overload is None else overload_of(spec.overload),
    )


def overload_of(spec: OverloadSpec) -> OverloadPolicy:
    """When a pool's lower lanes are suspended."""
    return OverloadPolicy(
        waiting_requests=spec.waiting_requests,
        kv_used_permille=spec.kv_used_permille,
        leave_permille=spec.leave_permille,
        enter_ms=spec.enter_ms,
        leave_ms=spec.leave_ms,
    )


def tier_of(name: str, spec: TierSpec) -> Tier:
    """One tier. A rate without a burst may be used one minute's worth at once."""
    return Tier(
        name=name,
        quota=Quota(
            tokens_per_minute=spec.tokens_per_minute,
            burst_tokens=spec.tokens_per_minute if spec.burst_tokens is None else spec.burst_tokens,
            requests_per_minute=spec.requests_per_minute,
            inflight_tokens=spec.inflight_tokens,
            inflight_requests=spec.inflight_requests,
        ),
        weight=spec.weight,
        lanes=frozenset(spec.lanes),
    )


def tenant_of(id_: str, spec: MemberSpec, tiers: dict[str, Tier]) -> Tenant:
    """One tenant."""
    return Tenant(id=id_, tier=tiers[spec.tier], enabled=spec.enabled, key_sha256=spec.key_sha256)


def identity_of(spec: IdentitySpec) -> Identity:
    """The one source of identity that is set."""
    if spec.header is not None:
        return HeaderIdentity(header=spec.header)
    if spec.metadata is not None:
        return MetadataIdentity(namespace=spec.metadata.namespace, path=spec.metadata.path)
    assert spec.api_key is not None, "a policy without identity is refused before"
    return ApiKeyIdentity(header=spec.api_key.header)


def limits_of(spec: PolicySpec) -> Limits:
    """The bounds of one request and of the books."""
    return Limits(
        body_bytes=spec.limits.body_bytes,
        json_depth=spec.limits.json_depth,
        prefill_weight_permille=spec.limits.prefill_weight_permille,
        lease_ttl_ms=spec.limits.lease_ttl_ms,
        orphan_grace_ms=spec.limits.orphan_grace_ms,
    )
