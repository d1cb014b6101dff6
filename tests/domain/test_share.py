"""One worker's share of every limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.policy import Quota
from extproc.domain.reservation import Reservation
from extproc.domain.share import share_of
from tests.support.ledger_histories import reservations
from tests.support.reservations import pool, quota, reservation


@given(asked=reservations(), workers=st.integers(1, 9))
def test_the_shares_of_all_workers_are_within_every_limit(asked: Reservation, workers: int) -> None:
    """However many workers grant alone, together they grant no more than each limit allows."""
    share = share_of(asked, workers)
    if share is None:
        return
    for name in Quota.__dataclass_fields__:
        limit, part = getattr(asked.quota, name), getattr(share.quota, name)
        assert (part is None) == (limit is None)
        assert limit is None or part * workers <= limit
    assert share.lane_limit_tokens * workers <= asked.lane_limit_tokens
    assert share.pool.request_cap * workers <= asked.pool.request_cap
    for whole, part in zip(asked.pool.replicas, share.pool.replicas, strict=True):
        assert share.pool.usable_tokens(part) * workers <= asked.pool.usable_tokens(whole)
    if workers > 1:
        assert share.total_tokens <= share.lane_limit_tokens
        assert share.total_tokens <= share.pool.largest_usable_tokens


def test_a_request_larger_than_a_share_is_never_granted_alone() -> None:
    """What fits the whole limit but no share is for the store to decide."""
    asked = reservation("r", total_tokens=600, pool=pool(1_000))
    assert share_of(asked, 2) is None
    assert share_of(asked, 1) is not None


def test_a_limit_that_cannot_be_shared_is_not_rounded_up() -> None:
    """One request at a time for all workers together is none for each of them alone."""
    assert share_of(reservation("r", quota=quota(inflight_requests=1)), 2) is None


def test_nobody_waits_for_a_share() -> None:
    """A reservation that might wait in the store's line is answered at once by a worker that is alone."""
    share = share_of(reservation("r", hold_ms=5_000), 1)
    assert share is not None
    assert share.hold_ms == 0
