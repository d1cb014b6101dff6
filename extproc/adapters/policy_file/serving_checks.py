"""Contradictions between models, lanes, pools and limits: what could never work, and what is likely not meant.

Each check is a function from the whole policy to findings. It names in `about` every value it concludes
from, and may assume nothing but the schema.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from extproc.adapters.policy_file.build import NOWHERE, lane_of, model_of, pool_of
from extproc.adapters.policy_file.problems import ABSENT, Finding, Path, quoted
from extproc.adapters.policy_file.schema import (
    MOST_FALLBACKS,
    MOST_REPLICAS,
    FallbackSpec,
    ModelSpec,
    PolicySpec,
)
from extproc.domain.demand import demand_of
from extproc.domain.policy import Lane, LanePolicy, Pool

SMALLEST_REQUEST_TOKENS = 2
"""One token in and one token out: a limit below this refuses everything."""

Check = Callable[[PolicySpec], Iterator[Finding]]


def something_to_serve(spec: PolicySpec) -> Iterator[Finding]:
    """There are models and pools, each pool has a replica, and each model is served in some lane."""
    if not spec.models:
        yield Finding(path=("models",), message="has no model; add at least one")
    if not spec.pools:
        yield Finding(path=("pools",), message="has no pool; add at least one")
    for name, pool in spec.pools.items():
        if not pool.replicas:
            yield Finding(path=("pools", name, "replicas"), message="has no replica; list at least one")
        if len(pool.replicas) > MOST_REPLICAS:
            yield Finding(
                path=("pools", name, "replicas"),
                message=f"lists {len(pool.replicas)} replicas; split the pool in parts of at most {MOST_REPLICAS}",
            )
    for name, model in spec.models.items():
        if not model.lanes.pools():
            yield Finding(
                path=("models", name, "lanes"),
                message="serves no lane; name a pool for at least one of interactive, bulk and overflow",
            )


def model_names(spec: PolicySpec) -> Iterator[Finding]:
    """A name that clients send stands for one model."""
    owners: dict[str, Path] = {name: ("models", name) for name in spec.models}
    for name, model in spec.models.items():
        for position, alias in enumerate(model.aliases):
            path: Path = ("models", name, "aliases", position)
            owner = owners.setdefault(alias, path)
            if owner == path:
                continue
            if owner[1] == name:
                remedy = "repeats a name of the same model; remove it"
            elif len(owner) == 2:
                remedy = f"is the name of another model; remove it, or rename model {quoted(alias)}"
            else:
                remedy = f"already stands for model {quoted(str(owner[1]))}; remove it from one of the two"
            # That another model has this name holds whatever else is wrong with that model.
            about = (path,) if len(owner) == 2 else (path, owner)
            yield Finding(path=path, message=remedy, value=alias, about=about)


def model_tokens(spec: PolicySpec) -> Iterator[Finding]:
    """A model's output default leaves room for a prompt, and some lane takes a request that uses it."""
    for name, model in spec.models.items():
        default, window = model.default_output_tokens, model.context_tokens
        path: Path = ("models", name, "default_output_tokens")
        if window < SMALLEST_REQUEST_TOKENS:
            yield Finding(
                path=("models", name, "context_tokens"),
                message="leaves no room for a prompt and an answer; give the engine's context window",
                value=window,
            )
        elif default is not None and default >= window:
            yield Finding(
                path=path,
                message=f"leaves no room for a prompt in a window of {window} tokens; "
                "lower it, or leave it out to allow whatever the window leaves",
                value=default,
                about=(path, ("models", name, "context_tokens")),
            )
        else:
            yield from _default_output(spec, name, model, path)


def _default_output(spec: PolicySpec, name: str, model: ModelSpec, path: Path) -> Iterator[Finding]:
    served = {lane: pool for lane, pool in model.lanes.pools().items() if _has_replicas(spec, pool)}
    if not served or len(served) < len(model.lanes.pools()):
        return
    demand = demand_of(
        (1,), output_limit_tokens=None, choices=1, model=model_of(name, model, base_dir=NOWHERE)
    )
    lanes = spec.lanes.by_lane()
    for lane, pool_name in served.items():
        policy = lane_of(lane, lanes[lane])
        largest = _largest_request_tokens(pool_of(pool_name, spec.pools[pool_name]), policy)
        if demand.output_tokens <= policy.max_output_tokens and demand.total_tokens <= largest:
            return
    yield Finding(
        path=path,
        message=f"a request that sets no output limit counts as {demand.output_tokens} output tokens, "
        "and no lane of the model takes that many: it is answered 413. Set it to the limit that the engine "
        "applies by itself, or raise max_output_tokens of a lane",
        value=ABSENT if model.default_output_tokens is None else model.default_output_tokens,
        about=(path, ("models", name), *(("lanes", lane) for lane in served), *_pool_paths(served.values())),
        is_warning=True,
    )


