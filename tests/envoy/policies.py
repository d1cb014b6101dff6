"""Policies for gateways: small ones, built by hand, with one thing at a time that a test varies."""

from __future__ import annotations

from extproc.domain.policy import (
    ApiKeyIdentity,
    Identity,
    Lane,
    LanePolicy,
    Limits,
    Model,
    Policy,
    Pool,
    Posture,
    Replica,
    RequestHeaderNames,
)


def lane_policy(lane: Lane, *, residence_ms: int = 1_000, queue_requests: int = 100) -> LanePolicy:
    return LanePolicy(
        lane=lane,
        max_input_tokens=16_000,
        max_output_tokens=1_000,
        deadline_ms=5_000,
        residence_ms=residence_ms,
        share_permille=1_000,
        queue_requests=queue_requests,
        queue_tokens=100_000,
        floor_permille=0,
        prefill_share_permille=1_000,
        posture=Posture.LOCAL,
    )


def pool(
    name: str = "main",
    *,
    cluster: str | None = None,
    addresses: tuple[str | None, ...] = ("127.0.0.1:8001",),
    request_cap: int = 64,
) -> Pool:
    return Pool(
        name=name,
        cluster=cluster or f"{name}-replicas",
        replicas=tuple(
            Replica(name=f"{name}-{index}", ceiling_tokens=96_000, address=address)
            for index, address in enumerate(addresses)
        ),
        guard_band_permille=100,
        request_cap=request_cap,
        prefill_tokens_per_s=8_000,
        decode_tokens_per_s=40,
        prefill_window_ms=2_000,
    )


def policy(
    *pools: Pool,
    identity: Identity | None = None,
    body_bytes: int = 1 << 20,
    context_tokens: int = 32_768,
    residence_ms: int = 1_000,
    queue_requests: int = 100,
    header_names: RequestHeaderNames | None = None,
) -> Policy:
    """A policy with one model, served in every lane by the first pool."""
    pools = pools or (pool(),)
    model = Model(
        name="tiny",
        aliases=(),
        tokenizer="tiny",
        chat_template=None,
        context_tokens=context_tokens,
        default_output_tokens=None,
        cost_factor_permille=1_000,
        lanes=dict.fromkeys(Lane, pools[0].name),
    )
    return Policy(
        version="0123456789ab",
        models={model.name: model},
        lanes={
            lane: lane_policy(lane, residence_ms=residence_ms, queue_requests=queue_requests) for lane in Lane
        },
        pools={one.name: one for one in pools},
        tenants={},
        identity=identity or ApiKeyIdentity(header="authorization"),
        anonymous=None,
        limits=Limits(
            body_bytes=body_bytes,
            json_depth=64,
            prefill_weight_permille=250,
            lease_ttl_ms=30_000,
            orphan_grace_ms=60_000,
        ),
        request_headers=header_names
        or RequestHeaderNames(intent="x-request-intent", deadline_ms="x-request-deadline-ms"),
    )
