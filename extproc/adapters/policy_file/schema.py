"""The shape of a policy file: its keys, their kinds and ranges, their defaults, and what each is for.

The text under each key is its documentation: it is what editors show (`extproc schema`) and what the
configuration reference says (`extproc schema --markdown`). What makes sense only in view of several keys
is checked in `checks`.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from extproc.adapters.policy_file.engine_schema import BreakerSpec, OverloadSpec, ProbeSpec
from extproc.adapters.policy_file.values import (
    DURATIONS,
    SIZES,
    Address,
    ClusterName,
    CostFactor,
    FilePath,
    HeaderName,
    KeyDigest,
    MetadataKey,
    ModelName,
    Name,
    Origin,
    Requests,
    RequestsFromZero,
    Share,
    ShareFromZero,
    Spare,
    TenantId,
    Tokens,
    TokensFromZero,
    Wait,
    WaitFromZero,
    Whole,
    WorkUnits,
)
from extproc.domain.media import MediaKind
from extproc.domain.policy import Engine, Lane, Posture

NOBODY = "refuse"
"""The value of `tenants.anonymous` that lets nobody in unknown."""

Pixels = Annotated[int, Whole(least=1, most=65_536, noun="pixels")]

MOST_REPLICAS = 1_000
"""With the bounds of speed and window below, what a whole pool reads in a window stays an exact number in Lua."""

MOST_FALLBACKS = 4
"""Each one costs a refused request another look at the ledger."""

_CLOSED = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
_ONE_OF_ITS_KEYS = ConfigDict(
    extra="forbid",
    frozen=True,
    use_attribute_docstrings=True,
    json_schema_extra={"minProperties": 1, "maxProperties": 1},
)


class ModelLanes(BaseModel):
    """Which pool serves which lane of the model. A lane that is left out is not served."""

    model_config = _CLOSED

    interactive: Name | None = None
    """The pool for people who wait for an answer."""
    bulk: Name | None = None
    """The pool for work that can wait, and for what is too large for interactive."""
    overflow: Name | None = None
    """The pool for requests that fit no other lane; it takes every size that the context window allows."""

    def pools(self) -> dict[Lane, str]:
        """The pool of each lane that is served, from the highest lane down."""
        pools = {Lane.INTERACTIVE: self.interactive, Lane.BULK: self.bulk, Lane.OVERFLOW: self.overflow}
        return {lane: pool for lane, pool in pools.items() if pool is not None}


class ImageRuleSpec(BaseModel):
    """What an image costs. Its size is read from the header of inline PNG, JPEG, GIF and WebP images."""

    model_config = _CLOSED

    max_tokens: Tokens
    """The most that one costs: what counts where the size is unknown, as for a URL, and without tiles for all."""
    base_tokens: TokensFromZero = 0
    """What every image costs besides its tiles."""
    tile_width_px: Pixels | None = None
    """The width of the tiles, or of the grid, that the engine cuts images into."""
    tile_height_px: Pixels | None = None
    """Their height."""
    tokens_per_tile: Tokens | None = None
    """What each tile costs, the cut ones at the edges too."""


class RecordingRuleSpec(BaseModel):
    """What a recording costs. Its length is read from inline WAV files."""

    model_config = _CLOSED

    max_tokens: Tokens
    """The most that one costs: what counts where the length is unknown, as for a URL, and without a rate for all."""
    base_tokens: TokensFromZero = 0
    """What every recording costs besides its seconds."""
    tokens_per_s: Tokens | None = None
    """What each second costs."""


class VideoRuleSpec(BaseModel):
    """What a video costs. Its header does not say how much there is to see, so all cost the same."""

    model_config = _CLOSED

    max_tokens: Tokens
    """What every video counts: the most that the engine makes of one."""


class FileRuleSpec(BaseModel):
    """What a file costs."""

    model_config = _CLOSED

    max_tokens: Tokens
    """What every file counts."""


MediaRuleSpec = ImageRuleSpec | RecordingRuleSpec | VideoRuleSpec | FileRuleSpec


class MediaSpec(BaseModel):
    """What parts of a message that are not text cost, beyond what the chat template prints for them."""

    model_config = _CLOSED

    image: ImageRuleSpec | None = None
    """Images. Left out, as with the others: a request that holds one is refused."""
    audio: RecordingRuleSpec | None = None
    """Sound."""
    video: VideoRuleSpec | None = None
    """Videos."""
    file: FileRuleSpec | None = None
    """Documents and other files."""

    def rules(self) -> dict[MediaKind, MediaRuleSpec]:
        """The rules that there are."""
        by_kind = {
            MediaKind.IMAGE: self.image,
            MediaKind.AUDIO: self.audio,
            MediaKind.VIDEO: self.video,
            MediaKind.FILE: self.file,
        }
        return {kind: rule for kind, rule in by_kind.items() if rule is not None}


class FallbackSpec(BaseModel):
    """Where a request goes for which there is no room. Exactly one place."""

    model_config = _ONE_OF_ITS_KEYS

    pool: Name | None = None
    """The same model in another pool."""
    model: ModelName | None = None
    """Another model of this policy, usually a smaller one: the name in the body is replaced, tokens and quota are
    counted anew. A body that is compressed, or that Envoy does not buffer, stays as it is: the next one is tried."""
    region: Origin | None = None
    """The origin of another gateway, such as `https://eu.example.org`: the client is sent there by a redirect (307).
    Many clients follow it without their credentials, so they have to know that gateway, too."""


class ModelSpec(BaseModel):
    """A model as clients name it, and how its engine counts tokens."""

    model_config = _CLOSED

    aliases: tuple[ModelName, ...] = ()
    """Other names that clients may use for it."""
    tokenizer: FilePath
    """The model's own `tokenizer.json`, or Mistral's `tekken.json` or `tokenizer.model.v3`, which need
    `extproc[mistral]`. A relative path starts at the policy file's folder."""
    chat_template: FilePath | None = None
    """A Jinja chat template. Left out: the one that lies beside the tokenizer, in a file or in its config."""
    engine: Engine = Engine.VLLM
    """The program that serves it: engines make different prompts of the same request, and each is counted its way."""
    context_tokens: Tokens
    """The engine's context window, prompt and answer together."""
    default_output_tokens: Tokens | None = None
    """The engine's own output limit for clients that set none. Left out: all that the window leaves."""
    cost_factor: CostFactor = Field(default=Decimal(1), json_schema_extra={"default": 1})
    """What a token of this model costs a tenant's rate, against a model of factor 1."""
    media: MediaSpec = Field(default_factory=MediaSpec)
    """What images, recordings and files cost it; what has no rule is refused."""
    lanes: ModelLanes
    """Which pool serves which lane."""
    fallback: tuple[FallbackSpec, ...] = Field(default=(), json_schema_extra={"maxItems": MOST_FALLBACKS})
    """Where a request goes for which there is no room, after it has waited: the first of these places that has room
    at once. A tenant at its own limit, or a request that is too large, goes nowhere."""