def pool_references(spec: PolicySpec) -> Iterator[Finding]:
    """Lanes lead to pools that exist, and every pool and every lane that is described is used."""
    used: set[str] = set()
    routed: set[Lane] = set()
    for name, model in spec.models.items():
        for lane, pool in model.lanes.pools().items():
            used.add(pool)
            routed.add(lane)
            if pool not in spec.pools:
                path: Path = ("models", name, "lanes", lane)
                yield Finding(
                    path=path,
                    message=unknown("pool", pool, spec.pools),
                    value=pool,
                    about=(path, ("pools", pool)),
                )
        used.update(fallback.pool for fallback in model.fallback if fallback.pool is not None)
    for pool in spec.pools:
        if pool not in used:
            yield Finding(
                path=("pools", pool),
                message="no model leads here; name it in a model's lanes or remove it",
                about=(("models",), ("pools", pool)),
                is_warning=True,
            )
    for described in sorted(spec.lanes.model_fields_set - routed):
        yield Finding(
            path=("lanes", described),
            message="no model is served in this lane; give it a pool in a model's lanes or remove it",
            about=(("models",), ("lanes", described)),
            is_warning=True,
        )


def fallbacks(spec: PolicySpec) -> Iterator[Finding]:
    """A fallback names one place, which exists, is not where the request was already, and is listed once."""
    for name, model in spec.models.items():
        at: Path = ("models", name, "fallback")
        if len(model.fallback) > MOST_FALLBACKS:
            yield Finding(
                path=at, message=f"lists {len(model.fallback)} places; keep at most {MOST_FALLBACKS}"
            )
        seen: dict[FallbackSpec, Path] = {}
        for position, fallback in enumerate(model.fallback):
            path: Path = (*at, position)
            given = [key for key in ("pool", "model", "region") if getattr(fallback, key) is not None]
            if len(given) != 1:
                found = f"has {' and '.join(given)}" if given else "names no place"
                yield Finding(path=path, message=f"{found}; give exactly one of pool, model and region")
                continue
            first = seen.setdefault(fallback, path)
            if first != path:
                yield Finding(
                    path=path, message="is listed twice; each place is tried once", about=(path, first)
                )
            if fallback.pool is not None:
                yield from _fallback_pool(spec, name, fallback.pool, (*path, "pool"))
            if fallback.model is not None:
                yield from _fallback_model(spec, name, fallback.model, (*path, "model"))


def _fallback_pool(spec: PolicySpec, name: str, pool: str, path: Path) -> Iterator[Finding]:
    if pool not in spec.pools:
        message = unknown("pool", pool, spec.pools)
        yield Finding(path=path, message=message, value=pool, about=(path, ("pools", pool)))
    elif set(spec.models[name].lanes.pools().values()) == {pool}:
        yield Finding(
            path=path,
            message="is where every lane of the model leads already; name another pool",
            value=pool,
            about=(path, ("models", name, "lanes")),
        )


def _fallback_model(spec: PolicySpec, name: str, model: str, path: Path) -> Iterator[Finding]:
    if model == name:
        yield Finding(path=path, message="is the model itself; name another one", value=model)
    elif model not in spec.models:
        owner = next((one for one, other in spec.models.items() if model in other.aliases), None)
        message = (
            unknown("model", model, spec.models)
            if owner is None
            else f"is another name of model {quoted(owner)}; write that"
        )
        yield Finding(path=path, message=message, value=model, about=(path, ("models", model)))


def replicas_are_distinct(spec: PolicySpec) -> Iterator[Finding]:
    """An engine is in one place only: counted twice, it would be filled twice."""
    clusters: dict[str, str] = {}
    addresses: dict[str, Path] = {}
    for name, pool in spec.pools.items():
        cluster = name if pool.cluster is None else pool.cluster
        other = clusters.setdefault(cluster, name)
        if other != name:
            path: Path = ("pools", name, "cluster")
            yield Finding(
                path=path,
                message=f"is also the cluster of pool {quoted(other)}, so its engines would be filled twice; "
                "use one pool for both, or two clusters",
                value=cluster,
                about=(path, ("pools", other, "cluster")),
            )
        names: dict[str, int] = {}
        for position, replica in enumerate(pool.replicas):
            path = ("pools", name, "replicas", position)
            first = names.setdefault(replica.name, position)
            if first != position:
                yield Finding(
                    path=(*path, "name"),
                    message="is the name of another replica of this pool; rename one of the two",
                    value=replica.name,
                    about=(path, ("pools", name, "replicas", first, "name")),
                )
            if replica.address is not None:
                owner = addresses.setdefault(replica.address, path)
                if owner != path:
                    yield Finding(
                        path=(*path, "address"),
                        message=f"is also the address of a replica of pool {quoted(str(owner[1]))}, "
                        "so that engine would be filled twice; list it once"
                        if owner[1] != name
                        else "is the address of another replica of this pool; list every engine once",
                        value=replica.address,
                        about=((*path, "address"), (*owner, "address")),
                    )


