"""What the books answer, as tables that read as stories."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.domain.books import Books
from extproc.domain.fitting import headroom_tokens
from extproc.domain.holdings import wait_ms
from extproc.domain.policy import Lane
from extproc.domain.reservation import Denied, Granted, Scope
from tests.support.reservations import ROOMY, pool, quota, reservation

WORKED_POOL = pool(96_000, guard_band_permille=100)


def worked_books() -> Books:
    """Ceiling 96,000, of which 58,000 are active and 8,000 are interactive work that has not begun."""
    books = Books()
    for lease_id, tokens in (("active", 58_000), ("queued", 8_000)):
        granted = books.reserve(reservation(lease_id, pool=WORKED_POOL, total_tokens=tokens), 0)
        assert isinstance(granted, Granted)
    return books


def test_the_worked_example_leaves_20_400() -> None:
    """96,000 less 58,000 active, less 8,000 queued, less a guard band of 10 %."""
    assert (
        headroom_tokens(
            ceiling_tokens=96_000, active_tokens=58_000, queued_tokens=8_000, guard_band_permille=100
        )
        == 20_400
    )


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "fits"),
    [
        (14_000, 4_000, True),
        (19_000, 4_000, False),
        (16_400, 4_000, True),  # to the last token
        (16_401, 4_000, False),
    ],
)
def test_the_worked_example(input_tokens: int, output_tokens: int, fits: bool) -> None:
    """With 20,400 tokens left, 14,000 + 4,000 fit and 19,000 + 4,000 do not."""
    answer = worked_books().reserve(
        reservation(
            "r", pool=WORKED_POOL, input_tokens=input_tokens, total_tokens=input_tokens + output_tokens
        ),
        0,
    )
    if fits:
        assert isinstance(answer, Granted)
    else:
        assert isinstance(answer, Denied)
        assert answer.scope is Scope.REPLICA_TOKENS


@pytest.mark.parametrize(
    ("scope", "expected_ms", "held", "asked"),
    [
        # The backlog of 500 and the own 100 are read in 600 ms; 550 are left.
        (
            Scope.DEADLINE,
            50,
            {"input_tokens": 500, "total_tokens": 600},
            {"input_tokens": 100, "deadline_in_ms": 550},
        ),
        # 60 a minute is one a second: 30 too many are 30 s.
        (
            Scope.TENANT_TOKEN_RATE,
            30_000,
            {"quota": quota(tokens_per_minute=60, burst_tokens=100), "total_tokens": 90},
            {"quota": quota(tokens_per_minute=60, burst_tokens=100), "total_tokens": 40},
        ),
        (
            Scope.TENANT_REQUEST_RATE,
            60_000,
            {"quota": quota(requests_per_minute=1)},
            {"quota": quota(requests_per_minute=1)},
        ),
        # 600 held for 10 s leave at 60 a second: the 30 that are missing take half a second.
        (
            Scope.TENANT_INFLIGHT_TOKENS,
            500,
            {"total_tokens": 600},
            {"total_tokens": 430, "quota": quota(inflight_tokens=1_000)},
        ),
        (
            Scope.TENANT_INFLIGHT_REQUESTS,
            10_000,
            {},
            {"quota": quota(inflight_requests=1)},
        ),
        (
            Scope.LANE_SHARE,
            500,
            {"total_tokens": 600},
            {"total_tokens": 430, "lane_limit_tokens": 1_000},
        ),
        (
            Scope.REPLICA_TOKENS,
            500,
            {"total_tokens": 600, "pool": pool(1_000)},
            {"total_tokens": 430, "pool": pool(1_000)},
        ),
        # A window of 800 tokens, 500 of them taken: 100 too many are read in 100 ms.
        (
            Scope.PREFILL_WINDOW,
            100,
            {"input_tokens": 500, "total_tokens": 600, "pool": pool(10_000, prefill_window_ms=800)},
            {"input_tokens": 400, "total_tokens": 401, "pool": pool(10_000, prefill_window_ms=800)},
        ),
        (
            Scope.REQUEST_CAP,
            10_000,
            {"pool": pool(10_000, request_cap=1)},
            {"pool": pool(10_000, request_cap=1)},
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Scope) else "",
)
def test_each_scope_alone_refuses(
    scope: Scope, expected_ms: int, held: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Every scope refuses by itself, says that it was this one, and when it may have room."""
    books = Books()
    assert isinstance(books.reserve(reservation("held", **held), 0), Granted)
    answer = books.reserve(reservation("asked", **asked), 0)
    assert isinstance(answer, Denied)
    assert (answer.scope, answer.wait_ms) == (scope, expected_ms)


