"""What waiting is like, as stories: who goes first, who may pass, who is told to go away, and who is not."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.domain.lease import LeaseState
from extproc.domain.policy import Lane
from extproc.domain.reservation import Denied, Granted, LaneTerms, Queued, Reservation, Scope
from tests.support.reservations import pool, quota, reservation
from tests.support.waiting_worlds import MORTAL, WORKER, BooksLedger, World

SMALL = pool(1_000)
TERMS = LaneTerms(queue_requests=100, queue_tokens=1_000_000)


def waiter(lease_id: str, tokens: int = 100, **changes: Any) -> Reservation:
    """A request that would wait ten seconds for room among 1,000 tokens."""
    fields: dict[str, Any] = {"pool": SMALL, "hold_ms": 10_000, "lane_terms": TERMS, "total_tokens": tokens}
    return reservation(lease_id, **(fields | changes))


def full_world() -> World:
    """Everything is held by one lease."""
    world = World()
    assert isinstance(world.ask(waiter("full", 1_000, tenant="other")), Granted)
    return world


def granted(world: World) -> list[str]:
    """Who has been granted something, in order, the first holder aside."""
    return [
        lease_id
        for lease_id, outcome in world.outcomes.items()
        if isinstance(outcome.answer, Granted) and lease_id != "full"
    ]


def denied(world: World, lease_id: str) -> Denied:
    """What this one was told."""
    answer = world.outcomes[lease_id].answer
    assert isinstance(answer, Denied)
    return answer


def test_a_request_waits_and_goes_when_there_is_room() -> None:
    """What does not fit now is granted by the release that makes room, with the time it has waited."""
    world = full_world()
    answer = world.ask(waiter("a"))
    assert answer == Queued(lease_id="a", position=1, wait_ms=1_001, expires_in_ms=10_000)
    world.pass_ms(700)
    assert not granted(world)
    world.end("full")
    outcome = world.outcomes["a"].answer
    assert isinstance(outcome, Granted)
    assert outcome.waited_ms == 700


def test_nobody_waits_longer_than_the_lane_allows() -> None:
    """At the end of its time a ticket is refused, with its reason, and its place is free."""
    world = full_world()
    world.ask(waiter("a", hold_ms=500))
    world.pass_ms(499)
    assert "a" in world.waiting
    world.pass_ms(1)
    answer = denied(world, "a")
    assert (answer.scope, answer.behind, answer.waited_ms) == (Scope.RESIDENCE, Scope.REPLICA_TOKENS, 500)
    assert not world.waiting


def test_nobody_waits_past_the_point_where_the_deadline_can_be_met() -> None:
    """A prompt of 400 tokens is read in 400 ms: with 1,500 ms to its first token it may wait for 1,100."""
    world = World()
    world.ask(waiter("full", 1_000, tenant="other", residence_ms=10))
    world.ask(waiter("a", 500, input_tokens=400, deadline_in_ms=1_500))
    world.pass_ms(1_099)
    assert "a" in world.waiting
    world.pass_ms(1)
    assert denied(world, "a").scope is Scope.DEADLINE
    world.end("full")
    assert not granted(world)


def test_what_cannot_be_in_time_does_not_wait() -> None:
    """1,000 tokens that stay 10 s leave at 100 a second: a second deadline cannot be met, so say so at once."""
    world = full_world()
    answer = world.ask(waiter("a", 500, deadline_in_ms=1_000))
    assert isinstance(answer, Denied)
    assert answer.scope is Scope.DEADLINE
    # 5 s for half the tokens, 1 ms to read the prompt before it, 1 ms for its own; 1 s was allowed.
    assert answer.wait_ms == 4_002


def test_what_waits_ahead_counts_against_the_deadline() -> None:
    """The same request is in time alone and too late behind others."""
    alone, behind = full_world(), full_world()
    assert isinstance(alone.ask(waiter("a", deadline_in_ms=3_000)), Queued)
    for number in range(3):
        behind.ask(waiter(f"ahead-{number}"))
    answer = behind.ask(waiter("a", deadline_in_ms=3_000))
    assert isinstance(answer, Denied)
    assert (answer.scope, answer.ahead_requests) == (Scope.DEADLINE, 3)


def test_a_flood_of_others_does_not_make_a_quiet_tenant_late() -> None:
    """What a noisy tenant has waiting counts only as far as its weight lets it go first."""
    world = full_world()
    for number in range(50):
        world.ask(waiter(f"noise-{number}", tenant="noisy"))
    answer = world.ask(waiter("a", tenant="quiet", deadline_in_ms=3_000))
    assert isinstance(answer, Queued)
    assert answer.position == 2


def test_a_rate_that_will_not_refill_in_time_is_told_at_once() -> None:
    """One token a second and 50 missing are 50 s: no ten seconds of waiting help. Five missing are worth it."""
    limits = quota(tokens_per_minute=60, burst_tokens=100)
    world = World()
    world.ask(waiter("first", 95, quota=limits))
    answer = world.ask(waiter("late", 55, quota=limits))
    assert isinstance(answer, Denied)
    assert (answer.scope, answer.wait_ms) == (Scope.TENANT_TOKEN_RATE, 50_000)
    assert isinstance(world.ask(waiter("soon", 10, quota=limits)), Queued)
    world.pass_ms(4_999)
    assert granted(world) == ["first"]
    world.pass_ms(1)
    assert granted(world) == ["first", "soon"]


def test_interactive_goes_before_bulk_and_bulk_before_overflow() -> None:
    """Lanes are served from the highest to the lowest, whoever came first."""
    world = full_world()
    for lane in reversed(Lane):
        world.ask(waiter(str(lane), 400, lane=lane))
    world.end("full")
    assert granted(world) == ["interactive", "bulk"]
    world.end("bulk")
    assert granted(world) == ["interactive", "bulk", "overflow"]


def test_inside_a_tenant_the_earliest_deadline_goes_first() -> None:
    """Not the one that came first; of equal deadlines, that one."""
    world = full_world()
    for lease_id, deadline_in_ms in (("late", 90_000), ("soon", 30_000), ("too", 30_000)):
        world.ask(waiter(lease_id, 400, deadline_in_ms=deadline_in_ms))
    world.end("full")
    assert granted(world) == ["soon", "too"]


def test_tenants_take_turns() -> None:
    """A tenant with many requests does not go before one with few."""
    world = full_world()
    for number in range(4):
        world.ask(waiter(f"a{number}", 500, tenant="a"))
    for number in range(2):
        world.ask(waiter(f"b{number}", 500, tenant="b"))
    for lease_id in ("full", "a0", "b0", "a1"):
        world.end(lease_id)
    assert granted(world) == ["a0", "b0", "a1", "b1", "a2"]


def test_a_tenant_at_its_own_limit_holds_up_nobody_else() -> None:
    """It is set aside until one of its own requests ends."""
    one = quota(inflight_requests=1)
    world = World()
    world.ask(waiter("a0", tenant="a", quota=one))
    assert isinstance(world.ask(waiter("a1", tenant="a", quota=one)), Queued)
    assert isinstance(world.ask(waiter("b0", tenant="b")), Granted)
    world.end("b0")
    assert granted(world) == ["a0", "b0"]
    world.end("a0")
    assert granted(world) == ["a0", "b0", "a1"]


def test_a_limit_of_a_tenant_holds_across_pools() -> None:
    """A request that ends in one pool lets its tenant go on in the other."""
    one = quota(inflight_requests=1)
    world = World()
    world.ask(waiter("a0", tenant="a", quota=one))
    world.ask(waiter("a1", tenant="a", quota=one, pool=pool(1_000, name="second")))
    world.end("a0")
    assert granted(world) == ["a0", "a1"]


def test_a_lane_at_its_share_holds_up_no_other_lane() -> None:
    """Interactive has used up what it may hold; bulk goes on."""
    world = World()
    world.ask(waiter("i0", 400, lane_limit_tokens=400))
    assert isinstance(world.ask(waiter("i1", 400, lane_limit_tokens=400)), Queued)
    assert isinstance(world.ask(waiter("b0", 400, lane=Lane.BULK)), Granted)
    world.end("i0")
    assert granted(world) == ["i0", "b0", "i1"]


def test_a_large_request_is_not_kept_out_by_small_ones() -> None:
    """Nobody more than a quarter of its size may pass; the others together may take as much as it asks."""
    world = World()
    for number in range(10):
        world.ask(waiter(f"held-{number}", 100, tenant="other"))
    world.ask(waiter("large", 800))
    for number in range(12):
        world.ask(waiter(f"small-{number}", 100, tenant="b"))
    world.ask(waiter("medium", 201, tenant="c"))
    for number in range(10):
        world.end(f"held-{number}")
    passed = [lease_id for lease_id in granted(world) if lease_id.startswith("small")]
    assert len(passed) == 8
    assert "medium" not in granted(world)
    for lease_id in passed[:6]:
        assert "large" not in granted(world)
        world.end(lease_id)
    assert granted(world)[-1] == "large"


def test_a_lane_below_its_floor_goes_first_and_the_pool_waits_with_it() -> None:
    """Bulk with a floor of a quarter gets it while interactive never stops asking, even for large requests."""
    terms = LaneTerms(queue_requests=100, queue_tokens=1_000_000, floor_permille=250)
    world = full_world()
    world.ask(waiter("bulk", 1_000, lane=Lane.BULK, lane_terms=terms))
    for number in range(8):
        world.ask(waiter(f"i{number}", 500))
    world.end("full")
    assert granted(world) == ["i0"]  # bulk is owed 125 now, so it is next, and it needs all the room
    world.end("i0")
    assert granted(world) == ["i0", "bulk"]
    world.ask(waiter("more", 1_000, lane=Lane.BULK, lane_terms=terms))
    for lease_id in ("bulk", "i1", "i2", "i3", "i4"):
        world.end(lease_id)
    # It has had 625 more than its share: it is owed something again when the others have had over 2,500.
    assert granted(world) == ["i0", "bulk", "i1", "i2", "i3", "i4", "i5", "i6"]
    world.end("i5")
    world.end("i6")
    assert granted(world)[-1] == "more"


def test_bulk_reads_no_faster_than_its_share_of_prefill() -> None:
    """Half of 1,000 tokens a second: the second prompt of 600 waits until the first is within the window."""
    terms = LaneTerms(queue_requests=100, queue_tokens=1_000_000, prefill_share_permille=500)
    room = pool(100_000, prefill_window_ms=1_000)
    bulk: dict[str, Any] = {"lane": Lane.BULK, "lane_terms": terms, "pool": room, "input_tokens": 600}
    world = World()
    assert isinstance(world.ask(waiter("b0", 700, **bulk)), Granted)  # larger than the window: it was idle
    assert isinstance(world.ask(waiter("b1", 700, **bulk)), Queued)
    assert isinstance(world.ask(waiter("i0", 100, pool=room)), Granted)
    world.pass_ms(1_199)
    assert "b1" in world.waiting
    world.pass_ms(1)
    assert granted(world) == ["b0", "i0", "b1"]


def test_bulk_leaves_replicas_with_nothing_to_read() -> None:
    """Of three replicas one must be left idle: the third document waits for the first that has been read."""
    terms = LaneTerms(queue_requests=100, queue_tokens=1_000_000, spare_replicas=1)
    room = pool(100_000, 100_000, 100_000, prefill_window_ms=1_000)
    bulk: dict[str, Any] = {"lane": Lane.BULK, "lane_terms": terms, "pool": room}
    world = World()
    assert isinstance(world.ask(waiter("b0", 3_100, input_tokens=3_000, **bulk)), Granted)
    assert isinstance(world.ask(waiter("b1", 2_100, input_tokens=2_000, **bulk)), Granted)
    assert isinstance(world.ask(waiter("b2", 2_100, input_tokens=2_000, **bulk)), Queued)
    assert isinstance(world.ask(waiter("i0", 600, pool=room, input_tokens=500)), Granted)
    world.pass_ms(1_999)
    assert "b2" in world.waiting
    world.pass_ms(1)
    assert granted(world) == ["b0", "b1", "i0", "b2"]


def test_a_pool_of_one_has_no_replica_to_spare() -> None:
    """Bulk may always use the last replica there is: a limit that could never be met would starve it."""
    terms = LaneTerms(queue_requests=100, queue_tokens=1_000_000, spare_replicas=3)
    world = World()
    asked = waiter("b0", 700, lane=Lane.BULK, lane_terms=terms, pool=pool(100_000), input_tokens=600)
    assert isinstance(world.ask(asked), Granted)


@pytest.mark.parametrize(
    ("terms", "more"),
    [
        (LaneTerms(queue_requests=2, queue_tokens=1_000_000), 1),
        (LaneTerms(queue_requests=100, queue_tokens=250), 51),
    ],
)
def test_a_full_line_is_full(terms: LaneTerms, more: int) -> None:
    """In requests or in tokens; the wait that is told is that of the whole line."""
    world = full_world()
    for number in range(2):
        assert isinstance(world.ask(waiter(f"a{number}", lane_terms=terms)), Queued)
    answer = world.ask(waiter("b", more, lane_terms=terms))
    assert isinstance(answer, Denied)
    assert (answer.scope, answer.ahead_requests) == (Scope.QUEUE, 2)
    assert answer.wait_ms >= 2_000


def test_a_full_line_makes_room_for_whoever_has_least_in_it() -> None:
    """The tenant that fills the line gives up its last place to one that has none."""
    terms = LaneTerms(queue_requests=3, queue_tokens=1_000_000)
    world = full_world()
    for number in range(3):
        world.ask(waiter(f"noise-{number}", tenant="noisy", lane_terms=terms))
    assert isinstance(world.ask(waiter("a", tenant="quiet", lane_terms=terms)), Queued)
    assert denied(world, "noise-2").scope is Scope.QUEUE
    assert isinstance(world.ask(waiter("noise-3", tenant="noisy", lane_terms=terms)), Denied)
    assert sorted(world.waiting) == ["a", "noise-0", "noise-1"]


def test_who_will_not_wait_never_jumps_the_line() -> None:
    """A lane without a queue takes only what nobody waits for: the worked example with a real queue.

    96,000 less 58,000 active, less an interactive queue of 8,000, less a guard band of 9,600 leave 20,400:
    14,000 + 4,000 fit and 19,000 + 4,000 do not.
    """
    worked = pool(96_000, guard_band_permille=100)
    document: dict[str, Any] = {"pool": worked, "lane": Lane.BULK, "hold_ms": 0}
    for input_tokens, expected in ((14_000, Granted), (19_000, Denied)):
        world = World()
        world.ask(waiter("active", 58_000, pool=worked, lane_limit_tokens=58_000))
        queued = world.ask(waiter("queued", 8_000, pool=worked, lane_limit_tokens=58_000))
        assert isinstance(queued, Queued)
        answer = world.ask(waiter("document", input_tokens + 4_000, input_tokens=input_tokens, **document))
        assert isinstance(answer, expected)


def test_who_leaves_gives_up_its_place_at_once() -> None:
    """A caller that hangs up is told nothing more, and the next one is the first."""
    world = full_world()
    world.ask(waiter("large", 1_000))
    world.ask(waiter("small", 300, tenant="b"))
    world.end("full")
    assert granted(world) == ["large"]
    world.ask(waiter("next", 1_000))
    world.hang_up("small")
    world.end("large")
    assert granted(world) == ["large", "next"]


def test_a_large_head_that_leaves_lets_the_others_go() -> None:
    """A withdrawal promotes like a release."""
    world = World()
    world.ask(waiter("held", 500, tenant="other"))
    world.ask(waiter("large", 600))
    world.ask(waiter("medium", 400, tenant="b"))
    assert granted(world) == ["held"]
    world.hang_up("large")
    assert granted(world) == ["held", "medium"]


def test_a_retry_gets_no_better_place() -> None:
    """Who left and comes back is a newcomer: behind everybody of its tenant with the same deadline."""
    world = full_world()
    for lease_id in ("a", "b"):
        world.ask(waiter(lease_id, 1_000))
    world.hang_up("a")
    world.ask(waiter("a-again", 1_000))
    world.end("full")
    world.end("b")
    assert granted(world) == ["b", "a-again"]


def test_the_tickets_of_the_dead_block_nobody() -> None:
    """A holder that is silent is dropped at the front of the line, not at the end of its time."""
    world = full_world()
    world.ask(waiter("dead", 1_000), MORTAL)
    world.ask(waiter("alive", 1_000, tenant="b"))
    world.kill(MORTAL)
    world.pass_ms(600)
    world.end("full")
    assert granted(world) == ["alive"]


def test_what_is_granted_to_the_dead_is_taken_back() -> None:
    """A promise that nobody hears is off after the holder's `reply_ms`, and its charge is refunded in full."""
    limits = quota(tokens_per_minute=60, burst_tokens=2_000)
    world = full_world()
    world.ask(waiter("dead", 1_000, quota=limits), MORTAL)
    world.ask(waiter("alive", 1_000, tenant="b"))
    world.kill(MORTAL)
    world.pass_ms(300)
    world.end("full")
    assert isinstance(world.ledger, BooksLedger)
    assert world.ledger.books.leases["dead"].state is LeaseState.PROMISED
    assert not granted(world)
    world.pass_ms(501)
    assert granted(world) == ["alive"]
    assert "dead" not in world.ledger.books.leases
    assert "acme" not in world.ledger.books.tenants


