"""What a policy makes of waiting: how long, with what weight, and what a lane may take from the others."""

from __future__ import annotations

from typing import Any

from extproc.domain.admission import Plan, plan
from extproc.domain.policy import Lane
from extproc.domain.reservation import LaneTerms, Reservation
from tests.builders import a_lane, a_model, a_policy, a_pool, a_tenant, a_tier


def asked(lane: Lane, **changes: Any) -> Reservation:
    """What a small request in this lane asks of the ledger."""
    limits = {
        "residence_ms": 4_000,
        "queue_requests": 7,
        "queue_tokens": 900,
        "floor_permille": 50,
        "prefill_share_permille": 400,
        "spare_replicas": 3,
    }
    policy = a_policy(
        lanes={one: a_lane(one, **limits) for one in Lane},
        pools=(a_pool(), a_pool(name="documents")),
        models=(a_model(**changes),),
    )
    planned = plan(
        (10,),
        output_limit_tokens=10,
        choices=1,
        policy=policy,
        model=policy.models["tiny"],
        tenant=a_tenant(tier=a_tier(weight=3)),
        declared_lane=lane,
        declared_deadline_ms=None,
        elapsed_ms=0,
        lease_id="lease-1",
        spread=0,
    )
    assert isinstance(planned, Plan)
    assert planned.lane is lane
    return planned.reservation


def test_the_lanes_terms_travel_with_the_request() -> None:
    """Residence, queue bounds and floor are the lane's, the weight is the tier's."""
    reservation = asked(Lane.BULK)
    assert (reservation.hold_ms, reservation.weight) == (4_000, 3)
    assert reservation.lane_terms == LaneTerms(
        queue_requests=7, queue_tokens=900, floor_permille=50, prefill_share_permille=400, spare_replicas=3
    )


def test_prefill_is_capped_only_where_there_is_somebody_to_protect() -> None:
    """Bulk in a pool of its own, and the highest lane of any pool, may read as fast as the pool does."""
    apart = {Lane.INTERACTIVE: "chat", Lane.BULK: "documents"}
    assert asked(Lane.BULK, lanes=apart).lane_terms.prefill_share_permille == 1_000
    assert asked(Lane.INTERACTIVE).lane_terms.prefill_share_permille == 1_000
    below = {Lane.BULK: "documents", Lane.OVERFLOW: "documents"}
    assert asked(Lane.BULK, lanes=below).lane_terms.prefill_share_permille == 1_000
    assert asked(Lane.OVERFLOW, lanes=below).lane_terms.prefill_share_permille == 400
    assert asked(Lane.BULK, lanes=below).lane_terms.spare_replicas == 0
    assert asked(Lane.OVERFLOW, lanes=below).lane_terms.spare_replicas == 3
