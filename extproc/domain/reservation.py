"""What one request asks to hold, what it is told, and how it is given back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from extproc.domain.policy import Lane, Pool, Quota


class Scope(StrEnum):
    """What is scarce. In the order in which a reservation checks it."""

    DEADLINE = "deadline"
    TENANT_TOKEN_RATE = "tenant_token_rate"  # noqa: S105 - a scope, not a credential
    TENANT_REQUEST_RATE = "tenant_request_rate"
    TENANT_INFLIGHT_TOKENS = "tenant_inflight_tokens"
    TENANT_INFLIGHT_REQUESTS = "tenant_inflight_requests"
    LANE_SHARE = "lane_share"
    REPLICA_TOKENS = "replica_tokens"
    PREFILL_WINDOW = "prefill_window"
    REQUEST_CAP = "request_cap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """All that one request needs at once: every scope of it is granted, or none is.

    `deadline_in_ms` is what is left until the first token must be there; `residence_ms` is how long the
    request is expected to occupy its replica at most.
    """

    lease_id: str
    tenant: str
    quota: Quota
    lane: Lane
    lane_limit_tokens: int
    pool: Pool
    input_tokens: int
    output_tokens: int
    work_units: int
    deadline_in_ms: int
    residence_ms: int
    policy_version: str

    @property
    def total_tokens(self) -> int:
        """Tokens held on the replica while the lease lives."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A tenant's buckets right after an answer; `None` where the quota sets no such limit."""

    tokens_remaining: int | None = None
    tokens_reset_ms: int | None = None
    requests_remaining: int | None = None
    requests_reset_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The lease is held on `replica`; its first token is expected in `ttft_ms`."""

    lease_id: str
    replica: str
    ttft_ms: int
    balance: Balance


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """Nothing is held. `scope` refused, and may have room in `wait_ms` by a conservative estimate."""

    scope: Scope
    wait_ms: int
    balance: Balance


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """The ledger could not be asked; nothing is known to be held. `wait_ms`: when it may be back."""

    wait_ms: int


Answer = Granted | Denied | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the engine says it used."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """What an access-log record settles: the refund is what `work_units` of usage leave of the charge.

    `work_units` is `None` when the record carries no usage: the reserved amount then stands.
    """

    lease_id: str
    work_units: int | None
