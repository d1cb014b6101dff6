"""Contradictions among tenants, tiers, identity and headers: who could never be served, or be taken for another.

The rules for checks are those of `serving_checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from extproc.adapters.policy_file.build import NOWHERE, limits_of, model_of, tier_of
from extproc.adapters.policy_file.problems import Finding, Path, quoted
from extproc.adapters.policy_file.schema import NOBODY, PolicySpec, TierSpec
from extproc.adapters.policy_file.serving_checks import Check, unknown
from extproc.domain.demand import Demand, demand_of

OWN_HEADERS_PREFIX = "x-admission-"
"""Headers that this service sets, and removes from what clients send."""

OWN_METADATA_NAMESPACE = "extproc.admission"

CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"})
"""Headers whose value is a secret: as a tenant id it would end up in keys and metrics."""

GENERAL_HEADERS = frozenset(
    {
        "accept", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
        "origin", "referer", "te", "trailer", "transfer-encoding", "upgrade", "user-agent", "via",
        "x-forwarded-for", "x-request-id",
    }
)  # fmt: skip
"""Headers that already mean something else in every request."""

_EMPTY_KEY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
_TENANTS: Path = ("tenants",)
_IDENTITY: Path = ("tenants", "identity")


def tiers(spec: PolicySpec) -> Iterator[Finding]:
    """Every tier that is named exists, is used, and has lanes in which some model is served."""
    if not spec.tenants.tiers:
        yield Finding(path=("tenants", "tiers"), message="has no tier; add at least one")
    served = {lane for model in spec.models.values() for lane in model.lanes.pools()}
    used = {member.tier for member in spec.tenants.members.values()}
    for name, tier in spec.tenants.tiers.items():
        path: Path = ("tenants", "tiers", name)
        lanes: Path = (*path, "lanes")
        if not tier.lanes:
            yield Finding(path=lanes, message="allows no lane; list at least one, or leave it out for all")
        elif served and not served.intersection(tier.lanes):
            yield Finding(
                path=lanes,
                message=f"allows only lanes that no model is served in; add {' or '.join(sorted(served))}",
                about=(lanes, ("models",)),
            )
        for lane, count in Counter(tier.lanes).items():
            if count > 1:
                yield Finding(path=lanes, message=f"lists {lane} more than once; remove one", about=(lanes,))
        if name not in used:
            yield Finding(
                path=path,
                message="no member has this tier; give it to one or remove it",
                about=(path, ("tenants", "members")),
                is_warning=True,
            )


def quotas(spec: PolicySpec) -> Iterator[Finding]:
    """A tier's limits are large enough for requests to pass."""
    for name, tier in spec.tenants.tiers.items():
        path: Path = ("tenants", "tiers", name)
        if tier.burst_tokens is not None and tier.tokens_per_minute is None:
            yield Finding(
                path=(*path, "burst_tokens"),
                message="needs a rate to be a burst of; add tokens_per_minute or remove it",
                value=tier.burst_tokens,
                about=((*path, "burst_tokens"), (*path, "tokens_per_minute")),
            )
        yield from _quota_takes_requests(spec, name, tier)


