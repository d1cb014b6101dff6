"""Policies for gateways, in terms of what Envoy's configuration depends on."""

from __future__ import annotations

from typing import Any

from extproc.domain.policy import Lane, Policy, Pool, Replica
from tests.builders import a_lane, a_limits, a_model, a_policy, a_pool


def pool(
    name: str = "main", *, addresses: tuple[str | None, ...] = ("127.0.0.1:8001",), **changes: Any
) -> Pool:
    """A pool with one replica per address, behind a cluster named after it."""
    replicas = tuple(
        Replica(name=f"{name}-{index}", ceiling_tokens=96_000, address=address)
        for index, address in enumerate(addresses)
    )
    return a_pool(**{"name": name, "cluster": f"{name}-replicas", "replicas": replicas} | changes)


def policy(
    *pools: Pool,
    body_bytes: int = 1 << 20,
    context_tokens: int = 32_768,
    lane: dict[str, Any] | None = None,
    **changes: Any,
) -> Policy:
    """A policy with one model that the first pool serves in every lane; `lane` changes all lanes alike."""
    pools = pools or (pool(),)
    return a_policy(
        models=(a_model(context_tokens=context_tokens, lanes=dict.fromkeys(Lane, pools[0].name)),),
        pools=pools,
        lanes={one: a_lane(one, **(lane or {})) for one in Lane},
        limits=a_limits(body_bytes=body_bytes),
        **changes,
    )
