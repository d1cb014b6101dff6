"""What holds whenever requests wait, whatever happens, in the model and in the scripts of a real Valkey.

Nothing here looks into the ledger: any ledger will do. Time is an argument.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.domain.policy import Lane, Pool, Quota, Replica
from extproc.domain.reservation import Denied, Granted, LaneTerms, Queued, Reservation
from tests.support.lua_books import LuaBooks
from tests.support.reservations import NO_QUOTA, quota
from tests.support.valkey import ValkeyServer
from tests.support.waiting_worlds import MORTAL, WORKER, StoreLedger, World

TENANTS = ("acme", "zoë", "t|x")


@dataclass(frozen=True, slots=True)
class NewWorld:
    """Makes worlds of one kind of ledger, each of which is empty."""

    lua: LuaBooks | None

    def __call__(self) -> World:
        return World() if self.lua is None else World(StoreLedger(self.lua))


@pytest.fixture(scope="module", params=["memory", "valkey"])
def new_world(request: pytest.FixtureRequest) -> Iterator[NewWorld]:
    """The model, and a store."""
    if request.param == "memory":
        yield NewWorld(None)
        return
    with ValkeyServer() as server, server.client() as client:
        yield NewWorld(LuaBooks(client))


def law(
    *, examples: int, in_store: int, **drawn: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[NewWorld], None]]:
    """A test of a property in any ledger; the store is tried with fewer examples, for each takes seconds there."""

    def test_of(holds: Callable[..., None]) -> Callable[[NewWorld], None]:
        def test(new_world: NewWorld) -> None:
            def tried(**values: Any) -> None:
                holds(new_world, **values)

            tried.__name__ = holds.__name__  # by which its failures are remembered
            few_or_many = examples if new_world.lua is None else in_store
            settings(max_examples=few_or_many, deadline=None)(given(**drawn)(tried))()

        test.__name__, test.__doc__ = holds.__name__, holds.__doc__
        return test

    return test_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One policy, small enough that everything is scarce."""

    pools: tuple[Pool, ...]
    terms: Mapping[Lane, LaneTerms]
    hold_ms: Mapping[Lane, int]
    limit_tokens: Mapping[Lane, int]
    quotas: Mapping[str, Quota]
    weights: Mapping[str, int]


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    """Any such policy."""
    pools = tuple(
        Pool(
            name=name,
            cluster="engines",
            replicas=tuple(
                Replica(name=replica, ceiling_tokens=draw(st.integers(400, 900)))
                for replica in draw(st.sampled_from(["a", "ab"]))
            ),
            guard_band_permille=draw(st.sampled_from([0, 100])),
            request_cap=draw(st.sampled_from([1, 3, 100])),
            prefill_tokens_per_s=draw(st.sampled_from([100, 1_000, 100_000])),
            decode_tokens_per_s=50,
            prefill_window_ms=draw(st.sampled_from([100, 1_000, 100_000])),
        )
        for name in ("chat", "other")
    )
    return Rules(
        pools=pools,
        terms={
            lane: LaneTerms(
                queue_requests=draw(st.integers(0, 6)),
                queue_tokens=draw(st.integers(0, 1_500)),
                floor_permille=draw(st.sampled_from([0, 100, 300])),
                prefill_share_permille=draw(st.sampled_from([100, 500, 1_000])),
                spare_replicas=draw(st.sampled_from([0, 0, 1])),
            )
            for lane in Lane
        },
        hold_ms={lane: draw(st.sampled_from([0, 300, 2_000])) for lane in Lane},
        limit_tokens={lane: draw(st.integers(400, 2_000)) for lane in Lane},
        quotas={
            tenant: draw(
                st.sampled_from(
                    [
                        NO_QUOTA,
                        quota(tokens_per_minute=6_000, burst_tokens=400),
                        quota(requests_per_minute=60),
                        quota(inflight_tokens=500),
                        quota(inflight_requests=2),
                    ]
                )
            )
            for tenant in TENANTS
        },
        weights={tenant: draw(st.integers(1, 3)) for tenant in TENANTS},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Somebody asks."""

    tenant: str
    lane: Lane
    pool: int
    input_tokens: int
    output_tokens: int
    deadline_in_ms: int
    mortal: bool


@dataclass(frozen=True, slots=True)
class End:
    """One that is held ends."""

    which: int


@dataclass(frozen=True, slots=True)
class HangUp:
    """One that waits leaves."""

    which: int


@dataclass(frozen=True, slots=True)
class Pass:
    """Time passes."""

    ms: int


@dataclass(frozen=True, slots=True)
class Kill:
    """A holder dies."""


Move = Ask | End | HangUp | Pass | Kill

asks = st.builds(
    Ask,
    tenant=st.sampled_from(TENANTS),
    lane=st.sampled_from(list(Lane)),
    pool=st.sampled_from([0, 0, 0, 1]),
    input_tokens=st.sampled_from([0, 1, 20, 100]),
    output_tokens=st.integers(0, 260),
    deadline_in_ms=st.sampled_from([150, 1_000, 60_000, 60_000]),
    mortal=st.booleans(),
)
moves: st.SearchStrategy[Move] = st.one_of(
    asks,
    asks,
    asks,
    st.builds(End, which=st.integers(0, 30)),
    st.builds(End, which=st.integers(0, 30)),
    st.builds(HangUp, which=st.integers(0, 10)),
    st.builds(Pass, ms=st.one_of(st.integers(0, 400), st.sampled_from([1_000, 7_000]))),
)


def play(world: World, how: Rules, history: list[Move]) -> Iterator[Move]:
    """Make the moves, one at a time."""
    numbers = count()
    for move in history:
        match move:
            case Ask():
                total_tokens = move.input_tokens + move.output_tokens
                where = how.pools[move.pool]
                limits = how.quotas[move.tenant]
                most = min(
                    where.largest_usable_tokens, how.limit_tokens[move.lane], limits.burst_tokens or 1_000
                )
                if total_tokens > most:  # what can never fit is refused before a ledger is asked
                    continue
                world.ask(
                    Reservation(
                        lease_id=f"r{next(numbers)}",
                        tenant=move.tenant,
                        quota=limits,
                        lane=move.lane,
                        lane_limit_tokens=how.limit_tokens[move.lane],
                        pool=where,
                        input_tokens=move.input_tokens,
                        output_tokens=move.output_tokens,
                        work_units=total_tokens,
                        deadline_in_ms=move.deadline_in_ms,
                        residence_ms=1_000,
                        policy_version="v1",
                        hold_ms=how.hold_ms[move.lane],
                        weight=how.weights[move.tenant],
                        lane_terms=how.terms[move.lane],
                    ),
                    MORTAL if move.mortal and MORTAL.id not in world.dead else WORKER,
                )
            case End(which=which):
                if world.held:
                    world.end([*world.held][which % len(world.held)])
            case HangUp(which=which):
                if world.waiting:
                    world.hang_up([*world.waiting][which % len(world.waiting)])
            case Pass(ms=ms):
                world.pass_ms(ms)
            case Kill():
                world.kill(MORTAL)
        yield move


def bounds_hold(world: World) -> None:
    """No more waits, in requests and in tokens, than a lane allows; nobody waits longer than it may."""
    requests: Counter[tuple[str, Lane]] = Counter()
    tokens: Counter[tuple[str, Lane]] = Counter()
    for lease_id in world.waiting:
        asked = world.asked[lease_id]
        requests[asked.pool.name, asked.lane] += 1
        tokens[asked.pool.name, asked.lane] += asked.total_tokens
        terms = asked.lane_terms
        assert requests[asked.pool.name, asked.lane] <= terms.queue_requests
        assert tokens[asked.pool.name, asked.lane] <= terms.queue_tokens
        waited_ms = world.now_ms - world.asked_at_ms[lease_id]
        prefill_ms = asked.pool.prefill_ms(asked.input_tokens)
        assert waited_ms < asked.hold_ms
        assert waited_ms < asked.deadline_in_ms - prefill_ms


def limits_hold(world: World) -> None:
    """What is held is within every limit, by the world's own account."""
    replicas: Counter[tuple[str, str]] = Counter()
    requests: Counter[tuple[str, str]] = Counter()
    lanes: Counter[tuple[str, Lane]] = Counter()
    tenants: Counter[str] = Counter()
    for lease_id, granted in world.held.items():
        asked = world.asked[lease_id]
        replicas[asked.pool.name, granted.replica] += asked.total_tokens
        requests[asked.pool.name, granted.replica] += 1
        lanes[asked.pool.name, asked.lane] += asked.total_tokens
        tenants[asked.tenant] += asked.total_tokens
        usable = {one.name: asked.pool.usable_tokens(one) for one in asked.pool.replicas}
        assert replicas[asked.pool.name, granted.replica] <= usable[granted.replica]
        assert requests[asked.pool.name, granted.replica] <= asked.pool.request_cap
        assert lanes[asked.pool.name, asked.lane] <= asked.lane_limit_tokens
        assert tenants[asked.tenant] <= (asked.quota.inflight_tokens or 1_000_000)


def grants_are_in_time(world: World) -> None:
    """What is granted is granted early enough for its prompt to be read before its deadline."""
    for lease_id, outcome in world.outcomes.items():
        if isinstance(outcome.answer, Granted):
            left_ms = world.asked_at_ms[lease_id] + world.asked[lease_id].deadline_in_ms - outcome.at_ms
            assert outcome.answer.ttft_ms <= left_ms
            waited_ms = outcome.at_ms - world.asked_at_ms[lease_id]
            assert outcome.answer.waited_ms == waited_ms
            assert waited_ms < max(1, world.asked[lease_id].hold_ms)


def somebody_is_blocked(world: World) -> None:
    """If anybody waits for a pool, at least one of them does not fit: capacity never idles for no reason."""
    waiting: dict[str, list[Reservation]] = {}
    for lease_id in world.waiting:
        asked = world.asked[lease_id]
        waiting.setdefault(asked.pool.name, []).append(asked)
    for pool_name, who in waiting.items():
        held = [(world.asked[lease_id], granted.replica) for lease_id, granted in world.held.items()]
        assert any(_blocked(asked, pool_name, held, world) for asked in who), f"{pool_name} idles"


def _blocked(asked: Reservation, pool_name: str, held: list[tuple[Reservation, str]], world: World) -> bool:
    """Whether this one is at some limit. Rates and prefill are not followed here: they count as a limit."""
    limits, terms, where = asked.quota, asked.lane_terms, asked.pool
    if limits.tokens_per_minute is not None or limits.requests_per_minute is not None:
        return True
    if where.prefill_tokens_per_s < 100_000 or terms.prefill_share_permille < 1_000:
        return True
    own = [one for one, _ in held if one.tenant == asked.tenant]
    if limits.inflight_requests is not None and len(own) >= limits.inflight_requests:
        return True
    used = sum(one.total_tokens for one in own)
    if limits.inflight_tokens is not None and used + asked.total_tokens > limits.inflight_tokens:
        return True
    here = [(one, replica) for one, replica in held if one.pool.name == pool_name]
    in_lane = sum(one.total_tokens for one, _ in here if one.lane is asked.lane)
    if in_lane + asked.total_tokens > asked.lane_limit_tokens:
        return True
    for replica in where.replicas:
        mine = [one.total_tokens for one, name in here if name == replica.name]
        if len(mine) < where.request_cap and sum(mine) + asked.total_tokens <= where.usable_tokens(replica):
            return False
    return True


@law(examples=300, in_store=40, how=rules(), history=st.lists(moves, max_size=60))
def test_whatever_happens(new_world: NewWorld, how: Rules, history: list[Move]) -> None:
    """Bounds, limits, deadlines and work conservation hold after every move; in the end nobody waits."""
    world = new_world()
    for _ in play(world, how, history):
        bounds_hold(world)
        limits_hold(world)
        grants_are_in_time(world)
        somebody_is_blocked(world)
    world.pass_ms(2_000)
    assert not world.waiting
    assert set(world.asked) == set(world.outcomes) | world.withdrawn
    for lease_id in [*world.held]:
        world.end(lease_id)
    world.pass_ms(61_000)
    assert world.ledger.next_moment_ms() is None


@law(
    examples=150,
    in_store=20,
    how=rules(),
    before=st.lists(moves, max_size=30),
    after=st.lists(moves, max_size=20),
    size=st.integers(1, 400),
)
def test_the_dead_keep_nobody_waiting(
    new_world: NewWorld, how: Rules, before: list[Move], after: list[Move], size: int
) -> None:
    """When a holder has died and its leases' time is over, whoever is alive goes as if it had never been."""
    world = new_world()
    for _ in play(world, how, [*before, Kill()]):
        pass
    for lease_id in [*world.held]:
        world.end(lease_id)
    world.pass_ms(MORTAL.lease_ttl_ms + MORTAL.orphan_grace_ms)
    assert not world.waiting
    where = how.pools[0]
    answer = world.ask(
        Reservation(
            lease_id="alive",
            tenant="new",
            quota=NO_QUOTA,
            lane=Lane.INTERACTIVE,
            lane_limit_tokens=100_000,
            pool=where,
            input_tokens=0,
            output_tokens=min(size, where.largest_usable_tokens),
            work_units=1,
            deadline_in_ms=200_000,
            residence_ms=1_000,
            policy_version="v1",
            hold_ms=10_000,
            lane_terms=LaneTerms(queue_requests=10, queue_tokens=10_000),
        )
    )
    if isinstance(answer, Queued):
        world.pass_ms(6_000)  # a backlog of prefill outlives whoever caused it
    assert isinstance(world.outcomes["alive"].answer, Granted)
    world.kill(MORTAL)
    for _ in play(new_world(), how, after):
        pass


# Shares, under load that never ends.

ROOM_TOKENS = 4_000
ROOM = Pool(
    name="chat",
    cluster="engines",
    replicas=(Replica(name="a", ceiling_tokens=ROOM_TOKENS),),
    guard_band_permille=0,
    request_cap=1_000,
    prefill_tokens_per_s=1_000_000,
    decode_tokens_per_s=50,
    prefill_window_ms=1_000_000,
)


def full(lease_id: str, lane: Lane, tokens: int, *, queue_requests: int, floor: int = 0) -> Reservation:
    """A request that waits as long as it takes."""
    return Reservation(
        lease_id=lease_id,
        tenant="a",
        quota=NO_QUOTA,
        lane=lane,
        lane_limit_tokens=10**9,
        pool=ROOM,
        input_tokens=0,
        output_tokens=tokens,
        work_units=tokens,
        deadline_in_ms=10**9,
        residence_ms=1_000,
        policy_version="v1",
        hold_ms=10**9,
        lane_terms=LaneTerms(queue_requests=queue_requests, queue_tokens=10**9, floor_permille=floor),
    )


@dataclass(slots=True)
class Backlog:
    """Tenants that always have requests waiting, and a pool that always ends the oldest."""

    world: World
    dice: random.Random
    sizes: Mapping[tuple[Lane, str], tuple[int, int]]
    weights: Mapping[str, int]
    floors: Mapping[Lane, int]
    number: int = 0

    def refill(self) -> None:
        """Let everybody have as much waiting as the pool can hold."""
        waiting: Counter[tuple[Lane, str]] = Counter()
        for lease_id in self.world.waiting:
            asked = self.world.asked[lease_id]
            waiting[asked.lane, asked.tenant] += asked.total_tokens
        for (lane, tenant), (least, most) in self.sizes.items():
            while waiting[lane, tenant] < ROOM_TOKENS:
                self.number += 1
                tokens = self.dice.randint(least, most)
                waiting[lane, tenant] += tokens
                request = full(
                    f"r{self.number}", lane, tokens, queue_requests=10_000, floor=self.floors.get(lane, 0)
                )
                self.world.ask(replace(request, tenant=tenant, weight=self.weights.get(tenant, 1)))

    def serve(self, rounds: int) -> Iterator[Counter[tuple[Lane, str]]]:
        """End one at a time; what everybody has been granted, after each."""
        for _ in range(rounds):
            self.world.end(next(iter(self.world.held)))
            self.refill()
            yield self.world.granted_tokens.copy()


def a_backlog(
    world: World,
    seed: int,
    sizes: Mapping[tuple[Lane, str], tuple[int, int]],
    weights: Mapping[str, int] | None = None,
    floors: Mapping[Lane, int] | None = None,
) -> Backlog:
    """One that has just begun, with the pool full and everybody waiting."""
    backlog = Backlog(world, random.Random(seed), sizes, weights or {}, floors or {})
    backlog.refill()
    backlog.refill()  # the first ones have been granted
    return backlog


@law(
    examples=10,
    in_store=3,
    seed=st.integers(0, 10_000),
    largest=st.integers(20, 2_000),
    small=st.integers(20, 400),
)
def test_two_backlogged_tenants_are_never_far_apart(
    new_world: NewWorld, seed: int, largest: int, small: int
) -> None:
    """Of two tenants that always wait, over any stretch none is served two largest requests more than the other.

    The largest is that of anybody: while a large one waits for room, small ones may pass it.
    """
    lane = Lane.INTERACTIVE
    backlog = a_backlog(
        new_world(), seed, {(lane, "a"): (10, largest), (lane, "b"): (10, small), (lane, "c"): (10, 100)}
    )
    lead = [served[lane, "a"] - served[lane, "b"] for served in backlog.serve(300)]
    assert max(lead) - min(lead) <= 2 * max(largest, small, 100)


@law(
    examples=5,
    in_store=2,
    seed=st.integers(0, 10_000),
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=4),
)
def test_shares_follow_weights(new_world: NewWorld, seed: int, weights: list[int]) -> None:
    """Over a long stretch tenants that always wait are served in proportion to their weights, within 5 %."""
    lane = Lane.INTERACTIVE
    shares = {f"t{position}": weight for position, weight in enumerate(weights)}
    backlog = a_backlog(new_world(), seed, {(lane, tenant): (10, 400) for tenant in shares}, shares)
    first = backlog.world.granted_tokens.copy()
    last = first
    for served_by_now in backlog.serve(1_200):
        last = served_by_now
    served = {tenant: last[lane, tenant] - first[lane, tenant] for tenant in shares}
    for tenant, weight in shares.items():
        fair = sum(served.values()) * weight / sum(weights)
        assert abs(served[tenant] - fair) <= 0.05 * fair


