"""From a counted request to a reservation: size decides the lane, and what can never fit is never a 429."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.admission import Plan, Screened, plan
from extproc.domain.contract import CONTRACT, Retry
from extproc.domain.demand import demand_of
from extproc.domain.outcome import Reason
from extproc.domain.policy import Lane, Replica
from tests.builders import a_lane, a_limits, a_model, a_policy, a_pool, a_quota, a_tenant, a_tier


def planned(tokens: tuple[int, ...] = (100,), **changes: Any) -> Plan | Screened:
    """A plan for acme's request to tiny; `changes` are `plan`'s arguments."""
    policy = changes.pop("policy", None) or a_policy()
    model = changes.pop("model", None) or policy.models["tiny"]
    arguments: dict[str, Any] = {
        "output_limit_tokens": 100,
        "choices": 1,
        "policy": policy,
        "model": model,
        "tenant": policy.tenants["acme"],
        "declared_lane": None,
        "declared_deadline_ms": None,
        "elapsed_ms": 0,
        "lease_id": "lease-1",
        "spread": 0,
    }
    return plan(tokens, **(arguments | changes))


def reason_of(result: Plan | Screened) -> Reason:
    """Why it was screened out."""
    assert isinstance(result, Screened)
    return result.refusal.reason


@pytest.mark.parametrize(
    ("input_tokens", "output_tokens", "declared", "lane"),
    [
        (4_096, 1_024, None, Lane.INTERACTIVE),
        (4_097, 1_024, None, Lane.BULK),
        (4_096, 1_025, None, Lane.BULK),
        (100, 100, Lane.BULK, Lane.BULK),
        (100, 100, Lane.INTERACTIVE, Lane.INTERACTIVE),
        (9_000, 100, Lane.INTERACTIVE, Lane.BULK),
    ],
)
def test_size_decides_and_a_declaration_only_lowers(
    input_tokens: int, output_tokens: int, declared: Lane | None, lane: Lane
) -> None:
    """The highest lane that fits, from the declared one downwards."""
    result = planned((input_tokens,), output_limit_tokens=output_tokens, declared_lane=declared)
    assert isinstance(result, Plan)
    assert result.lane is lane


def test_what_fits_no_lane_is_413_or_overflows_where_there_is_a_place_for_it() -> None:
    """Overflow is an answer of its own: a pool if the model names one, else a refusal with the maximums."""
    refused = planned((20_000,), output_limit_tokens=8_001)
    assert reason_of(refused) is Reason.LANE_LIMIT
    assert isinstance(refused, Screened)
    assert refused.refusal.maximums == {"input_tokens": 64_000, "output_tokens": 8_000}

    lanes = {Lane.INTERACTIVE: "chat", Lane.BULK: "chat", Lane.OVERFLOW: "chat"}
    result = planned((20_000,), output_limit_tokens=8_001, policy=a_policy(models=(a_model(lanes=lanes),)))
    assert isinstance(result, Plan)
    assert result.lane is Lane.OVERFLOW


def test_lanes_that_a_tier_may_not_use_are_closed_to_it() -> None:
    """A tenant without the bulk lane gets no document in, whatever it declares."""
    tenant = a_tenant(tier=a_tier(lanes=frozenset({Lane.INTERACTIVE})))
    policy = a_policy(tenants=(tenant,))
    assert reason_of(planned((9_000,), policy=policy)) is Reason.LANE_LIMIT
    assert reason_of(planned((10,), policy=policy, declared_lane=Lane.BULK)) is Reason.LANE_LIMIT


@pytest.mark.parametrize(
    ("input_tokens", "output_limit_tokens", "default", "output_tokens"),
    [
        (1_000, 50, 512, 50),
        (1_000, None, 512, 512),
        (32_000, 5_000, 512, 768),
        (32_000, None, 512, 512),
        (30_000, None, None, 2_768),
        (1_000, 0, 512, 0),
    ],
)
def test_the_output_ceiling_is_what_the_engine_will_permit(
    input_tokens: int, output_limit_tokens: int | None, default: int | None, output_tokens: int
) -> None:
    """The client's limit, else the model's default, and never more than the context window leaves."""
    demand = demand_of(
        (input_tokens,),
        output_limit_tokens=output_limit_tokens,
        choices=1,
        model=a_model(default_output_tokens=default),
    )
    assert (demand.input_tokens, demand.output_tokens) == (input_tokens, output_tokens)


def test_a_batch_sums_and_its_longest_prompt_meets_the_window() -> None:
    """Each item must fit the context; the reservation holds all of them, and every choice's output."""
    model = a_model(context_tokens=1_000)
    policy = a_policy(models=(model,))
    result = planned((600, 700), choices=2, policy=policy)
    assert isinstance(result, Plan)
    assert (result.demand.input_tokens, result.demand.output_tokens) == (1_300, 400)
    assert reason_of(planned((1_000, 10), policy=policy)) is Reason.CONTEXT_LIMIT
    assert reason_of(planned((999,), policy=a_policy(models=(a_model(context_tokens=999),)))) is (
        Reason.CONTEXT_LIMIT
    )


