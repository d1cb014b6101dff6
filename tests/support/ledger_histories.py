"""Random histories of a ledger: who asks, ends, books, renews, leaves, crashes, and how time passes.

The numbers are small and collide on purpose: few lease ids, tenants and replicas, limits of a few requests,
and times around the moments at which something is due.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from extproc.domain.lease import Claim, Holder
from extproc.domain.policy import Lane, Pool, Quota, Replica
from extproc.domain.reservation import LaneTerms, Reservation

HOLDERS = tuple(Holder(id=f"w{n}", lease_ttl_ms=1_000, orphan_grace_ms=2_000 * n) for n in range(3))
LEASE_IDS = tuple(f"lease-{n}" for n in range(12))
TENANTS = ("acme", "zoë", "t|x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Ask."""

    holder: Holder
    reservation: Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A stream ends."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """A record arrives."""

    lease_id: str
    work_units: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """A holder says what it holds."""

    holder: Holder
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassert:
    """A holder insists."""

    holder: Holder
    claim: Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A holder leaves one lease behind."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Somebody tidies up."""

    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Time passes, or the clock is set back."""

    ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """One that waits hangs up."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """A holder asks what has become of its waiting callers."""

    holder: Holder


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Somebody lets time have its effect on those who wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A policy says something new of a pool, and of what some of its lanes may hold."""

    pool: Pool
    lane_limits_tokens: Mapping[Lane, int]


Move = (
    Reserve | Release | Book | Renew | Reassert | Orphan | Reclaim | Pass | Withdraw | News | Wake | Capacity
)

holders = st.sampled_from(HOLDERS)
lease_ids = st.sampled_from(LEASE_IDS)
tenants = st.sampled_from(TENANTS)
optional_limits = st.one_of(st.none(), st.integers(1, 400))


@st.composite
def quotas(draw: st.DrawFn) -> Quota:
    """Any mixture of limits, all of them tight."""
    rate = draw(optional_limits)
    return Quota(
        tokens_per_minute=None if rate is None else rate * draw(st.sampled_from([1, 60])),
        burst_tokens=None if rate is None else draw(st.integers(50, 400)),
        requests_per_minute=draw(st.one_of(st.none(), st.integers(1, 5))),
        inflight_tokens=draw(optional_limits),
        inflight_requests=draw(st.one_of(st.none(), st.integers(1, 4))),
    )


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """One or three replicas under one of two names; their limits differ from draw to draw, as policies do."""
    names = draw(st.sampled_from(["a", "abc", "cb"]))
    return Pool(
        name=draw(st.sampled_from(["chat", "bulk"])),
        cluster="engines",
        replicas=tuple(Replica(name=name, ceiling_tokens=draw(st.integers(100, 600))) for name in names),
        guard_band_permille=draw(st.sampled_from([0, 100, 333])),
        request_cap=draw(st.sampled_from([1, 3, 100])),
        prefill_tokens_per_s=draw(st.sampled_from([7, 100, 1_000])),
        decode_tokens_per_s=50,
        prefill_window_ms=draw(st.sampled_from([100, 1_000, 100_000])),
    )


@st.composite
def reservations(draw: st.DrawFn) -> Reservation:
    """A reservation for one of few leases."""
    return Reservation(
        lease_id=draw(lease_ids),
        tenant=draw(tenants),
        quota=draw(quotas()),
        lane=draw(st.sampled_from(list(Lane))),
        lane_limit_tokens=draw(st.integers(100, 1_500)),
        pool=draw(pools()),
        input_tokens=draw(st.integers(0, 100)),
        output_tokens=draw(st.integers(0, 100)),
        work_units=draw(st.integers(0, 200)),
        deadline_in_ms=draw(st.sampled_from([0, 500, 60_000])),
        residence_ms=draw(st.sampled_from([0, 1, 700, 5_000, 20_000_000])),
        policy_version="v1",
    )


claims = st.builds(
    Claim,
    lease_id=lease_ids,
    tenant=tenants,
    lane=st.sampled_from(list(Lane)),
    pool=st.sampled_from(["chat", "bulk"]),
    replica=st.sampled_from(["a", "b"]),
    tokens=st.integers(0, 300),
    charge_units=st.integers(0, 100),
    rate_per_minute=optional_limits,
    residence_ms=st.integers(0, 5_000),
    age_ms=st.integers(0, 9_000),
    policy_version=st.just("v1"),
)

moves: st.SearchStrategy[Move] = st.one_of(
    st.builds(Reserve, holder=holders, reservation=reservations()),
    st.builds(Reserve, holder=holders, reservation=reservations()),
    st.builds(Release, lease_id=lease_ids),
    st.builds(Book, lease_id=lease_ids, work_units=st.one_of(st.none(), st.integers(0, 300))),
    st.builds(Renew, holder=holders, lease_ids=st.lists(lease_ids, unique=True, max_size=5).map(tuple)),
    st.builds(Reassert, holder=holders, claim=claims),
    st.builds(Orphan, lease_id=lease_ids),
    st.builds(Reclaim, most=st.integers(0, 6)),
    st.builds(Pass, ms=st.one_of(st.integers(0, 1_500), st.sampled_from([-70_000, -800, 5_000, 61_000]))),
)