class InteractiveLane(BaseModel):
    """People wait for the answer. The highest lane: it is served before the others."""

    model_config = _CLOSED

    max_input_tokens: Tokens = 16_384
    """The largest prompt; a larger request goes to a lower lane."""
    max_output_tokens: TokensFromZero = 4_096
    """The largest output ceiling (all choices together); a larger request goes to a lower lane."""
    deadline_ms: Wait = 10_000
    """How long the first token may take, if the client does not ask for less."""
    residence_ms: WaitFromZero = 2_000
    """How long a request may be held until there is room; 0 refuses at once what does not fit now."""
    share_permille: Share = 1000
    """The most that the lane may hold of its pool's usable tokens, in thousandths."""
    queue_requests: RequestsFromZero = 256
    """How many requests may wait in each pool."""
    queue_tokens: TokensFromZero = 1_000_000
    """How many tokens the requests that wait in a pool may ask for together."""
    floor_permille: ShareFromZero = 0
    """Its guaranteed share of the tokens that are granted while it has somebody waiting, in thousandths."""
    prefill_share_permille: Share = 1000
    """The most that its prompts may take of prefill, in thousandths, in a pool that serves a higher lane too."""
    spare_replicas: Spare = 0
    """How many replicas must still have nothing to read when one of its prompts goes to one, in such a pool."""
    posture: Posture = Posture.LOCAL
    """While the ledger cannot be asked: `local` (this worker's share of each limit), `closed` (503), `open`."""


