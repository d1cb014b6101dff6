"""Who is asking? Only a source that the policy trusts can say; a client's own claim counts for nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from extproc.domain.contract import Refusal
from extproc.domain.outcome import Reason
from extproc.domain.policy import ApiKeyIdentity, HeaderIdentity, Identity, Policy, Tenant

LONGEST_KEY_CHARS = 4096
"""No API key is longer; hashing more would be work for an attacker's benefit."""


def identify(
    policy: Policy, *, headers: Mapping[str, str], metadata: Mapping[str, Mapping[str, Any]]
) -> Tenant | Refusal:
    """The tenant behind a request, or why there is none.

    `headers` has lower-case names and repeated headers joined by a comma, so that a smuggled second value
    makes the identity unknown instead of winning. Unknown ids share the policy's anonymous tenant if there
    is one: an invented id never gets a bucket of its own.
    """
    tenant = _claimed_tenant(policy, policy.identity, headers, metadata)
    if tenant is None:
        tenant = policy.anonymous
    if tenant is None:
        return Refusal(
            reason=Reason.TENANT_UNKNOWN,
            message="The caller is not a known tenant; check the credential that the gateway verifies.",
        )
    if not tenant.enabled:
        return Refusal(reason=Reason.TENANT_DISABLED, message="This tenant is disabled by policy.")
    return tenant


def _claimed_tenant(
    policy: Policy,
    identity: Identity,
    headers: Mapping[str, str],
    metadata: Mapping[str, Mapping[str, Any]],
) -> Tenant | None:
    if isinstance(identity, ApiKeyIdentity):
        value = headers.get(identity.header, "")
        scheme, _, rest = value.partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else value.strip()
        if not key or len(key) > LONGEST_KEY_CHARS:
            return None
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        return policy.tenants_by_key.get(digest)
    if isinstance(identity, HeaderIdentity):
        return policy.tenants.get(headers.get(identity.header, ""))
    claim: Any = metadata.get(identity.namespace)
    for step in identity.path:
        if not isinstance(claim, Mapping):
            return None
        claim = claim.get(step)
    return policy.tenants.get(claim) if isinstance(claim, str) else None
