"""Only a trusted source says who is asking."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from extproc.domain.contract import Refusal
from extproc.domain.identity import identify
from extproc.domain.outcome import Reason
from extproc.domain.policy import ApiKeyIdentity, HeaderIdentity, Identity, MetadataIdentity, Policy
from tests.builders import a_policy, a_tenant

ACME = a_tenant(id="acme", key_sha256=(hashlib.sha256(b"sk-acme").hexdigest(),))
GONE = a_tenant(id="gone", enabled=False, key_sha256=(hashlib.sha256(b"sk-gone").hexdigest(),))
CROWD = a_tenant(id="crowd")
KEY = ApiKeyIdentity(header="authorization")
HEADER = HeaderIdentity(header="x-tenant")
CLAIM = MetadataIdentity(namespace="envoy.filters.http.jwt_authn", path=("payload", "sub"))


def who(identity: Identity, headers: dict[str, str], metadata: Any = None, *, anonymous: bool = False) -> str:
    """The tenant's id, or the reason of the refusal."""
    policy: Policy = a_policy(
        tenants=(ACME, GONE, CROWD), identity=identity, anonymous=CROWD if anonymous else None
    )
    found = identify(policy, headers=headers, metadata=metadata or {})
    return str(found.reason) if isinstance(found, Refusal) else found.id


@pytest.mark.parametrize(
    ("identity", "headers", "expected"),
    [
        (HEADER, {"x-tenant": "acme"}, "acme"),
        (HEADER, {"x-tenant": "acme,vip"}, "tenant_unknown"),
        (HEADER, {"x-tenant": "vip,acme"}, "tenant_unknown"),
        (HEADER, {"x-tenant": " acme"}, "tenant_unknown"),
        (HEADER, {"x-other": "acme"}, "tenant_unknown"),
        (HEADER, {"x-tenant": "gone"}, "tenant_disabled"),
        (KEY, {"authorization": "Bearer sk-acme"}, "acme"),
        (KEY, {"authorization": "bearer  sk-acme "}, "acme"),
        (KEY, {"authorization": "sk-acme"}, "acme"),
        (KEY, {"authorization": "Bearer acme"}, "tenant_unknown"),
        (KEY, {"authorization": "Bearer "}, "tenant_unknown"),
        (KEY, {"authorization": "Bearer sk-gone"}, "tenant_disabled"),
        (KEY, {"authorization": "Bearer " + "x" * 5000}, "tenant_unknown"),
        (KEY, {"x-tenant": "acme"}, "tenant_unknown"),
        (CLAIM, {"x-tenant": "acme"}, "tenant_unknown"),
    ],
)
def test_who_a_request_is_from(identity: Identity, headers: dict[str, str], expected: str) -> None:
    """A claim anywhere else counts for nothing, and a second value makes the first one void."""
    assert who(identity, headers) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"envoy.filters.http.jwt_authn": {"payload": {"sub": "acme"}}}, "acme"),
        ({"envoy.filters.http.jwt_authn": {"payload": {"sub": ["acme"]}}}, "tenant_unknown"),
        ({"envoy.filters.http.jwt_authn": {"payload": "acme"}}, "tenant_unknown"),
        ({"envoy.filters.http.jwt_authn": {"payload": {"sub": 7}}}, "tenant_unknown"),
        ({"other": {"payload": {"sub": "acme"}}}, "tenant_unknown"),
        ({}, "tenant_unknown"),
    ],
)
def test_a_verified_claim_names_the_tenant(metadata: Any, expected: str) -> None:
    """Only a text at the configured place is a name."""
    assert who(CLAIM, {}, metadata) == expected


def test_invented_ids_share_one_bucket() -> None:
    """A fresh id per request gets nobody a fresh allowance; the key itself is in no answer."""
    assert {who(HEADER, {"x-tenant": f"id-{number}"}, anonymous=True) for number in range(100)} == {"crowd"}
    refused = identify(a_policy(identity=KEY), headers={"authorization": "Bearer sk-secret"}, metadata={})
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.TENANT_UNKNOWN
    assert "secret" not in repr(refused)