class BulkLane(BaseModel):
    """Work that can wait: declared so by the client, or too large for interactive."""

    model_config = _CLOSED

    max_input_tokens: Tokens = 131_072
    """The largest prompt; a larger request goes to overflow, or is refused."""
    max_output_tokens: TokensFromZero = 32_768
    """The largest output ceiling (all choices together); a larger request goes to overflow, or is refused."""
    deadline_ms: Wait = 600_000
    """How long the first token may take, if the client does not ask for less."""
    residence_ms: WaitFromZero = 30_000
    """How long a request may be held until there is room; 0 refuses at once what does not fit now."""
    share_permille: Share = 700
    """The most that the lane may hold of its pool's usable tokens, in thousandths."""
    queue_requests: RequestsFromZero = 1_000
    """How many requests may wait in each pool."""
    queue_tokens: TokensFromZero = 10_000_000
    """How many tokens the requests that wait in a pool may ask for together."""
    floor_permille: ShareFromZero = 100
    """Its guaranteed share of the tokens that are granted while it has somebody waiting, in thousandths."""
    prefill_share_permille: Share = 500
    """The most that its prompts may take of prefill, in thousandths, in a pool that serves a higher lane too."""
    spare_replicas: Spare = 0
    """How many replicas must still have nothing to read when one of its prompts goes to one, in such a pool."""
    posture: Posture = Posture.CLOSED
    """While the ledger cannot be asked: `local` (this worker's share of each limit), `closed` (503), `open`."""


class OverflowLane(BaseModel):
    """Requests that fit no other lane. It has no caps of its own: the model's context window is the limit."""

    model_config = _CLOSED

    deadline_ms: Wait = 600_000
    """How long the first token may take, if the client does not ask for less."""
    residence_ms: WaitFromZero = 10_000
    """How long a request may be held until there is room; 0 refuses at once what does not fit now."""
    share_permille: Share = 1000
    """The most that the lane may hold of its pool's usable tokens, in thousandths."""
    queue_requests: RequestsFromZero = 100
    """How many requests may wait in each pool."""
    queue_tokens: TokensFromZero = 10_000_000
    """How many tokens the requests that wait in a pool may ask for together."""
    floor_permille: ShareFromZero = 0
    """Its guaranteed share of the tokens that are granted while it has somebody waiting, in thousandths."""
    prefill_share_permille: Share = 1000
    """The most that its prompts may take of prefill, in thousandths, in a pool that serves a higher lane too."""
    spare_replicas: Spare = 0
    """How many replicas must still have nothing to read when one of its prompts goes to one, in such a pool."""
    posture: Posture = Posture.CLOSED
    """While the ledger cannot be asked: `local` (this worker's share of each limit), `closed` (503), `open`."""


LaneSpec = InteractiveLane | BulkLane | OverflowLane


class LanesSpec(BaseModel):
    """The three lanes, from the highest down. A client may ask for a lower lane, never for a higher one."""

    model_config = _CLOSED

    interactive: InteractiveLane = Field(default_factory=InteractiveLane)
    """For people who wait for an answer."""
    bulk: BulkLane = Field(default_factory=BulkLane)
    """For work that can wait."""
    overflow: OverflowLane = Field(default_factory=OverflowLane)
    """For requests that fit no other lane."""

    def by_lane(self) -> dict[Lane, LaneSpec]:
        """The lanes by name, from the highest down."""
        return {Lane.INTERACTIVE: self.interactive, Lane.BULK: self.bulk, Lane.OVERFLOW: self.overflow}


class ReplicaSpec(BaseModel):
    """One engine process."""

    model_config = _CLOSED

    name: Name
    """Its name, unique in the pool."""
    address: Address | None = None
    """"host:port" of its HTTP server, for probes of its health and load. Left out: it is not probed."""
    ceiling_tokens: Tokens
    """The tokens it may have in flight, prompts and output ceilings together: where its latency has its knee."""