@law(
    examples=10,
    in_store=4,
    seed=st.integers(0, 10_000),
    floor=st.sampled_from([50, 100, 250, 500]),
    document=st.integers(200, ROOM_TOKENS),
    chat=st.integers(20, 400),
)
def test_bulk_gets_its_floor_and_not_much_more(
    new_world: NewWorld, seed: int, floor: int, document: int, chat: int
) -> None:
    """Under interactive load that never ends bulk gets its floor at least, and at most one request more."""
    interactive, bulk = (Lane.INTERACTIVE, "human"), (Lane.BULK, "machine")
    backlog = a_backlog(
        new_world(), seed, {interactive: (10, chat), bulk: (100, document)}, floors={Lane.BULK: floor}
    )
    # Small documents may pass waiting chats, so bulk may be a little ahead of its floor, never behind it.
    for _ in backlog.serve(50):
        pass
    first = backlog.world.granted_tokens.copy()
    last = first
    for served_by_now in backlog.serve(300):
        last = served_by_now
    got = last[bulk] - first[bulk]
    total = got + last[interactive] - first[interactive]
    assert got >= total * floor / 1000 - document
    assert got <= total * floor / 1000 + 2 * document


@law(
    examples=4,
    in_store=2,
    seed=st.integers(0, 10_000),
    floor=st.sampled_from([100, 250, 500]),
    document=st.integers(200, 500),
)
def test_what_bulk_had_at_night_counts_by_day(
    new_world: NewWorld, seed: int, floor: int, document: int
) -> None:
    """After bulk had the pool to itself no document goes before chats until they had as much as the pool holds."""
    interactive, bulk = (Lane.INTERACTIVE, "human"), (Lane.BULK, "machine")
    backlog = a_backlog(new_world(), seed, {bulk: (200, document)}, floors={Lane.BULK: floor})
    for _ in backlog.serve(40):
        pass
    backlog.sizes = {**backlog.sizes, interactive: (20, 60)}
    backlog.refill()
    before = backlog.world.granted_tokens.copy()
    served_by_now = before
    for served_by_now in backlog.serve(400):
        if served_by_now[bulk] > before[bulk]:
            break
    assert served_by_now[bulk] > before[bulk]
    assert served_by_now[interactive] - before[interactive] >= ROOM_TOKENS


