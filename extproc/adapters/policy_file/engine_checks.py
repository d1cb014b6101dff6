"""What could never work, or is likely not meant, in what a policy says about asking engines.

The rules for checks are those of `serving_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.adapters.policy_file.problems import Finding, Path
from extproc.adapters.policy_file.schema import ModelSpec, PolicySpec, PoolSpec
from extproc.adapters.policy_file.serving_checks import Check
from extproc.domain.policy import Engine, Lane

MOST_PROBES_PER_S = 200
"""Each costs a worker half a millisecond: at this rate a tenth of its time."""

TELL_NO_CACHE = frozenset({Engine.TGI, Engine.LLAMA_CPP})


def probes(spec: PolicySpec) -> Iterator[Finding]:
    """A reading is still fresh when the next one comes, and asking does not keep a worker busy."""
    for name, pool in spec.pools.items():
        rules = pool.probe
        at: Path = ("pools", name, "probe")
        apart_ms = rules.interval_ms * 5 // 4 + rules.timeout_ms
        if rules.stale_ms < apart_ms:
            yield Finding(
                path=(*at, "stale_ms"),
                message=f"two readings may be {apart_ms} ms apart (interval_ms and a quarter of it, and "
                "timeout_ms), so good ones would not be believed; raise it to that or more, better twice that",
                value=rules.stale_ms,
                about=(at,),
            )
        if "probe" in pool.model_fields_set and _asked(pool) == 0:
            yield Finding(
                path=at,
                message="has no effect: no replica of the pool has an address",
                about=(at, ("pools", name, "replicas")),
                is_warning=True,
            )
    per_s = sum(_asked(pool) * 1000 / pool.probe.interval_ms for pool in spec.pools.values())
    if per_s > MOST_PROBES_PER_S:
        yield Finding(
            path=("pools",),
            message=f"each worker asks {sum(map(_asked, spec.pools.values()))} replicas for their load, {per_s:.0f} "
            "times per second together, which costs a tenth of its time or more; raise probe.interval_ms",
            is_warning=True,
        )


def overload(spec: PolicySpec) -> Iterator[Finding]:
    """There is a threshold, somebody who tells, and a lane to suspend."""
    for name, pool in spec.pools.items():
        rules = pool.overload
        if rules is None:
            continue
        at: Path = ("pools", name, "overload")
        thresholds = (rules.waiting_requests, rules.kv_used_permille)
        if thresholds == (None, None):
            yield Finding(
                path=at, message="has no threshold; give waiting_requests, kv_used_permille, or both"
            )
            continue
        about: tuple[Path, ...] = (at, ("pools", name, "replicas"), ("models",))
        models = [model for model in spec.models.values() if _lanes_to(name, model)]
        lanes = {lane for model in models for lane in _lanes_to(name, model)}
        if _asked(pool) == 0:
            message = "has no effect: no replica of the pool has an address, so none is asked for its load"
        elif models and lanes <= {Lane.INTERACTIVE}:
            message = "has no effect: only interactive requests come here, and those are never suspended"
        elif (
            models
            and rules.waiting_requests is None
            and all(model.engine in TELL_NO_CACHE for model in models)
        ):
            message = "has no effect: these engines tell no use of their KV cache; give waiting_requests"
        else:
            continue
        yield Finding(path=at, message=message, about=about, is_warning=True)


def _asked(pool: PoolSpec) -> int:
    return sum(replica.address is not None for replica in pool.replicas)


def _lanes_to(pool: str, model: ModelSpec) -> set[Lane]:
    """The lanes of a model that come to a pool, by themselves or for want of room elsewhere."""
    lanes = model.lanes.pools()
    if any(fallback.pool == pool for fallback in model.fallback):
        return set(lanes)
    return {lane for lane, its_pool in lanes.items() if its_pool == pool}


ENGINE_CHECKS: tuple[Check, ...] = (probes, overload)