def test_a_denial_names_the_first_scope_and_the_longest_wait() -> None:
    """Whoever waits as long as the first scope asks must not be refused again by the next one."""
    books = Books()
    small = pool(1_000)
    limits = quota(requests_per_minute=60)
    for position in range(60):
        request = reservation(f"r{position}", quota=limits, total_tokens=10, pool=small)
        assert isinstance(books.reserve(request, 0), Granted)
    answer = books.reserve(reservation("next", quota=limits, total_tokens=900, pool=small), 0)
    assert isinstance(answer, Denied)
    assert answer.scope is Scope.TENANT_REQUEST_RATE
    assert answer.wait_ms == 500 * 10_000 // 600 + 1  # the replica's wait; the rate alone says 1,000


def test_more_over_the_limit_waits_longer() -> None:
    """A cap that was lowered below what is held frees only when more than one holder has left."""
    books = Books()
    for position in range(4):
        books.reserve(reservation(f"r{position}"), 0)
    answer = books.reserve(reservation("next", quota=quota(inflight_requests=2)), 0)
    assert isinstance(answer, Denied)
    assert answer.wait_ms == 3 * 10_000 // 4


def test_many_short_requests_do_not_hide_one_long_one() -> None:
    """The wait for tokens follows who holds the tokens, not how many requests there are."""
    books = Books()
    books.reserve(reservation("document", total_tokens=1_000, residence_ms=100_000), 0)
    for position in range(100):
        books.reserve(reservation(f"chat{position}", total_tokens=1, residence_ms=100), 0)
    answer = books.reserve(reservation("next", total_tokens=550, quota=quota(inflight_tokens=1_100)), 0)
    assert isinstance(answer, Denied)
    assert answer.wait_ms > 40_000


def test_estimates_are_rounded_against_the_optimist() -> None:
    """A mean of 4/3 ms counts as 2, and nothing that is held is free in less than 1."""
    assert wait_ms(3, 3, 4) == 2
    assert wait_ms(1, 1_000, 1_000) == 1
    assert wait_ms(5, 0, 0) == 1


def test_the_replica_with_most_room_is_picked() -> None:
    """Requests spread by room; equals go to the shorter prefill backlog, then to the one named first."""
    books = Books()
    three = pool(1_000, 2_000, 1_500)
    story = [
        # tokens, input, picked: room left is
        (700, 1, "b"),  # a 1000, b 1300, c 1500
        (200, 1, "c"),  # a 1000, b 1300, c 1300
        (400, 100, "b"),  # equal room and equal backlog: b is named first; a 1000, b 900, c 1300
        (300, 1, "c"),  # a 1000, b 900, c 1000
        (100, 1, "a"),  # a has read nothing yet and c is still reading 2 tokens
    ]
    for position, (tokens, input_tokens, picked) in enumerate(story):
        answer = books.reserve(
            reservation(f"r{position}", pool=three, total_tokens=tokens, input_tokens=input_tokens), 0
        )
        assert isinstance(answer, Granted)
        assert (position, answer.replica) == (position, picked)


def test_a_replica_that_cannot_take_it_does_not_refuse_for_one_that_can() -> None:
    """Most room decides among the replicas that fit; a full window elsewhere is no reason to refuse."""
    books = Books()
    two = pool(10_000, 3_000, prefill_window_ms=500)
    assert isinstance(
        books.reserve(reservation("r0", pool=two, input_tokens=450, total_tokens=460), 0), Granted
    )
    answer = books.reserve(reservation("r1", pool=two, input_tokens=100, total_tokens=110), 0)
    assert isinstance(answer, Granted)
    assert answer.replica == "b"


