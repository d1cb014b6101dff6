"""One run: every request comes to one end, clients do as they are, and what is held is given back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from extproc.domain.books import Books
from extproc.domain.contract import CONTRACT, Refusal
from extproc.domain.outcome import Reason
from extproc.domain.policy import Lane, ModelFallback, Policy, PoolFallback, Replica
from extproc.sim.engine import EngineConfig
from extproc.sim.fleet import IMPATIENT_US, Fate, Fleet, Record, Run
from extproc.sim.gates import AdmissionGate, Asked, Gate, OpenGate, Refused, UnknownName, Verdict, named, read
from extproc.sim.measures import Targets, is_good, jain, max_min_shares, measure, percentile, permille
from extproc.sim.workload import Request
from tests.builders import a_lane, a_model, a_policy, a_pool, a_quota, a_tenant, a_tier

SECOND = 1_000_000


def a_request(index: int, **changes: object) -> Request:
    """A chat of 1,000 tokens in and 100 out, by a client that obeys."""
    fields: dict[str, object] = {
        "index": index,
        "stream": "s",
        "arrival_us": index * SECOND,
        "tenant": "acme",
        "model": None,
        "declared_lane": None,
        "input_tokens": 1_000,
        "output_tokens": 100,
        "limit_tokens": 200,
        "obeys": True,
        "attempts": 3,
        "timeout_us": None,
        "spread": index * 7_919,
    }
    return Request(**(fields | changes))  # type: ignore[arg-type]


def a_small_policy(**lane_changes: int) -> Policy:
    """One replica of 10,000 tokens, so that eight chats fill it; nobody waits unless a lane lets them."""
    pool = a_pool(replicas=(Replica(name="r0", ceiling_tokens=10_000),), guard_band_permille=0)
    lanes = {lane: a_lane(lane, **lane_changes) for lane in Lane}
    model = a_model(lanes=dict.fromkeys((Lane.INTERACTIVE, Lane.BULK), "chat"))
    return a_policy(pools=(pool,), lanes=lanes, models=(model,))


QUEUE = {"residence_ms": 20_000, "queue_requests": 100, "queue_tokens": 1_000_000}


def play(
    policy: Policy, requests: list[Request], gate: Gate | None = None, **engine: int
) -> tuple[Run, AdmissionGate]:
    """A run with this policy's gate, or another."""
    own = AdmissionGate(policy)
    fleet = Fleet(
        gate=gate or own,
        configs={
            (pool.name, replica.name): EngineConfig(
                **({"kv_capacity_tokens": replica.ceiling_tokens, "prefill_tokens_per_s": 10_000} | engine)
            )
            for pool in policy.pools.values()
            for replica in pool.replicas
        },
        sample_us=SECOND,
        drain_us=600 * SECOND,
    )
    return fleet.play([read(policy, request) for request in requests]), own


def a_burst(count: int, **changes: object) -> list[Request]:
    """Requests that all come at once."""
    return [a_request(index, arrival_us=0, **changes) for index in range(count)]


def fates(run: Run) -> Counter[Fate]:
    """How the requests ended."""
    return Counter(record.fate for record in run.records)


def test_a_lone_request_is_served_as_the_engine_would() -> None:
    """Its TTFT is its prefill in one step, and its end comes 99 decode steps later."""
    run, _ = play(a_small_policy(), [a_request(0)])
    record = run.records[0]
    first_us = EngineConfig(prefill_tokens_per_s=10_000).step_us(decoding=0, prefill_tokens=1_000)
    step_us = EngineConfig().step_us(decoding=1, prefill_tokens=0)
    assert (record.fate, record.attempts) == (Fate.SERVED, 1)
    assert record.ttft_us == first_us
    assert record.ended_us == first_us + 99 * step_us


def test_what_was_held_is_given_back() -> None:
    """After a crowd with a queue has been served, the books hold nothing and nobody waits."""
    run, gate = play(a_small_policy(**QUEUE), a_burst(40))
    assert fates(run) == {Fate.SERVED: 40}
    assert list(gate.books.live_leases()) == []
    assert not gate.books.waiting.tickets
    assert any(record.held_us > 0 for record in run.records)