class PoolSpec(BaseModel):
    """Engines that serve the same requests behind one Envoy cluster."""

    model_config = _CLOSED

    cluster: ClusterName | None = None
    """The Envoy cluster of the pool. Left out: a cluster that has the pool's name."""
    replicas: tuple[ReplicaSpec, ...] = Field(json_schema_extra={"minItems": 1, "maxItems": MOST_REPLICAS})
    """The engine processes."""
    guard_band_permille: Annotated[int, Whole(least=0, most=999, noun="thousandths")] = 100
    """The part of every ceiling that is never reserved, in thousandths: head room for what was not foreseen."""
    request_cap: Requests = 256
    """The most requests that one replica may have in flight: the engine's own batch limit or less."""
    prefill_tokens_per_s: Annotated[int, Whole(least=1, most=1_000_000, noun="tokens per second")] = 8_000
    """How fast one replica reads prompts, measured under the load that the ceiling allows."""
    decode_tokens_per_s: Annotated[int, Whole(least=1, most=1_000_000, noun="tokens per second")] = 30
    """How fast one answer is written, measured under the load that the ceiling allows."""
    prefill_window_ms: Annotated[
        int, Whole(least=1, most=60_000, noun="milliseconds", units=DURATIONS, example="500ms or 2s")
    ] = 1_000
    """The most prompt reading that a replica may have ahead of it, as time."""
    probe: ProbeSpec = Field(default_factory=ProbeSpec)
    """How the engines are asked for their load."""
    breaker: BreakerSpec = Field(default_factory=BreakerSpec)
    """When a replica gets no more requests, and how it is tried again."""
    overload: OverloadSpec | None = None
    """When lower lanes are suspended because the engines have too much to do. Left out: never."""


class MetadataIdentitySpec(BaseModel):
    """Envoy's dynamic metadata, such as the claims that the JWT filter has verified."""

    model_config = _CLOSED

    namespace: MetadataKey
    """The metadata namespace, such as `envoy.filters.http.jwt_authn`."""
    path: tuple[MetadataKey, ...] = Field(json_schema_extra={"minItems": 1})
    """The keys that lead to the tenant id, from the outside in."""


class ApiKeyIdentitySpec(BaseModel):
    """An API key that this policy knows by its digest."""

    model_config = _CLOSED

    header: HeaderName
    """The header with the key, such as `authorization`; `Bearer` in front of the key is understood."""


class IdentitySpec(BaseModel):
    """Where the tenant of a request is taken from. Exactly one source, and one that clients cannot forge."""

    model_config = _ONE_OF_ITS_KEYS

    header: HeaderName | None = None
    """A request header that holds the tenant id, set by a filter in front and removed from what clients send."""
    metadata: MetadataIdentitySpec | None = None
    """Dynamic metadata that holds the tenant id."""
    api_key: ApiKeyIdentitySpec | None = None
    """The API key itself; each member lists the digests of its keys."""


class TierSpec(BaseModel):
    """What a tenant of this tier may use. A limit that is left out does not exist."""

    model_config = _CLOSED

    tokens_per_minute: WorkUnits | None = None
    """The rate of work: prompt tokens (by `limits.prefill_weight_permille`) and output tokens, times the cost
    factor of the model."""
    burst_tokens: WorkUnits | None = None
    """The most work at once, and so the largest request. Left out: one minute's worth."""
    requests_per_minute: Requests | None = None
    """The rate of requests; one minute's worth may come at once."""
    inflight_tokens: Tokens | None = None
    """The most tokens in flight, prompts and output ceilings together, at every instant."""
    inflight_requests: Requests | None = None
    """The most requests in flight at every instant."""
    weight: Annotated[int, Whole(least=1, most=1000, noun="shares")] = 1
    """The tenant's share against others who wait in the same lane."""
    lanes: tuple[Lane, ...] = Field(
        default=tuple(Lane), json_schema_extra={"minItems": 1, "uniqueItems": True}
    )
    """The lanes that the tenant may use."""


class MemberSpec(BaseModel):
    """One tenant."""

    model_config = _CLOSED

    tier: Name
    """The tier whose limits are the tenant's own: tenants of a tier share no bucket."""
    enabled: StrictBool = True
    """`false` answers 403 to everything the tenant sends."""
    key_sha256: tuple[KeyDigest, ...] = ()
    """The SHA-256 digests of its API keys (`printf %s "$KEY" | sha256sum`); only with `identity.api_key`."""


class TenantsSpec(BaseModel):
    """Who is charged and limited."""

    model_config = _CLOSED

    identity: IdentitySpec
    """Where the tenant of a request is taken from."""
    anonymous: TenantId = NOBODY
    """The member that callers without a known identity share, or `refuse` for 401."""
    tiers: dict[Name, TierSpec] = Field(json_schema_extra={"minProperties": 1})
    """Contract classes by name."""
    members: dict[TenantId, MemberSpec] = Field(json_schema_extra={"minProperties": 1})
    """Tenants by id."""