@law(
    examples=4,
    in_store=2,
    seed=st.integers(0, 10_000),
    floor=st.sampled_from([100, 250, 500]),
    document=st.integers(200, ROOM_TOKENS),
)
def test_a_document_holds_chats_up_no_longer_than_the_pool_needs_to_empty(
    new_world: NewWorld, seed: int, floor: int, document: int
) -> None:
    """A stretch without a chat ends when what was held at its beginning has ended, and follows at least one chat.

    The bound: a document that is owed its turn waits for room as long as the leases of one pool last, once, and
    meanwhile chats of up to its own size pass.
    """
    interactive, bulk = (Lane.INTERACTIVE, "human"), (Lane.BULK, "machine")
    backlog = a_backlog(
        new_world(), seed, {interactive: (20, 60), bulk: (200, document)}, floors={Lane.BULK: floor}
    )
    served = backlog.world.granted_tokens[interactive]
    began_with, stretch = len(backlog.world.held), 0
    for served_by_now in backlog.serve(150):
        stretch += 1
        if served_by_now[interactive] > served:
            served, stretch, began_with = served_by_now[interactive], 0, len(backlog.world.held)
        assert stretch <= began_with + 1


def test_without_a_floor_bulk_gets_what_interactive_leaves(new_world: NewWorld) -> None:
    """Strict priority is what it says: a saturated interactive lane leaves nothing."""
    interactive, bulk = (Lane.INTERACTIVE, "human"), (Lane.BULK, "machine")
    backlog = a_backlog(new_world(), 1, {interactive: (400, 400), bulk: (400, 400)})
    first = backlog.world.granted_tokens[bulk]
    for served in backlog.serve(200):
        assert served[bulk] == first


