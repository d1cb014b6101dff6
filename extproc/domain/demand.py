"""What one request costs: input tokens and the output ceiling that the engine will permit."""

from __future__ import annotations

from extproc.domain.frozen import frozen
from extproc.domain.policy import LANES_DOWNWARDS, Lane, LanePolicy, Limits, Model, Policy, Tenant


@frozen
class Demand:
    """Tokens that a request will occupy: all its input, and all the output it may produce.

    `longest_sequence_tokens` is the largest single prompt of a batch: what the context window limits.
    """

    input_tokens: int
    output_tokens: int
    longest_sequence_tokens: int

    @property
    def total_tokens(self) -> int:
        """What is reserved on a replica."""
        return self.input_tokens + self.output_tokens

    def work_units(self, model: Model, limits: Limits) -> int:
        """What the tenant's rate is charged, rounded up: (input x prefill weight + output) x cost factor."""
        weighted_permille = self.input_tokens * limits.prefill_weight_permille + self.output_tokens * 1000
        return -(-weighted_permille * model.cost_factor_permille // 1_000_000)


def demand_of(
    per_sequence_tokens: tuple[int, ...],
    *,
    output_limit_tokens: int | None,
    choices: int,
    model: Model,
) -> Demand:
    """Demand of a counted request.

    Each sequence is answered `choices` times, each answer with at most `output_limit_tokens`, or the
    engine's default where the client set none, and never more than its context window leaves.
    Engines share one prompt's input between its answers, so input is counted once per sequence.
    """
    limit_tokens = output_limit_tokens
    if limit_tokens is None:
        limit_tokens = model.default_output_tokens
    output_tokens = 0
    for sequence_tokens in per_sequence_tokens:
        left_tokens = max(model.context_tokens - sequence_tokens, 0)
        output_tokens += left_tokens if limit_tokens is None else min(limit_tokens, left_tokens)
    return Demand(
        input_tokens=sum(per_sequence_tokens),
        output_tokens=output_tokens * choices,
        longest_sequence_tokens=max(per_sequence_tokens),
    )


def fits_lane(demand: Demand, lane: LanePolicy) -> bool:
    """Whether a request of this size may travel in the lane."""
    return demand.input_tokens <= lane.max_input_tokens and demand.output_tokens <= lane.max_output_tokens


def classify(
    demand: Demand, *, policy: Policy, model: Model, tenant: Tenant, declared: Lane | None
) -> Lane | None:
    """The highest lane that the request may use; `None` when there is none.

    Only lanes that the model is served in and the tenant's tier allows are considered, from the declared
    lane downwards (a declaration can lower a request, never raise it). Overflow takes every size.
    """
    start = 0 if declared is None else LANES_DOWNWARDS.index(declared)
    for lane in LANES_DOWNWARDS[start:]:
        if lane not in model.lanes or lane not in tenant.tier.lanes:
            continue
        if lane is Lane.OVERFLOW or fits_lane(demand, policy.lanes[lane]):
            return lane
    return None