def test_a_prompt_longer_than_the_window_waits_for_an_idle_replica() -> None:
    """The window bounds what is outstanding; a longer prompt is served alone, not refused for ever."""
    books = Books()
    narrow = pool(10_000, prefill_window_ms=100)
    long: dict[str, Any] = {"pool": narrow, "input_tokens": 1_000, "total_tokens": 1_001}
    assert isinstance(books.reserve(reservation("r0", **long), 0), Granted)
    denied = books.reserve(reservation("r1", **long), 400)
    assert isinstance(denied, Denied)
    assert (denied.scope, denied.wait_ms) == (Scope.PREFILL_WINDOW, 600)
    assert isinstance(books.reserve(reservation("r1", **long), 1_000), Granted)


def test_ttft_is_what_lies_ahead() -> None:
    """The first token is expected when the replica has read what it has been given before, and the prompt."""
    books = Books()
    first = books.reserve(reservation("r0", input_tokens=300, total_tokens=400), 0)
    second = books.reserve(reservation("r1", input_tokens=200, total_tokens=400), 100)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert (first.ttft_ms, second.ttft_ms) == (300, 400)


def test_balances_follow_the_tenants_rates() -> None:
    """Every answer says what is left of the rates, and when they are full again; no rate, no number."""
    books = Books()
    limits = quota(tokens_per_minute=60, burst_tokens=100, requests_per_minute=2)
    granted = books.reserve(reservation("r0", total_tokens=40, quota=limits), 0)
    assert isinstance(granted, Granted)
    assert (granted.balance.tokens_remaining, granted.balance.tokens_reset_ms) == (60, 40_000)
    assert (granted.balance.requests_remaining, granted.balance.requests_reset_ms) == (1, 30_000)
    denied = books.reserve(reservation("r1", total_tokens=90, quota=limits), 10_000)
    assert isinstance(denied, Denied)
    assert (denied.balance.tokens_remaining, denied.balance.tokens_reset_ms) == (70, 30_000)
    free = books.reserve(reservation("r2", tenant="other"), 0)
    assert isinstance(free, Granted)
    assert free.balance.tokens_remaining is None
    assert free.balance.requests_reset_ms is None


def test_tenants_and_lanes_do_not_share_what_is_theirs() -> None:
    """Two tenants with the same numbers have two buckets, and two lanes two shares."""
    books = Books()
    limits = quota(inflight_requests=1)
    assert isinstance(books.reserve(reservation("r0", quota=limits, lane_limit_tokens=100), 0), Granted)
    other_lane = reservation(
        "r1", tenant="other", quota=limits, lane=Lane.BULK, lane_limit_tokens=100, pool=ROOMY
    )
    assert isinstance(books.reserve(other_lane, 0), Granted)
    assert isinstance(books.reserve(reservation("r2", quota=limits), 0), Denied)


def test_asking_again_for_a_held_lease_takes_nothing_more() -> None:
    """A repeated reservation is granted again on the same replica and charged once."""
    books = Books()
    asked = reservation("r0", quota=quota(tokens_per_minute=600, inflight_requests=1), pool=pool(200, 150))
    first = books.reserve(asked, 0)
    again = books.reserve(asked, 0)
    assert isinstance(first, Granted)
    assert isinstance(again, Granted)
    assert again.replica == first.replica
    assert again.balance == first.balance
    assert books.release("r0", 0)
    assert not list(books.live_leases())


def test_a_released_lease_is_not_granted_for_nothing() -> None:
    """An id whose lease was given back is asked for anew: nobody is told that it holds what it does not."""
    books = Books()
    one: dict[str, Any] = {"pool": pool(100)}
    books.reserve(reservation("r0", **one), 0)
    books.release("r0", 0)
    assert isinstance(books.reserve(reservation("r1", **one), 0), Granted)
    assert isinstance(books.reserve(reservation("r0", **one), 0), Denied)
