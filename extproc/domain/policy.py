"""The policy in force, as plain values: what may run where, how much of it, and for whom.

A policy is read and checked as a whole by the policy-file adapter; everything here is already consistent.
All amounts are integers. Token amounts are tokens unless the name says work units; a work unit is one
output token of a model with cost factor 1 (see `Demand.work_units`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.domain.media import MediaKind, MediaRule


class Lane(StrEnum):
    """A traffic class that shares a pool with others. Declared from the highest to the lowest."""

    INTERACTIVE = "interactive"
    BULK = "bulk"
    OVERFLOW = "overflow"


LANES_DOWNWARDS: tuple[Lane, ...] = tuple(Lane)


class Posture(StrEnum):
    """What a lane does while the ledger cannot be asked."""

    LOCAL = "local"  # this worker's share of each limit, counted in memory
    CLOSED = "closed"  # 503 ledger_unavailable
    OPEN = "open"  # admitted without a reservation


class Engine(StrEnum):
    """Which program serves a model: engines make different prompts of the same request."""

    VLLM = "vllm"
    LLAMA_CPP = "llama.cpp"
    TGI = "tgi"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePolicy:
    """How large a request of this lane may be, how long it may wait, and its share of a pool.

    `share_permille` caps what the lane may hold of a pool's usable tokens. `residence_ms` bounds the hold;
    0 means that a request which does not fit is refused at once. `deadline_ms` is the default time to the
    first token that a request of the lane may take. `prefill_share_permille` and `spare_replicas` bound what it
    reads in a pool that serves a higher lane too.
    """

    lane: Lane
    max_input_tokens: int
    max_output_tokens: int
    deadline_ms: int
    residence_ms: int
    share_permille: int
    queue_requests: int
    queue_tokens: int
    floor_permille: int
    prefill_share_permille: int
    spare_replicas: int
    posture: Posture


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine process: `ceiling_tokens` is what it may hold reserved before any guard band."""

    name: str
    ceiling_tokens: int
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePolicy:
    """How the engines of a pool are asked for their load: how often, where, and how old an answer may be."""

    interval_ms: int = 1_000
    timeout_ms: int = 500
    stale_ms: int = 5_000
    path: str = "/metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When a replica gets no more requests, for how long, and how it is tried again (see `Breaker`).

    Any of these opens it: `failures` answers in a row that failed, the same number of probes in a row that found
    nobody, or `error_permille` of at least `least_requests` answers within `window_ms`.
    """

    failures: int = 5
    error_permille: int = 500
    least_requests: int = 20
    window_ms: int = 10_000
    open_ms: int = 5_000
    trial_requests: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadPolicy:
    """When a pool's lower lanes are suspended, by what its engines tell, and when they go on (see `Overload`).

    A threshold that is `None` does not count. Both are means over the replicas that tell.
    """

    waiting_requests: int | None = None
    kv_used_permille: int | None = None
    leave_permille: int = 700
    enter_ms: int = 3_000
    leave_ms: int = 5_000


DEFAULT_PROBE = ProbePolicy()
DEFAULT_BREAKER = BreakerPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Replicas behind one Envoy cluster, and what each of them can do.

    `request_cap` is per replica. `prefill_tokens_per_s` and `decode_tokens_per_s` (one sequence's speed) are
    measured under the load that the ceiling allows; estimates of waiting and residence come from them.
    `prefill_window_ms` bounds the prefill work that may be outstanding on a replica. Reservations may hold
    `usable_total_tokens` of the whole pool, and a single one `largest_usable_tokens`.
    """

    name: str
    cluster: str
    replicas: tuple[Replica, ...]
    guard_band_permille: int
    request_cap: int
    prefill_tokens_per_s: int
    decode_tokens_per_s: int
    prefill_window_ms: int
    probe: ProbePolicy = DEFAULT_PROBE
    breaker: BreakerPolicy = DEFAULT_BREAKER
    overload: OverloadPolicy | None = None
    largest_usable_tokens: int = field(init=False, repr=False, compare=False)
    usable_total_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        usable_tokens = [self.usable_tokens(replica) for replica in self.replicas]
        object.__setattr__(self, "largest_usable_tokens", max(usable_tokens))
        object.__setattr__(self, "usable_total_tokens", sum(usable_tokens))

    def guard_band_tokens(self, replica: Replica) -> int:
        """Tokens of `replica` that are never reserved: head room for estimate error."""
        return replica.ceiling_tokens * self.guard_band_permille // 1000

    def usable_tokens(self, replica: Replica) -> int:
        """Tokens of `replica` that reservations may hold."""
        return replica.ceiling_tokens - self.guard_band_tokens(replica)

    def lane_limit_tokens(self, share_permille: int) -> int:
        """What a lane with this share may hold across all replicas of the pool."""
        return self.usable_total_tokens * share_permille // 1000

    def prefill_ms(self, input_tokens: int) -> int:
        """How long one replica needs to read `input_tokens`, rounded up."""
        return -(-input_tokens * 1000 // self.prefill_tokens_per_s)

    def residence_ms(self, input_tokens: int, output_tokens: int) -> int:
        """How long a request is expected to occupy its replica if it uses its whole output ceiling."""
        return self.prefill_ms(input_tokens) + -(-output_tokens * 1000 // self.decode_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFallback:
    """Serve the same request in the pool `pool`."""

    pool: str

    @property
    def label(self) -> str:
        """How logs, headers and metadata name it."""
        return f"pool:{self.pool}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFallback:
    """Serve the request with the model `model`, which has to be named in its body."""

    model: str

    @property
    def label(self) -> str:
        """How logs, headers and metadata name it."""
        return f"model:{self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFallback:
    """Send the client to the gateway at `origin`, such as `https://eu.example.org`."""

    origin: str

    @property
    def label(self) -> str:
        """How logs, headers and metadata name it."""
        return f"region:{self.origin}"


Fallback = PoolFallback | ModelFallback | RegionFallback


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as clients name it. `lanes` says which pool serves which lane.

    `media` says what parts that are not text cost; a kind without a rule is not accepted.
    `fallbacks` are tried in order when there is no room for a request that named this model.
    `default_output_tokens` is the engine's own ceiling when the client sends none; `None` means that the
    engine allows whatever the context window leaves. `cost_factor_permille` scales quota charges.
    """

    name: str
    aliases: tuple[str, ...]
    tokenizer: str
    chat_template: str | None
    context_tokens: int
    default_output_tokens: int | None
    cost_factor_permille: int
    lanes: Mapping[Lane, str]
    engine: Engine = Engine.VLLM
    media: Mapping[MediaKind, MediaRule] = field(default_factory=dict)
    fallbacks: tuple[Fallback, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one tenant may use. `None` means that the policy sets no limit of this kind.

    `tokens_per_minute` refills a bucket of `burst_tokens` work units; `requests_per_minute` likewise, with a
    burst of one minute's worth. The in-flight limits hold at every instant.
    """

    tokens_per_minute: int | None
    burst_tokens: int | None
    requests_per_minute: int | None
    inflight_tokens: int | None
    inflight_requests: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tenant's contract class: its quota, its weight in fair queueing, and the lanes it may use."""

    name: str
    quota: Quota
    weight: int
    lanes: frozenset[Lane]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is charged and limited. `key_sha256` are hex digests of API keys, if keys identify tenants."""

    id: str
    tier: Tier
    enabled: bool
    key_sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderIdentity:
    """The tenant id is in a request header that a trusted filter sets and clients cannot."""

    header: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataIdentity:
    """The tenant id is in Envoy's dynamic metadata, such as a verified JWT's claim."""

    namespace: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyIdentity:
    """The tenant is whoever owns the API key in `header` (`Bearer` is understood); policies hold digests."""

    header: str


Identity = HeaderIdentity | MetadataIdentity | ApiKeyIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one request and of the service's own bookkeeping."""

    body_bytes: int
    json_depth: int
    prefill_weight_permille: int
    lease_ttl_ms: int
    orphan_grace_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """What callers that come back may do.

    Whoever returns before it was told to more than `early_most` times within `window_ms` stays away for
    `penalty_ms`. A tenant may have `budget_permille` retries per thousand other requests that it was not told
    to make, and `budget_burst` of them at once.
    """

    window_ms: int = 60_000
    early_most: int = 3
    penalty_ms: int = 10_000
    budget_permille: int = 2_000
    budget_burst: int = 100


DEFAULT_RETRIES = RetryPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHeaderNames:
    """Headers by which a client may lower its lane or shorten its deadline."""

    intent: str
    deadline_ms: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Everything a decision depends on, swapped as one value. `version` is a short hash of the content."""

    version: str
    models: Mapping[str, Model]
    lanes: Mapping[Lane, LanePolicy]
    pools: Mapping[str, Pool]
    tenants: Mapping[str, Tenant]
    identity: Identity
    anonymous: Tenant | None
    limits: Limits
    request_headers: RequestHeaderNames
    retries: RetryPolicy = DEFAULT_RETRIES
    names: Mapping[str, Model] = field(init=False, repr=False, compare=False)
    tenants_by_key: Mapping[str, Tenant] = field(init=False, repr=False, compare=False)
    lanes_by_pool: Mapping[str, frozenset[Lane]] = field(init=False, repr=False, compare=False)
    _beneath: frozenset[tuple[str, Lane]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names: dict[str, Model] = {}
        for model in self.models.values():
            for name in (model.name, *model.aliases):
                names[name] = model
        by_key = {digest: tenant for tenant in self.tenants.values() for digest in tenant.key_sha256}
        lanes_by_pool: dict[str, frozenset[Lane]] = {}
        for model in self.models.values():
            for lane, pool in model.lanes.items():
                lanes_by_pool[pool] = lanes_by_pool.get(pool, frozenset()) | {lane}
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "lanes_by_pool", lanes_by_pool)
        object.__setattr__(self, "tenants_by_key", by_key)
        # Lanes that share a pool with a higher one: only there is somebody to protect from them.
        beneath = frozenset(
            (pool, lane)
            for pool, served in lanes_by_pool.items()
            for index, lane in enumerate(LANES_DOWNWARDS)
            if not served.isdisjoint(LANES_DOWNWARDS[:index])
        )
        object.__setattr__(self, "_beneath", beneath)

    def lane_limits_tokens(self, pool: Pool) -> dict[Lane, int]:
        """What each lane may hold of this pool."""
        return {lane: pool.lane_limit_tokens(terms.share_permille) for lane, terms in self.lanes.items()}

    def prefill_share_permille(self, lane: Lane, pool: str) -> int:
        """The lane's cap on prefill in this pool. Where no higher lane is served, there is nobody to protect."""
        return self.lanes[lane].prefill_share_permille if (pool, lane) in self._beneath else 1000

    def pools_of(self, model: Model) -> frozenset[str]:
        """The pools that serve the model, or take its requests when there is no room elsewhere."""
        spare = (fallback.pool for fallback in model.fallbacks if isinstance(fallback, PoolFallback))
        return frozenset((*model.lanes.values(), *spare))

    def lanes_reaching(self, pool: str) -> frozenset[Lane]:
        """The lanes that are served in this pool, or come to it when there is no room elsewhere."""
        lanes = set(self.lanes_by_pool.get(pool, ()))
        for model in self.models.values():
            if PoolFallback(pool=pool) in model.fallbacks:
                lanes.update(model.lanes)
        return frozenset(lanes)

    def spare_replicas(self, lane: Lane, pool: str) -> int:
        """How many replicas of this pool the lane must leave with nothing to read; if it has so many and one more."""
        return self.lanes[lane].spare_replicas if (pool, lane) in self._beneath else 0

    @property
    def longest_residence_ms(self) -> int:
        """The longest hold that any lane allows: what Envoy's message timeout must exceed."""
        return max(lane.residence_ms for lane in self.lanes.values())