def _quota_takes_requests(spec: PolicySpec, name: str, tier: TierSpec) -> Iterator[Finding]:
    """What can the tier's limits never admit, of the models that it reaches?"""
    quota, limits = tier_of(name, tier).quota, limits_of(spec)
    path: Path = ("tenants", "tiers", name)
    reached = {
        model: model_of(model, model_spec, base_dir=NOWHERE)
        for model, model_spec in spec.models.items()
        if set(model_spec.lanes.pools()).intersection(tier.lanes)
    }
    smallest = {
        model: Demand(input_tokens=1, output_tokens=1, longest_sequence_tokens=1) for model in reached
    }
    unlimited = {
        name: demand_of((1,), output_limit_tokens=None, choices=1, model=model)
        for name, model in reached.items()
    }

    def work_units(demands: Mapping[str, Demand]) -> dict[str, int]:
        return {model: demand.work_units(reached[model], limits) for model, demand in demands.items()}

    def tokens(demands: Mapping[str, Demand]) -> dict[str, int]:
        return {model: demand.total_tokens for model, demand in demands.items()}

    burst_path = (*path, "tokens_per_minute" if tier.burst_tokens is None else "burst_tokens")
    for limit, limit_path, costs in (
        (quota.burst_tokens, burst_path, work_units),
        (quota.inflight_tokens, (*path, "inflight_tokens"), tokens),
    ):
        if limit is not None and reached:
            finding = _limit_takes_requests(limit, limit_path, costs(smallest), costs(unlimited))
            if finding is not None:
                yield replace(finding, about=(limit_path, path, ("models",), ("limits",)))


def _limit_takes_requests(
    limit: int, path: Path, smallest: Mapping[str, int], unlimited: Mapping[str, int]
) -> Finding | None:
    """`smallest` and `unlimited`: by model, what the smallest request costs, and one without output limit."""
    cheapest = min(smallest, key=lambda model: smallest[model])
    if smallest[cheapest] > limit:
        return Finding(
            path=path,
            message=f"is less than the smallest request costs, {smallest[cheapest]} for model {quoted(cheapest)}: "
            "every request would be refused; raise it",
            value=limit,
        )
    for model, cost in unlimited.items():
        if cost > limit:
            return Finding(
                path=path,
                message=f"is less than a request to model {quoted(model)} without an output limit costs, {cost}: "
                "such requests are answered 413. Raise it, or lower the model's default_output_tokens if the "
                "engine's own limit is lower",
                value=limit,
                is_warning=True,
            )
    return None


def members(spec: PolicySpec) -> Iterator[Finding]:
    """Members have tiers that exist, and the anonymous tenant is one of them."""
    tenants = spec.tenants
    if not tenants.members:
        yield Finding(path=("tenants", "members"), message="has no member; add at least one tenant")
    for id_, member in tenants.members.items():
        path: Path = ("tenants", "members", id_)
        if id_ == NOBODY:
            yield Finding(
                path=path, message=f"{NOBODY} as tenants.anonymous means nobody; give the tenant another id"
            )
        if member.tier not in tenants.tiers:
            yield Finding(
                path=(*path, "tier"),
                message=unknown("tier", member.tier, tenants.tiers),
                value=member.tier,
                about=((*path, "tier"), ("tenants", "tiers", member.tier)),
            )
    if tenants.anonymous == NOBODY:
        return
    shared = tenants.members.get(tenants.anonymous)
    path = ("tenants", "anonymous")
    about = (path, ("tenants", "members", tenants.anonymous))
    if shared is None:
        yield Finding(
            path=path,
            message=f"{unknown('member', tenants.anonymous, tenants.members)} "
            f"Or write {NOBODY} to answer unknown callers 401.",
            value=tenants.anonymous,
            about=about,
        )
    elif not shared.enabled:
        yield Finding(
            path=path,
            message=f"is a disabled member; enable it, or write {NOBODY} to answer unknown callers 401",
            value=tenants.anonymous,
            about=about,
        )