@pytest.mark.parametrize("rounds", [200])
def test_who_comes_back_from_idleness_has_no_credit(new_world: NewWorld, rounds: int) -> None:
    """A tenant that was away for long is served in turn with the others, not before them."""
    lane = Lane.INTERACTIVE
    backlog = a_backlog(new_world(), 3, {(lane, "a"): (100, 100), (lane, "b"): (100, 100)})
    for _ in backlog.serve(rounds):
        pass
    backlog.sizes = {**backlog.sizes, (lane, "late"): (100, 100)}
    backlog.refill()
    first = backlog.world.granted_tokens.copy()
    for served in backlog.serve(90):
        lead = (served[lane, "late"] - first[lane, "late"]) - (served[lane, "a"] - first[lane, "a"])
        assert abs(lead) <= 200


def test_the_wait_that_is_told_grows_with_the_line(new_world: NewWorld) -> None:
    """The more waits, the longer the wait that the refused are told."""
    lane, waits = Lane.INTERACTIVE, []
    for waiting in (1, 3, 9, 27):
        world = new_world()
        for number in range(10 + waiting):
            world.ask(full(f"r{number}", lane, 400, queue_requests=100))
        answer = world.ask(full("refused", lane, 400, queue_requests=1))
        assert isinstance(answer, Denied)
        assert answer.ahead_requests == waiting
        waits.append(answer.wait_ms)
    assert waits == sorted(set(waits))