histories = st.lists(moves, max_size=40)

# Histories in which many wait. All of one history is about few pools, and a tenant's quota stays what it is.

WAITING_HOLDERS = (
    Holder(id="w0", lease_ttl_ms=1_000, orphan_grace_ms=0, reply_ms=700),
    Holder(id="w1", lease_ttl_ms=100_000, orphan_grace_ms=2_000, reply_ms=3_000),
    Holder(id="w2", lease_ttl_ms=100_000, orphan_grace_ms=4_000),
)
WAITING_IDS = tuple(f"wait-{n}" for n in range(12))


@st.composite
def crowded_pools(draw: st.DrawFn, name: str) -> Pool:
    """Room for a few requests."""
    names = draw(st.sampled_from(["a", "cb"]))
    return Pool(
        name=name,
        cluster="engines",
        replicas=tuple(Replica(name=one, ceiling_tokens=draw(st.integers(100, 400))) for one in names),
        guard_band_permille=draw(st.sampled_from([0, 100])),
        request_cap=draw(st.sampled_from([100, 3, 1])),
        prefill_tokens_per_s=draw(st.sampled_from([100_000, 1_000, 100])),
        decode_tokens_per_s=50,
        prefill_window_ms=draw(st.sampled_from([100_000, 1_000, 100])),
    )


@st.composite
def waiting_histories(draw: st.DrawFn) -> list[Move]:
    """Many ask for little room, most of them patient."""
    chat = draw(crowded_pools("chat"))
    some_pools = [chat, chat, draw(crowded_pools("chat")), draw(crowded_pools("bulk"))]
    roomy = Quota(
        tokens_per_minute=None,
        burst_tokens=None,
        requests_per_minute=None,
        inflight_tokens=None,
        inflight_requests=None,
    )
    some_quotas = {tenant: draw(st.one_of(st.just(roomy), st.just(roomy), quotas())) for tenant in TENANTS}
    terms = st.builds(
        LaneTerms,
        queue_requests=st.sampled_from([100, 100, 5, 2, 0]),
        queue_tokens=st.sampled_from([100_000, 100_000, 300]),
        floor_permille=st.sampled_from([0, 100, 400]),
        prefill_share_permille=st.sampled_from([1_000, 1_000, 1_000, 300, 1]),
        spare_replicas=st.sampled_from([0, 0, 1, 3]),
    )

    @st.composite
    def askings(draw: st.DrawFn) -> Reserve:
        number = draw(st.integers(0, len(WAITING_IDS) - 1))
        tenant = TENANTS[number % len(TENANTS)]
        return Reserve(
            holder=draw(st.sampled_from(WAITING_HOLDERS)),
            reservation=Reservation(
                lease_id=WAITING_IDS[number],
                tenant=tenant,
                quota=some_quotas[tenant],
                lane=draw(st.sampled_from(list(Lane))),
                lane_limit_tokens=draw(st.sampled_from([100_000, 100_000, 100_000, 200])),
                pool=draw(st.sampled_from(some_pools)),
                input_tokens=draw(st.sampled_from([10, 1, 1, 50, 120])),
                output_tokens=draw(st.sampled_from([90, 200, 300, 10, 0])),
                work_units=draw(st.integers(0, 100)),
                deadline_in_ms=draw(st.sampled_from([1_000_000, 1_000_000, 1_000_000, 60_000, 500])),
                residence_ms=draw(st.sampled_from([1, 700, 5_000])),
                policy_version="v1",
                hold_ms=draw(st.sampled_from([100_000, 100_000, 100_000, 5_000, 300, 0])),
                weight=draw(st.sampled_from([1, 1, 3, 1_000])),
                lane_terms=draw(terms),
            ),
        )

    ids = st.sampled_from(WAITING_IDS)
    waiting_claims = st.builds(replace, claims, lease_id=ids)
    waiting_moves: st.SearchStrategy[Move] = st.one_of(
        askings(),
        askings(),
        askings(),
        st.builds(Release, lease_id=ids),
        st.builds(Release, lease_id=ids),
        st.builds(Book, lease_id=ids, work_units=st.one_of(st.none(), st.integers(0, 300))),
        st.builds(Withdraw, lease_id=ids),
        st.builds(News, holder=st.sampled_from(WAITING_HOLDERS)),
        st.builds(Renew, holder=st.sampled_from(WAITING_HOLDERS), lease_ids=st.tuples(ids, ids)),
        st.builds(Orphan, lease_id=ids),
        st.builds(Reassert, holder=st.sampled_from(WAITING_HOLDERS), claim=waiting_claims),
        st.builds(Wake),
        st.builds(
            Capacity,
            pool=st.sampled_from(some_pools),
            lane_limits_tokens=st.dictionaries(
                st.sampled_from(list(Lane)), st.sampled_from([100_000, 300, 100]), max_size=3
            ),
        ),
        st.builds(Reclaim, most=st.integers(0, 6)),
        st.builds(Pass, ms=st.one_of(st.integers(0, 100), st.sampled_from([800, 5_000, 61_000]))),
    )
    return draw(st.lists(waiting_moves, min_size=25, max_size=70))