def test_no_more_is_let_through_than_the_policy_allows() -> None:
    """Of a burst, exactly as many are admitted at once as fit: 8 x 1,200 of 10,000 tokens."""
    run, _ = play(a_small_policy(), a_burst(20, attempts=1))
    assert fates(run) == {Fate.SERVED: 8, Fate.REFUSED: 12}
    assert sum(grant.tokens for grant in run.grants if grant.at_us == 0) == 9_600


def test_rates_are_settled_with_what_was_used() -> None:
    """A tenant that declares far more output than it takes is refunded: it gets through what it uses."""
    quota = a_quota(tokens_per_minute=6_000, burst_tokens=6_000)
    tenant = a_tenant(tier=a_tier(quota=quota))
    policy = replace(a_small_policy(), tenants={tenant.id: tenant})
    requests = [
        a_request(
            index,
            input_tokens=100,
            output_tokens=10,
            limit_tokens=1_000,
            attempts=1,
            arrival_us=index * SECOND,
        )
        for index in range(20)
    ]
    run, _ = play(policy, requests)
    assert fates(run) == {Fate.SERVED: 20}, "20 x 1,100 would be over three times the burst"


class RefusingGate(OpenGate):
    """Refuses everything and says when to come back."""

    def __init__(self, policy: Policy, *, retry_after_ms: int) -> None:
        super().__init__(policy)
        self.refusal = Refusal(reason=Reason.QUEUE_FULL, message="", retry_after_ms=retry_after_ms)

    def ask(self, asked: Asked, attempt_id: str, now_ms: int) -> Verdict | None:
        return Refused(refusal=self.refusal)


def test_who_obeys_comes_back_when_told_and_who_does_not_comes_sooner() -> None:
    """An obedient client's next attempt is at the time it was told, another's within half a second."""
    policy = a_small_policy()
    gate = RefusingGate(policy, retry_after_ms=7_000)
    obedient, _ = play(policy, [a_request(0)], gate)
    assert [refusal.at_us for refusal in obedient.refusals] == [0, 7 * SECOND, 14 * SECOND]
    other, _ = play(policy, [a_request(0, obeys=False)], gate)
    first, second, third = (refusal.at_us for refusal in other.refusals)
    assert first == 0
    assert 0 < second <= IMPATIENT_US
    assert second < third <= second + 2 * IMPATIENT_US
    assert fates(obedient) == fates(other) == {Fate.REFUSED: 1}


def test_who_obeys_stops_where_the_wait_is_too_long() -> None:
    """Beyond a minute the answer says not to retry, and obedient clients do not."""
    policy = a_small_policy()
    gate = RefusingGate(policy, retry_after_ms=60_001)
    obedient, _ = play(policy, [a_request(0)], gate)
    other, _ = play(policy, [a_request(0, obeys=False)], gate)
    assert (len(obedient.refusals), len(other.refusals)) == (1, 3)


def test_never_means_never() -> None:
    """A request that can never fit is asked once, by obedient clients and others."""
    for obeys in (True, False):
        run, _ = play(a_small_policy(), [a_request(0, input_tokens=20_000, obeys=obeys, attempts=5)])
        record = run.records[0]
        assert (record.fate, record.attempts) == (Fate.REFUSED, 1)
        assert record.reason is not None
        assert CONTRACT[record.reason].status == 413


def test_who_hangs_up_gives_up_its_place_and_its_lease() -> None:
    """Clients that hang up in line, and at the engine, leave nothing behind, and count as hung up."""
    policy = a_small_policy(**QUEUE)
    run, gate = play(policy, a_burst(30, timeout_us=300_000, attempts=1), prefill_tokens_per_s=2_000)
    assert fates(run)[Fate.HUNG_UP] > 0
    assert fates(run)[Fate.UNFINISHED] == 0
    assert list(gate.books.live_leases()) == []
    assert not gate.books.waiting.tickets
    assert all(record.first_token_us is None for record in run.records if record.fate is Fate.HUNG_UP)