def test_more_capacity_lets_the_line_go() -> None:
    """A policy with larger replicas is in force for those who wait already."""
    world = full_world()
    world.ask(waiter("a", 500))
    assert isinstance(world.ledger, BooksLedger)
    world.ledger.books.change_capacity(pool(2_000), {}, world.now_ms)
    world.pass_ms(0)
    assert granted(world) == ["a"]


def test_a_lease_that_expires_lets_the_line_go() -> None:
    """An orphan whose grace is over makes room like a release."""
    world = World()
    world.ask(waiter("orphan", 1_000, tenant="other"), MORTAL)
    world.kill(MORTAL)
    world.pass_ms(4_000)
    world.ask(waiter("a", 1_000))
    world.pass_ms(1_999)
    assert "a" in world.waiting
    world.pass_ms(1)
    assert granted(world)[-1] == "a"


def test_asking_again_while_waiting_is_not_a_second_place() -> None:
    """The same request is told that it waits, and waits once."""
    world = full_world()
    world.ask(waiter("a"))
    assert isinstance(world.ledger, BooksLedger)
    again = world.ledger.books.reserve(waiter("a"), world.now_ms + 100)
    assert again == Queued(lease_id="a", position=1, wait_ms=1_000, expires_in_ms=9_900)
    world.end("full")
    assert granted(world) == ["a"]
    assert not world.ledger.books.waiting.tickets