@pytest.mark.parametrize(
    ("policy", "reason", "maximums"),
    [
        (
            a_policy(tenants=(a_tenant(tier=a_tier(quota=a_quota(tokens_per_minute=10, burst_tokens=199))),)),
            Reason.EXCEEDS_QUOTA,
            {"burst_tokens": 199},
        ),
        (
            a_policy(tenants=(a_tenant(tier=a_tier(quota=a_quota(inflight_tokens=199))),)),
            Reason.EXCEEDS_QUOTA,
            {"inflight_tokens": 199},
        ),
        (
            a_policy(lanes={Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, share_permille=2)}),
            Reason.EXCEEDS_CAPACITY,
            {"lane_tokens": 172},
        ),
        (
            a_policy(
                pools=(
                    a_pool(
                        replicas=(
                            Replica(name="a", ceiling_tokens=200),
                            Replica(name="b", ceiling_tokens=210),
                        )
                    ),
                )
            ),
            Reason.EXCEEDS_CAPACITY,
            {"replica_tokens": 189},
        ),
    ],
)
def test_what_can_never_fit_is_413_with_the_maximum(
    policy: Any, reason: Reason, maximums: dict[str, int]
) -> None:
    """No amount of waiting makes room for a request that is larger than the room."""
    result = planned((100,), policy=policy)
    assert reason_of(result) is reason
    assert isinstance(result, Screened)
    assert result.refusal.maximums == maximums
    assert CONTRACT[reason].retry is Retry.NEVER
    assert result.refusal.retry_after_ms is None


def test_a_deadline_that_an_idle_replica_would_miss_is_told_not_to_retry() -> None:
    """10,000 tokens a second and 1,000 tokens: 100 ms are enough, 99 are not; a client cannot lengthen its lane's."""
    assert isinstance(planned((1_000,), declared_deadline_ms=100), Plan)
    late = planned((1_000,), declared_deadline_ms=99)
    assert reason_of(late) is Reason.DEADLINE_INFEASIBLE
    assert isinstance(late, Screened)
    assert not late.refusal.retry_helps
    assert reason_of(planned((1_000,), declared_deadline_ms=150, elapsed_ms=51)) is Reason.DEADLINE_INFEASIBLE
    generous = planned((1_000,), declared_deadline_ms=10**9)
    assert isinstance(generous, Plan)
    assert generous.reservation.deadline_in_ms == 30_000


def test_work_is_charged_by_weight_and_cost() -> None:
    """(input x prefill weight + output) x cost factor, rounded up."""
    policy = a_policy(
        models=(a_model(cost_factor_permille=2_500),), limits=a_limits(prefill_weight_permille=333)
    )
    result = planned((100,), policy=policy)
    assert isinstance(result, Plan)
    assert result.reservation.work_units == 334  # (33.3 + 100) x 2.5 = 333.25


@given(
    st.integers(1, 40_000),
    st.one_of(st.none(), st.integers(0, 10_000)),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_a_plan_never_asks_for_more_than_there_can_be(
    tokens: int, output_limit: int | None, choices: int, spread: int
) -> None:
    """Whatever is asked: a plan that any replica could hold, or a refusal that is worded and classified."""
    result = planned((tokens,), output_limit_tokens=output_limit, choices=choices, spread=spread)
    if isinstance(result, Plan):
        asked = result.reservation
        assert asked.total_tokens <= min(asked.lane_limit_tokens, asked.pool.largest_usable_tokens)
        assert asked.deadline_in_ms >= asked.pool.prefill_ms(asked.input_tokens)
    else:
        assert result.refusal.message
        later = CONTRACT[result.refusal.reason].retry is Retry.LATER
        assert (result.refusal.retry_after_ms is not None) == later