class SilentGate(OpenGate):
    """Lets everybody wait, for ever, and notes who gives up."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.withdrawn: list[tuple[str, int]] = []

    def ask(self, asked: Asked, attempt_id: str, now_ms: int) -> Verdict | None:
        return None

    def withdraw(self, attempt_id: str, now_ms: int) -> None:
        self.withdrawn.append((attempt_id, now_ms))


def test_who_hangs_up_in_line_is_withdrawn() -> None:
    """The gate hears of every attempt that gives up its place, when it does."""
    policy = a_small_policy()
    gate = SilentGate(policy)
    run, _ = play(policy, [a_request(0, timeout_us=2 * SECOND, attempts=2, obeys=False)], gate)
    (first, at_ms), (second, _) = gate.withdrawn
    assert (first, at_ms, second) == ("0.1", 2_000, "0.2")
    assert run.records[0].held_us == 4 * SECOND
    assert fates(run) == {Fate.HUNG_UP: 1}


def test_a_withdrawn_place_is_free() -> None:
    """What waits in the books and is withdrawn waits no more, and is no news."""
    gate = AdmissionGate(a_small_policy(**QUEUE))
    asked = [read(gate.policy, request) for request in a_burst(9)]
    answers = [gate.ask(one, str(number), 0) for number, one in enumerate(asked)]
    assert answers[8] is None
    gate.withdraw("8", 1)
    assert not gate.books.waiting.tickets
    gate.ended("0", 2)
    assert gate.news(2) == []


def test_time_alone_lets_go_who_waits_for_a_rate() -> None:
    """With nothing else happening, a request that waits for its tenant's rate goes when the rate allows it."""
    quota = a_quota(tokens_per_minute=6_000, burst_tokens=1_200)
    tenant = a_tenant(tier=a_tier(quota=quota))
    policy = replace(a_small_policy(**QUEUE), tenants={tenant.id: tenant})
    run, _ = play(policy, a_burst(2, output_tokens=200))
    first, second = run.records
    assert (first.held_us, second.fate) == (0, Fate.SERVED)
    assert second.held_us == 12 * SECOND, "1,200 tokens at 6,000 a minute"


def test_hanging_up_is_an_attempt() -> None:
    """A client that hangs up tries again, and its TTFT is from its first attempt."""
    policy = a_small_policy()
    crowd = a_burst(8, output_tokens=200)
    run, _ = play(
        policy,
        [*crowd, a_request(8, arrival_us=0, timeout_us=200_000, attempts=9, obeys=False)],
        OpenGate(policy),
        max_num_seqs=8,
    )
    late = run.records[8]
    assert late.fate is Fate.SERVED
    assert late.attempts > 1
    assert late.ttft_us is not None
    assert late.ttft_us > 200_000


def test_without_a_gate_everything_goes_in_and_is_spread() -> None:
    """The open gate refuses nobody and balances by requests."""
    pool = a_pool(replicas=tuple(Replica(name=f"r{n}", ceiling_tokens=50_000) for n in range(4)))
    policy = replace(a_small_policy(), pools={"chat": pool})
    gate = OpenGate(policy)
    asked = [read(policy, request) for request in a_burst(8)]
    found = Counter(str(gate.ask(one, str(number), 0)) for number, one in enumerate(asked))
    assert sorted(found.values()) == [2, 2, 2, 2]


def test_a_request_limit_counts_what_is_in_flight() -> None:
    """At most so many at once; who ends makes room; the refusal says to come back in a second."""
    policy = a_small_policy()
    run, _ = play(policy, a_burst(10, attempts=1), OpenGate(policy, request_limit=3))
    assert fates(run) == {Fate.SERVED: 3, Fate.REFUSED: 7}
    assert {refusal.reason for refusal in run.refusals} == {Reason.NO_CAPACITY}
    later, _ = play(policy, a_burst(10, attempts=60), OpenGate(policy, request_limit=3))
    assert fates(later) == {Fate.SERVED: 10}