def test_a_lane_that_may_have_all_is_stopped_by_the_pool() -> None:
    """Where the lane's share is the whole pool, a full pool is what it waits for, and small ones may pass."""
    world = World()
    for number in range(9):
        world.ask(waiter(f"held-{number}", 100, tenant="other", lane_limit_tokens=1_000))
    world.ask(waiter("large", 800, lane_limit_tokens=1_000))
    assert isinstance(world.ask(waiter("small", 100, tenant="b", lane_limit_tokens=1_000)), Granted)
    world.pass_ms(10_000)
    assert denied(world, "large").behind is Scope.REPLICA_TOKENS


def test_who_was_at_its_own_limit_has_no_credit_for_it() -> None:
    """A tenant that was set aside while others were served is in turn with them afterwards, not before them."""
    one = quota(inflight_requests=1)
    world = World()
    world.ask(waiter("a0", 200, tenant="a", quota=one))
    for number in range(1, 6):
        world.ask(waiter(f"a{number}", 200, tenant="a"))
    world.ask(waiter("a9", 200, tenant="a", quota=one, deadline_in_ms=500_000))
    for lease_id in [*world.held]:
        if lease_id != "a0":
            world.end(lease_id)
    for number in range(12):
        world.ask(waiter(f"b{number}", 400, tenant="b"))
    for number in range(6):
        world.end(f"b{number}")
    world.end("a0")
    for number in range(6, 10):
        world.ask(waiter(f"a1{number}", 400, tenant="a"))
    done = len(granted(world))
    for _ in range(6):
        world.end(next(lease_id for lease_id in world.held if lease_id != "a9"))
    turns = [lease_id[0] for lease_id in granted(world)[done:]]
    assert max(len(run) for run in "".join(turns).split("b")) <= 2