class LimitsSpec(BaseModel):
    """Bounds of one request, and of the service's own books."""

    model_config = _CLOSED

    body_bytes: Annotated[
        int, Whole(least=1024, most=1024**3, noun="bytes", units=SIZES, example="512KiB or 16MiB")
    ] = 8 * 1024 * 1024
    """The largest request body, decoded. Envoy's buffer and the gRPC receive limit have to be as large, and every
    MiB keeps all other requests waiting for about half a millisecond while it arrives."""
    json_depth: Annotated[int, Whole(least=4, most=512, noun="levels")] = 64
    """The deepest nesting of a JSON body."""
    prefill_weight_permille: Annotated[int, Whole(least=0, most=10_000, noun="thousandths")] = 1000
    """What a prompt token costs a tenant's rate against an output token, in thousandths."""
    lease_ttl_ms: Annotated[
        int, Whole(least=1_000, most=600_000, noun="milliseconds", units=DURATIONS, example="15s")
    ] = 15_000
    """How long a lease outlives a worker that has stopped renewing it, before it counts as an orphan."""
    orphan_grace_ms: Annotated[
        int, Whole(least=1_000, most=3_600_000, noun="milliseconds", units=DURATIONS, example="10min")
    ] = 600_000
    """The longest that an orphan stays counted: its answer may still be running on a GPU."""


class RequestHeadersSpec(BaseModel):
    """The headers by which clients may ask for less than the policy gives them."""

    model_config = _CLOSED

    intent: HeaderName = "x-request-intent"
    """The header that names the lane a client wants; it can lower the lane and never raise it."""
    deadline_ms: HeaderName = "x-request-deadline-ms"
    """The header that says in how many milliseconds the client needs the first token; it can only shorten."""


class RetriesSpec(BaseModel):
    """What callers that come back may do. No retry ever gets a better place in line.

    A tenant's budget is one over all workers; what a caller was told is known to the worker that told it.
    """

    model_config = _CLOSED

    window_ms: Annotated[
        int, Whole(least=1_000, most=3_600_000, noun="milliseconds", units=DURATIONS, example="1min")
    ] = 60_000
    """For how long after the time that a refused caller was told, what it does is of interest."""
    early_most: Annotated[int, Whole(least=0, most=1_000, noun="returns")] = 3
    """How often a caller may come back before the time it was told, within the window, and still be let through."""
    penalty_ms: Annotated[
        int, Whole(least=1_000, most=60_000, noun="milliseconds", units=DURATIONS, example="10s")
    ] = 10_000
    """How long it has to stay away if it does so more often; every attempt meanwhile begins the time anew."""
    budget_permille: Annotated[int, Whole(least=0, most=10_000, noun="thousandths")] = 2_000
    """How many retries a tenant may make that it was not told to make, per thousand of its other requests."""
    budget_burst: Annotated[int, Whole(least=1, most=100_000, noun="retries")] = 100
    """How many of them it may make at once."""


class PolicySpec(BaseModel):
    """Admission policy: which models run where, how much of them, and for whom."""

    model_config = _CLOSED

    version: Literal[1]
    """The version of this file format."""
    models: dict[ModelName, ModelSpec] = Field(json_schema_extra={"minProperties": 1})
    """Models by the name that clients send."""
    lanes: LanesSpec = Field(default_factory=LanesSpec)
    """How large a request of each lane may be, how long it may wait, and what it may hold of a pool."""
    pools: dict[Name, PoolSpec] = Field(json_schema_extra={"minProperties": 1})
    """Pools by name."""
    tenants: TenantsSpec
    """Who is charged and limited, and how they are known."""
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    """How large a body may be, what prompt tokens cost, and how long leases last."""
    request_headers: RequestHeadersSpec = Field(default_factory=RequestHeadersSpec)
    """The headers by which clients may ask for less."""
    retries: RetriesSpec = Field(default_factory=RetriesSpec)
    """How patient one has to be with callers that come back too early, or too often."""


def policy_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a policy file, for editors and for other tools."""
    schema = _tidied(PolicySpec.model_json_schema())
    schema.pop("title", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "extproc policy", **schema}


def _tidied(schema: Any) -> Any:
    """`schema` without titles that only repeat a key and `null` as a default.

    Mappings by name say what a name is and what each entry is in two keywords, so that editors look into an
    entry whose name is wrong, too.
    """
    if isinstance(schema, list):
        return [_tidied(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidied = {
        key: _tidied(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key == "default" and value is None)
    }
    for pattern, entry in tidied.pop("patternProperties", {}).items():
        tidied |= {"propertyNames": {"pattern": pattern}, "additionalProperties": entry}
    return tidied