def lanes_by_themselves(spec: PolicySpec) -> Iterator[Finding]:
    """A request is held no longer than it may take, in a queue that has a place for it."""
    for lane, lane_spec in spec.lanes.by_lane().items():
        at: Path = ("lanes", lane)
        residence, deadline = lane_spec.residence_ms, lane_spec.deadline_ms
        if residence > deadline:
            yield Finding(
                path=(*at, "residence_ms"),
                message=f"is longer than the lane's deadline_ms, {_said(lane_spec, 'deadline_ms')}: a request "
                f"would be held past the time it has; set it to at most {deadline}",
                value=residence,
                about=((*at, "residence_ms"), (*at, "deadline_ms")),
            )
        for key, least in (("queue_requests", 1), ("queue_tokens", SMALLEST_REQUEST_TOKENS)):
            size: int = getattr(lane_spec, key)
            if residence > 0 and size < least:
                yield Finding(
                    path=(*at, key),
                    message=f"leaves no place to wait, but residence_ms is {_said(lane_spec, 'residence_ms')}; "
                    "set residence_ms to 0, or make room here",
                    value=size,
                    about=((*at, key), (*at, "residence_ms")),
                )
            elif residence == 0 and size > 0 and key in lane_spec.model_fields_set:
                yield Finding(
                    path=(*at, key),
                    message="has no effect: residence_ms is 0, so nothing waits; remove it or raise residence_ms",
                    value=size,
                    about=((*at, key), (*at, "residence_ms")),
                    is_warning=True,
                )
        if residence == 0 and lane_spec.floor_permille > 0 and "floor_permille" in lane_spec.model_fields_set:
            yield Finding(
                path=(*at, "floor_permille"),
                message="has no effect: it is for requests that wait, and residence_ms is 0; remove it or raise "
                "residence_ms",
                value=lane_spec.floor_permille,
                about=((*at, "floor_permille"), (*at, "residence_ms")),
                is_warning=True,
            )
        if lane_spec.floor_permille > lane_spec.share_permille:
            yield Finding(
                path=(*at, "floor_permille"),
                message=f"is more than the lane may hold, share_permille {_said(lane_spec, 'share_permille')}; "
                "lower it or raise the share",
                value=lane_spec.floor_permille,
                about=((*at, "floor_permille"), (*at, "share_permille")),
            )


def lanes_together(spec: PolicySpec) -> Iterator[Finding]:
    """What is too large for interactive finds room in bulk, and floors do not promise more than there is."""
    interactive, bulk = spec.lanes.interactive, spec.lanes.bulk
    both = any(model.lanes.interactive and model.lanes.bulk for model in spec.models.values())
    for key in ("max_input_tokens", "max_output_tokens"):
        small, large = getattr(interactive, key), getattr(bulk, key)
        if both and small > large:
            yield Finding(
                path=("lanes", "interactive", key),
                message=f"is larger than bulk's, {_said(bulk, key)}: a request lowered to bulk would be refused "
                "for its size; lower it, or raise lanes.bulk." + key,
                value=small,
                about=(("lanes", "interactive", key), ("lanes", "bulk", key)),
            )
    floors = {lane: lane_spec.floor_permille for lane, lane_spec in spec.lanes.by_lane().items()}
    if sum(floors.values()) > 1000:
        parts = " + ".join(str(floor) for floor in floors.values())
        yield Finding(
            path=("lanes",),
            message=f"floor_permille of the lanes adds up to {parts} = {sum(floors.values())}; "
            "lower them to 1000 or less together",
            about=tuple(("lanes", lane, "floor_permille") for lane in floors),
        )


def requests_fit(spec: PolicySpec) -> Iterator[Finding]:
    """Requests that a lane accepts can be held by the pool it leads to, and read before its deadline."""
    lanes = spec.lanes.by_lane()
    largest_windows: dict[tuple[Lane, str], str] = {}
    for name, model in spec.models.items():
        for lane, pool in model.lanes.pools().items():
            other = largest_windows.setdefault((lane, pool), name)
            if model.context_tokens > spec.models[other].context_tokens:
                largest_windows[lane, pool] = name
    for (lane, pool), name in largest_windows.items():
        if _has_replicas(spec, pool):
            about: tuple[Path, ...] = (("models", name), ("lanes", lane), ("pools", pool))
            path: Path = ("models", name, "lanes", lane)
            model, policy = spec.models[name], lane_of(lane, lanes[lane])
            for finding in _fit(model, policy, pool_of(pool, spec.pools[pool]), path):
                yield replace(finding, about=about)