def test_one_large_newcomer_may_push_out_several_small_ones() -> None:
    """As many of the largest holder's last places as it takes, up to four; if that is not enough, none."""
    terms = LaneTerms(queue_requests=100, queue_tokens=1_000)
    world = full_world()
    for number in range(10):
        world.ask(waiter(f"noise-{number}", 100, tenant="noisy", lane_terms=terms))
    assert isinstance(world.ask(waiter("a", 300, tenant="quiet", lane_terms=terms)), Queued)
    assert sorted(set(world.outcomes) - {"full"}) == ["noise-7", "noise-8", "noise-9"]
    assert isinstance(world.ask(waiter("b", 500, tenant="third", lane_terms=terms)), Denied)
    assert len(world.waiting) == 8


def test_nobody_is_granted_anything_after_its_time() -> None:
    """However late the sweep: what comes free after a ticket's time is not its any more, and nobody is kept by it."""
    books = BooksLedger()
    books.reserve(waiter("full", 1_000, tenant="other"), WORKER, 0)
    assert isinstance(books.reserve(waiter("late", 500, deadline_in_ms=5_002), WORKER, 0), Queued)
    assert isinstance(books.reserve(waiter("in-time", 1_000, tenant="b"), WORKER, 0), Queued)
    books.release("full", 5_001)
    news = dict(books.take_news(WORKER, 5_001))
    assert isinstance(news["late"], Denied)
    assert news["late"].scope is Scope.DEADLINE
    assert isinstance(news["in-time"], Granted)