def test_an_engine_refuses_what_no_memory_holds() -> None:
    """Without control a request larger than the cache is refused by the engine, once."""
    policy = a_small_policy()
    run, _ = play(policy, [a_request(0, input_tokens=12_000)], OpenGate(policy))
    assert run.records[0].reason is Reason.EXCEEDS_CAPACITY
    assert run.records[0].attempts == 1


def test_what_does_not_end_in_time_is_unfinished() -> None:
    """A run is bounded: what goes on after the drain is counted as unfinished, not as served."""
    policy = a_small_policy()
    fleet = Fleet(
        gate=OpenGate(policy),
        configs={("chat", "r0"): EngineConfig(kv_capacity_tokens=10_000)},
        sample_us=SECOND,
        drain_us=SECOND,
    )
    run = fleet.play([read(policy, a_request(0, arrival_us=0, output_tokens=200))])
    assert fates(run) == {Fate.UNFINISHED: 1}
    assert run.ended_us <= SECOND


def test_the_same_requests_give_the_same_records() -> None:
    """Two runs are equal in every record, refusal, grant and sample."""

    def everything() -> object:
        requests = [
            a_request(
                index, arrival_us=index * 37_000, input_tokens=100 + index * 53 % 2_900, obeys=index % 3 > 0
            )
            for index in range(200)
        ]
        run, _ = play(a_small_policy(**QUEUE), requests)
        records = [
            (one.fate, one.attempts, one.reason, one.first_token_us, one.ended_us) for one in run.records
        ]
        return records, run.refusals, run.grants, run.samples

    assert everything() == everything()


def test_bulk_that_waits_is_counted_while_it_waits() -> None:
    """A grant knows which lanes waited until then, its own included."""
    policy = a_small_policy(**QUEUE)
    run, _ = play(policy, a_burst(20, declared_lane=Lane.BULK))
    at_once = [grant for grant in run.grants if grant.at_us == 0]
    assert all(grant.waiting == frozenset() for grant in at_once)
    later = [grant for grant in run.grants if grant.at_us > 0]
    assert later
    assert all(Lane.BULK in grant.waiting for grant in later)


def test_unknown_names_are_refused() -> None:
    """A model or tenant that the policy does not have is named, with those that it has."""
    policy = a_small_policy()
    with pytest.raises(UnknownName, match="no tenant 'nobody'; it has acme"):
        named(policy, a_request(0, tenant="nobody"))
    with pytest.raises(UnknownName, match="no model 'gpt'"):
        named(policy, a_request(0, model="gpt"))


def test_the_lane_of_a_request_follows_intent_and_size() -> None:
    """Declared bulk is bulk, large is bulk, and what fits no lane stays where it was declared."""
    policy = a_small_policy()
    lanes = [
        read(policy, a_request(0, declared_lane=Lane.BULK)).lane,
        read(policy, a_request(0, input_tokens=5_000)).lane,
        read(policy, a_request(0)).lane,
        read(policy, a_request(0, input_tokens=70_000, declared_lane=Lane.BULK)).lane,
    ]
    assert lanes == [Lane.BULK, Lane.BULK, Lane.INTERACTIVE, Lane.BULK]


# What runs come to.


def a_record(
    asked: Asked, *, fate: Fate = Fate.SERVED, ttft_us: int | None = 50_000, itl_us: int = 10_000
) -> Record:
    """A record that began when its request arrived."""
    record = Record(asked=asked, fate=fate, attempts=1)
    if ttft_us is not None:
        record.first_token_us = asked.request.arrival_us + ttft_us
        record.ended_us = record.first_token_us + itl_us * (asked.request.output_tokens - 1)
    return record