def _fit(model: ModelSpec, policy: LanePolicy, pool: Pool, path: Path) -> Iterator[Finding]:
    largest = _largest_request_tokens(pool, policy)
    if largest < SMALLEST_REQUEST_TOKENS:
        yield Finding(
            path=path,
            message=f"no request can fit: the pool holds at most {largest} tokens of this lane. Raise "
            f"ceiling_tokens of its replicas or share_permille of the lane, or lower guard_band_permille",
            value=pool.name,
        )
        return
    if pool.prefill_ms(1) > policy.deadline_ms:
        yield Finding(
            path=path,
            message=f"no request can be in time: the pool reads one token in {pool.prefill_ms(1)} ms and the "
            f"lane's deadline_ms is {policy.deadline_ms}. Raise one of deadline_ms and prefill_tokens_per_s",
            value=pool.name,
        )
        return
    most_input = min(policy.max_input_tokens, model.context_tokens)
    asked = min(policy.max_input_tokens + policy.max_output_tokens, model.context_tokens)
    if asked > largest:
        yield Finding(
            path=path,
            message=f"the lane takes requests of up to {asked} tokens and the pool holds at most {largest} for "
            "one: larger ones are answered 413. Lower the lane's caps, or give the pool larger replicas",
            value=pool.name,
            is_warning=True,
        )
    readable = min(most_input, largest)
    if pool.prefill_ms(readable) > policy.deadline_ms:
        yield Finding(
            path=path,
            message=f"reading a prompt of {readable} tokens takes {pool.prefill_ms(readable)} ms on an idle "
            f"replica and the lane's deadline_ms is {policy.deadline_ms}: long prompts are refused. "
            "Raise deadline_ms or lower max_input_tokens",
            value=pool.name,
            is_warning=True,
        )
    if policy.residence_ms > 0 and policy.queue_tokens < min(asked, largest):
        yield Finding(
            path=("lanes", policy.lane, "queue_tokens"),
            message=f"is less than one request of the lane may ask for, {min(asked, largest)} tokens: such a "
            "request never waits and is refused. Raise it",
            value=policy.queue_tokens,
            is_warning=True,
        )


def bounds(spec: PolicySpec) -> Iterator[Finding]:
    """Orphans stay counted at least as long as leases, and bodies may be as long as prompts."""
    limits = spec.limits
    if limits.orphan_grace_ms < limits.lease_ttl_ms:
        path: Path = ("limits", "orphan_grace_ms")
        yield Finding(
            path=path,
            message=f"is shorter than lease_ttl_ms, {_said(limits, 'lease_ttl_ms')}: answers that still run "
            "would be forgotten at once; raise it to that or more",
            value=limits.orphan_grace_ms,
            about=(path, ("limits", "lease_ttl_ms")),
        )
    for lane, lane_spec in spec.lanes.by_lane().items():
        windows = [m.context_tokens for m in spec.models.values() if lane in m.lanes.pools()]
        most_input = min(lane_of(lane, lane_spec).max_input_tokens, max(windows, default=0))
        # A token of ordinary text is three to five bytes; fewer than one cannot be.
        if most_input > limits.body_bytes:
            yield Finding(
                path=("limits", "body_bytes"),
                message=f"is less than one byte for each of the {most_input} prompt tokens that {lane} takes: "
                "long prompts are answered 413 before they are counted; raise it",
                value=limits.body_bytes,
                about=(("limits", "body_bytes"), ("lanes", lane), ("models",)),
                is_warning=True,
            )
            break


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that stands for nothing."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"is not a {kind}; did you mean {quoted(close[0])}?"
    listed = ", ".join(map(quoted, names[:8])) + (", …" if len(names) > 8 else "")
    return f"is not a {kind}; use one of: {listed}" if names else f"is not a {kind}; define it"


def _largest_request_tokens(pool: Pool, lane: LanePolicy) -> int:
    return min(pool.largest_usable_tokens, pool.lane_limit_tokens(lane.share_permille))


def _has_replicas(spec: PolicySpec, pool: str) -> bool:
    return pool in spec.pools and bool(spec.pools[pool].replicas)


def _pool_paths(pools: Iterable[str]) -> tuple[Path, ...]:
    return tuple(("pools", pool) for pool in pools)


def _said(spec: object, key: str) -> str:
    """A value, and whether nobody wrote it."""
    value = getattr(spec, key)
    return f"{value}" if key in getattr(spec, "model_fields_set", ()) else f"{value} by default"


SERVING_CHECKS: tuple[Check, ...] = (
    something_to_serve,
    model_names,
    model_tokens,
    pool_references,
    fallbacks,
    replicas_are_distinct,
    lanes_by_themselves,
    lanes_together,
    requests_fit,
    bounds,
)