def test_a_large_head_whose_time_is_over_lets_the_others_go() -> None:
    """An expiry promotes like a release."""
    world = World()
    world.ask(waiter("held", 500, tenant="other"))
    world.ask(waiter("large", 600, hold_ms=700))
    world.ask(waiter("medium", 400, tenant="b"))
    world.pass_ms(699)
    assert granted(world) == ["held"]
    world.pass_ms(1)
    assert granted(world) == ["held", "medium"]


def test_one_long_answer_does_not_make_a_long_line_hopeless() -> None:
    """Sixty short requests behind one long answer: what counts is how many the pool serves once it is gone."""
    few = pool(1_000, request_cap=10)
    world = World()
    world.ask(waiter("long", 1_000, pool=few, tenant="other", residence_ms=10_000))
    for number in range(60):
        world.ask(waiter(f"r{number}", 1, pool=few))
    answer = world.ask(waiter("next", 1, pool=few))
    assert isinstance(answer, Queued)
    # 52 requests more than fit leave at 10 in 10 s; the token way is shorter. The prompts are 61 ms of reading.
    assert answer.wait_ms == 52_000 + 61


def test_who_cannot_be_in_time_any_more_does_not_wait_on() -> None:
    """A backlog that others have brought makes it too late: that will not get better, so it is told at once."""
    room = pool(100_000)
    bulk: dict[str, Any] = {"pool": room, "lane": Lane.BULK, "lane_limit_tokens": 500}
    world = World()
    world.ask(waiter("b0", 400, **bulk))
    assert isinstance(world.ask(waiter("b1", 400, input_tokens=100, deadline_in_ms=3_000, **bulk)), Queued)
    world.ask(waiter("i0", 3_000, pool=room, input_tokens=2_950))
    assert denied(world, "b1").scope is Scope.DEADLINE