def keys(spec: PolicySpec) -> Iterator[Finding]:
    """A key belongs to one tenant; tenants have keys exactly where keys say who is who."""
    by_key = spec.tenants.identity.api_key is not None
    known = by_key or spec.tenants.identity.header is not None or spec.tenants.identity.metadata is not None
    owners: dict[str, Path] = {}
    for id_, member in spec.tenants.members.items():
        path: Path = ("tenants", "members", id_, "key_sha256")
        for position, digest in enumerate(member.key_sha256):
            at: Path = (*path, position)
            owner = owners.setdefault(digest, at)
            if digest == _EMPTY_KEY:
                yield Finding(
                    path=at, message="is the digest of an empty key; check the command that made it"
                )
            elif owner != at:
                whose = (
                    "is listed twice"
                    if owner[2] == id_
                    else f"also belongs to tenant {quoted(str(owner[2]))}"
                )
                yield Finding(path=at, message=f"{whose}; keep one", about=(at, owner))
        if member.key_sha256 and known and not by_key:
            yield Finding(
                path=path,
                message="has no effect, because tenants.identity does not look at API keys; "
                "remove it or use identity.api_key",
                about=(path, _IDENTITY),
            )
        is_reachable = member.key_sha256 or not member.enabled or id_ == spec.tenants.anonymous
        if by_key and not is_reachable:
            yield Finding(
                path=path,
                message="is missing: nobody can be this tenant without a key; add a digest, "
                "or set enabled: false until there is one",
                about=(path, _IDENTITY, ("tenants", "anonymous")),
            )


def identity(spec: PolicySpec) -> Iterator[Finding]:
    """There is one source of identity, and clients cannot write it."""
    source = spec.tenants.identity
    given = [key for key in ("header", "metadata", "api_key") if getattr(source, key) is not None]
    if len(given) != 1:
        found = f"has {' and '.join(given)}" if given else "names no source"
        yield Finding(
            path=_IDENTITY,
            message=f"{found}; give exactly one of header, metadata and api_key",
            about=(_IDENTITY,),
        )
    if source.header is not None:
        path: Path = (*_IDENTITY, "header")
        if source.header in CREDENTIAL_HEADERS:
            yield Finding(
                path=path,
                message="holds a credential, not a tenant id; write "
                f"`api_key: {{header: {source.header}}}` to identify tenants by their keys",
                value=source.header,
            )
        elif source.header in GENERAL_HEADERS:
            yield Finding(
                path=path,
                message="is written by clients; name a header that a trusted filter sets",
                value=source.header,
            )
    if source.api_key is not None and source.api_key.header in GENERAL_HEADERS:
        yield Finding(
            path=(*_IDENTITY, "api_key", "header"),
            message="cannot hold an API key; name the header that does, such as authorization",
            value=source.api_key.header,
        )
    if source.metadata is not None:
        path = (*_IDENTITY, "metadata")
        if not source.metadata.path:
            yield Finding(
                path=(*path, "path"),
                message="is empty; list the keys that lead to the tenant id, such as [sub]",
            )
        if source.metadata.namespace == OWN_METADATA_NAMESPACE:
            yield Finding(
                path=(*path, "namespace"),
                message="is written by this service itself; name the namespace of the filter that verifies",
                value=source.metadata.namespace,
            )


def headers(spec: PolicySpec) -> Iterator[Finding]:
    """No header means two things, and none is one that this service sets or strips."""
    names: list[tuple[Path, str | None]] = [
        ((*_IDENTITY, "header"), spec.tenants.identity.header),
        ((*_IDENTITY, "api_key", "header"), getattr(spec.tenants.identity.api_key, "header", None)),
        (("request_headers", "intent"), spec.request_headers.intent),
        (("request_headers", "deadline_ms"), spec.request_headers.deadline_ms),
    ]
    owners: dict[str, Path] = {}
    for path, name in names:
        if name is None:
            continue
        owner = owners.setdefault(name, path)
        if owner != path:
            yield Finding(
                path=path,
                message=f"is also {'.'.join(map(str, owner))}; use two headers",
                value=name,
                about=(path, owner),
            )
        if name.startswith(OWN_HEADERS_PREFIX):
            yield Finding(
                path=path,
                message=f"starts with {OWN_HEADERS_PREFIX}, which this service sets and removes from what clients "
                "send; use another name",
                value=name,
            )
        if path[0] == "request_headers" and name in GENERAL_HEADERS | CREDENTIAL_HEADERS:
            yield Finding(
                path=path, message="already means something else in every request; use another", value=name
            )


TENANT_CHECKS: tuple[Check, ...] = (tiers, quotas, members, keys, identity, headers)
