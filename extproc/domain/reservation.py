"""What one request asks to hold, what it is told, and how it is given back."""

from __future__ import annotations

from enum import StrEnum

from extproc.domain.frozen import frozen
from extproc.domain.policy import Lane, Pool, Quota


class Scope(StrEnum):
    """What is scarce. In the order in which a reservation checks it."""

    DEADLINE = "deadline"
    TENANT_TOKEN_RATE = "tenant_token_rate"  # noqa: S105 - a scope, not a credential
    TENANT_REQUEST_RATE = "tenant_request_rate"
    TENANT_INFLIGHT_TOKENS = "tenant_inflight_tokens"
    TENANT_INFLIGHT_REQUESTS = "tenant_inflight_requests"
    LANE_SHARE = "lane_share"
    LANE_PREFILL = "lane_prefill"
    REPLICA_TOKENS = "replica_tokens"
    PREFILL_WINDOW = "prefill_window"
    REQUEST_CAP = "request_cap"
    QUEUE = "queue"
    RESIDENCE = "residence"
    WITHDRAWN = "withdrawn"


@frozen
class LaneTerms:
    """What a lane may keep waiting in one pool, and how it shares the pool with the other lanes.

    `floor_permille` is the lane's guaranteed share of granted tokens while it has somebody waiting;
    `prefill_share_permille` caps its share of the pool's prefill, and `spare_replicas` is how many replicas must
    still have nothing to read when one more of its prompts goes to one.
    """

    queue_requests: int = 0
    queue_tokens: int = 0
    floor_permille: int = 0
    prefill_share_permille: int = 1000
    spare_replicas: int = 0


NO_QUEUE = LaneTerms()
"""A lane in which nothing waits and nothing is set aside."""


@frozen
class Reservation:
    """All that one request needs at once: every scope of it is granted, or none is.

    `deadline_in_ms` is what is left until the first token must be there; `residence_ms` is how long the
    request is expected to occupy its replica at most. `hold_ms` is how long it may wait for room, 0 not at
    all; `weight` is its tenant's share against the other tenants that wait.
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
    hold_ms: int = 0
    weight: int = 1
    lane_terms: LaneTerms = NO_QUEUE

    @property
    def total_tokens(self) -> int:
        """Tokens held on the replica while the lease lives."""
        return self.input_tokens + self.output_tokens


@frozen
class Balance:
    """A tenant's buckets right after an answer; `None` where the quota sets no such limit."""

    tokens_remaining: int | None = None
    tokens_reset_ms: int | None = None
    requests_remaining: int | None = None
    requests_reset_ms: int | None = None


@frozen
class Granted:
    """The lease is held on `replica`; its first token is expected in `ttft_ms`. It has waited `waited_ms`."""

    lease_id: str
    replica: str
    ttft_ms: int
    balance: Balance
    waited_ms: int = 0


@frozen
class Denied:
    """Nothing is held. `scope` refused, and may have room in `wait_ms` by a conservative estimate.

    `waited_ms` is how long it has waited in vain, `behind` what it waited for, and `ahead_requests` how many
    others would have gone first; both are `None` where nobody waits.
    """

    scope: Scope
    wait_ms: int
    balance: Balance
    waited_ms: int = 0
    behind: Scope | None = None
    ahead_requests: int | None = None


@frozen
class Queued:
    """The request waits; its answer is news within `expires_in_ms`, by the estimate in `wait_ms`.

    `position` counts from 1 by what is known now; others may still go first, or leave.
    """

    lease_id: str
    position: int
    wait_ms: int
    expires_in_ms: int


@frozen
class Unavailable:
    """The ledger could not be asked; nothing is known to be held. `wait_ms`: when it may be back."""

    wait_ms: int


Answer = Granted | Denied | Unavailable


@frozen
class Usage:
    """What the engine says it used."""

    input_tokens: int
    output_tokens: int


@frozen
class Booking:
    """What an access-log record settles: the refund is what `work_units` of usage leave of the charge.

    `work_units` is `None` when the record carries no usage: the reserved amount then stands.
    """

    lease_id: str
    work_units: int | None