def test_good_is_finished_in_time_and_at_pace() -> None:
    """Late, slow, refused and unfinished work is not good; the limits themselves are."""
    asked = read(a_small_policy(), a_request(0))
    targets = Targets(ttft_ms=dict.fromkeys(Lane, 100), itl_ms=20)
    assert is_good(a_record(asked, ttft_us=100_000, itl_us=20_000), targets)
    assert not is_good(a_record(asked, ttft_us=100_001), targets)
    assert not is_good(a_record(asked, itl_us=20_001), targets)
    assert not is_good(a_record(asked, fate=Fate.UNFINISHED), targets)
    assert not is_good(a_record(asked, fate=Fate.REFUSED, ttft_us=None), targets)


def test_goodput_is_over_what_was_offered() -> None:
    """A refused request counts in the denominator, by its tokens, and not in the numerator."""
    policy = a_small_policy()
    run, _ = play(policy, [a_request(0), a_request(1, input_tokens=20_000, declared_lane=Lane.BULK)])
    measured = measure(
        run,
        name="x",
        policy=policy,
        targets=Targets(ttft_ms=dict.fromkeys(Lane, 10_000), itl_ms=None),
        seconds=2,
        interval_s=1,
    )
    assert measured.total.goodput_requests_permille == 500
    assert measured.total.offered_tokens == 1_100 + 20_100
    assert measured.total.goodput_permille == round(1_100_000 / 21_200)
    assert measured.lanes[Lane.BULK].refused_requests == 1
    assert measured.refusals == {"exceeds_capacity": 1}
    assert measured.series.goodput_permille["all"] == [1000, 0]
    assert measured.series.refusals == {"exceeds_capacity": [0, 1]}
    assert measured.bulk_share_permille == 0


def test_max_min_shares_fill_the_small_first() -> None:
    """Who wants less than its share gets it all; the rest is shared by weight, and nothing is left over."""
    shares = max_min_shares(100, {"small": 10, "a": 90, "b": 90}, {"small": 1, "a": 2, "b": 1})
    assert shares == {"small": 10, "a": 60, "b": 30}
    assert max_min_shares(500, {"a": 10, "b": 20}, {}) == {"a": 10, "b": 20}


def test_jains_index_has_its_known_values() -> None:
    """1 for equal shares, 1/n when one has everything, nothing for nothing."""
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([5, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([]) is None


def test_percentiles_are_by_nearest_rank() -> None:
    """Of 1 to 100 the p99 is 99; of one value every percentile is that value; of none there is none."""
    assert [percentile(range(1, 101), percent) for percent in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([7], 1) == 7
    assert percentile([], 50) is None
    assert (permille(1, 3), permille(1, 0)) == (333, None)


def test_the_books_of_a_run_are_the_services_own() -> None:
    """The gate holds the domain's books, not a model of them."""
    assert type(AdmissionGate(a_small_policy()).books) is Books


@pytest.mark.parametrize("residence_ms", [0, 2_000])
def test_what_finds_no_room_goes_where_the_policy_says(residence_ms: int) -> None:
    """Of 20 chats at once eight fit in their pool, eight in the spare pool, and four go to the small model."""
    pools = tuple(
        a_pool(name=name, replicas=(Replica(name="r0", ceiling_tokens=10_000),), guard_band_permille=0)
        for name in ("chat", "spare", "small")
    )
    both = (Lane.INTERACTIVE, Lane.BULK)
    policy = a_policy(
        pools=pools,
        lanes={
            lane: a_lane(lane, residence_ms=residence_ms, queue_requests=100, queue_tokens=10**6)
            for lane in Lane
        },
        models=(
            a_model(
                lanes=dict.fromkeys(both, "chat"),
                fallbacks=(PoolFallback(pool="spare"), ModelFallback(model="small")),
            ),
            a_model(name="small", lanes=dict.fromkeys(both, "small")),
        ),
    )
    # A step so slow that nobody leaves while the others come.
    requests = a_burst(20, attempts=1, output_tokens=10)
    run, gate = play(policy, requests, step_base_us=10_000_000)
    assert run.fallbacks == {"pool:spare": 8, "model:small": 4}
    assert {record.fate for record in run.records} == {Fate.SERVED}
    assert not list(gate.books.live_leases())
