"""What a run comes to: figures per lane and tenant, and how they went over time.

*Offered* is all that clients meant to have done, in tokens that engines would have read and written. *Good* is
what was finished with its first token, counted from the client's first attempt with every pause included, within
the lane's deadline by the first policy, and, if there is a target for it, with tokens that followed each other
fast enough on average. *Goodput* is good over offered: refused, late and abandoned work all lower it.

Fairness is Jain's index (Jain, Chiu and Hawe, 1984) over a lane's tenants, of what each got well done over what
weighted max-min fairness would have given it of the lane's total: 1 when nobody got more at another's expense,
1/n when one tenant of n got everything.

Series are by the time a request came first, except refusals, line and engines, which are by the time they
happened. Shares are in thousandths, times in milliseconds; `None` is "nothing to measure".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from extproc.domain.policy import Lane, Policy
from extproc.sim.fleet import Fate, Grant, Record, Run

_US_PER_MS = 1_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """By nearest rank; `None` when there is no value."""

    p50: int | None
    p95: int | None
    p99: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What became of a group of requests."""

    offered_requests: int
    offered_tokens: int
    served_requests: int
    good_requests: int
    good_tokens: int
    refused_requests: int
    hung_up_requests: int
    unfinished_requests: int
    goodput_permille: int | None  # tokens
    goodput_requests_permille: int | None
    attempts: int
    ttft_ms: Percentiles
    itl_ms: Percentiles
    held_ms: Percentiles  # of those that were let through in the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One value per interval of `interval_s`."""

    interval_s: float
    ttft_p50_ms: Mapping[Lane, list[int | None]]
    ttft_p99_ms: Mapping[Lane, list[int | None]]
    goodput_permille: Mapping[str, list[int | None]]  # in requests; "all", and lanes
    fairness_permille: Mapping[Lane, list[int | None]]
    bulk_share_permille: list[int | None]
    refusals: Mapping[str, list[int]]
    queue_age_ms: Mapping[Lane, list[int]]
    queue_requests: Mapping[Lane, list[int]]
    engine_waiting: list[int]
    kv_permille: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's figures.

    Bulk's share is of the tokens of interactive and bulk requests that were let through, altogether and while
    bulk waited: what its floor is about.
    """

    name: str
    simulated_s: float
    total: Figures
    lanes: Mapping[Lane, Figures]
    tenants: Mapping[Lane, Mapping[str, Figures]]
    fairness_permille: Mapping[Lane, int | None]
    bulk_share_permille: int | None
    bulk_waiting_share_permille: int | None
    refusals: Mapping[str, int]
    fallbacks: Mapping[str, int]
    longest_queue_age_ms: Mapping[Lane, int]
    preemptions: int
    recomputed_prefill_permille: int  # prefill that was done again, lost or left over, of all that was done
    series: Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What makes finished work good: the lane's time to first token, and the mean time between tokens."""

    ttft_ms: Mapping[Lane, int]
    itl_ms: int | None


def measure(
    run: Run, *, name: str, policy: Policy, targets: Targets, seconds: float, interval_s: float
) -> Measured:
    """All figures of a run; `policy` says what tenants weigh."""
    weights = {tenant.id: tenant.tier.weight for tenant in policy.tenants.values()}
    by_lane: dict[Lane, list[Record]] = {lane: [] for lane in Lane}
    for record in run.records:
        by_lane[record.asked.lane].append(record)
    by_lane = {lane: records for lane, records in by_lane.items() if records}
    oldest: dict[Lane, int] = dict.fromkeys(by_lane, 0)
    for sample in run.samples:
        for lane, age_us in sample.oldest_us.items():
            oldest[lane] = max(oldest.get(lane, 0), age_us // _US_PER_MS)
    tenants = {lane: _by_tenant(records) for lane, records in by_lane.items()}
    return Measured(
        name=name,
        simulated_s=round(run.ended_us / 1_000_000, 1),
        total=_figures(run.records, targets),
        lanes={lane: _figures(records, targets) for lane, records in by_lane.items()},
        tenants={
            lane: {tenant: _figures(records, targets) for tenant, records in sorted(groups.items())}
            for lane, groups in tenants.items()
        },
        fairness_permille={lane: _fairness(groups, weights, targets) for lane, groups in tenants.items()},
        bulk_share_permille=_bulk_share(run.grants),
        bulk_waiting_share_permille=_bulk_share(grant for grant in run.grants if Lane.BULK in grant.waiting),
        refusals=dict(sorted(Counter(str(one.reason) for one in run.refusals).items())),
        fallbacks=dict(sorted(run.fallbacks.items())),
        longest_queue_age_ms=oldest,
        preemptions=run.preemptions,
        recomputed_prefill_permille=permille(run.prefill_tokens - run.prompt_tokens, run.prefill_tokens) or 0,
        series=_series(run, by_lane, weights, targets, seconds=seconds, interval_s=interval_s),
    )


def is_good(record: Record, targets: Targets) -> bool:
    """Whether a request was finished as its lane promises."""
    ttft_us, itl_us = record.ttft_us, _itl_us(record)
    return (
        record.fate is Fate.SERVED
        and ttft_us is not None
        and ttft_us <= targets.ttft_ms[record.asked.lane] * _US_PER_MS
        and (targets.itl_ms is None or itl_us is None or itl_us <= targets.itl_ms * _US_PER_MS)
    )


def percentile(values: Sequence[int], percent: int) -> int | None:
    """By nearest rank, of sorted values."""
    if not values:
        return None
    return values[max(0, -(-len(values) * percent // 100) - 1)]


def permille(part: int, whole: int) -> int | None:
    """A share in thousandths, rounded; `None` of nothing."""
    return None if whole <= 0 else round(part * 1000 / whole)


def max_min_shares(total: float, wanted: Mapping[str, int], weights: Mapping[str, int]) -> dict[str, float]:
    """What each would get of `total` by weighted max-min fairness: nobody more than it wants."""
    shares: dict[str, float] = {}
    left = dict(wanted)
    while left:
        weight = sum(weights.get(name, 1) for name in left)
        content = {
            name: amount for name, amount in left.items() if amount <= total * weights.get(name, 1) / weight
        }
        if not content:
            shares.update({name: total * weights.get(name, 1) / weight for name in left})
            break
        for name, amount in content.items():
            shares[name] = amount
            total -= amount
            del left[name]
    return shares


def jain(values: Sequence[float]) -> float | None:
    """Jain's fairness index; `None` of nothing."""
    squares = sum(value * value for value in values)
    return None if squares == 0 else sum(values) ** 2 / (len(values) * squares)


def _fairness(
    groups: Mapping[str, Sequence[Record]], weights: Mapping[str, int], targets: Targets
) -> int | None:
    good = {
        tenant: sum(_tokens(record) for record in records if is_good(record, targets))
        for tenant, records in groups.items()
    }
    wanted = {tenant: sum(map(_tokens, records)) for tenant, records in groups.items()}
    due = max_min_shares(sum(good.values()), wanted, weights)
    index = jain([good[tenant] / due[tenant] for tenant in groups if due[tenant] > 0])
    return None if index is None else round(index * 1000)


def _figures(records: Sequence[Record], targets: Targets) -> Figures:
    good = [record for record in records if is_good(record, targets)]
    fates = Counter(record.fate for record in records)
    offered_tokens, good_tokens = sum(map(_tokens, records)), sum(map(_tokens, good))
    return Figures(
        offered_requests=len(records),
        offered_tokens=offered_tokens,
        served_requests=fates[Fate.SERVED],
        good_requests=len(good),
        good_tokens=good_tokens,
        refused_requests=fates[Fate.REFUSED],
        hung_up_requests=fates[Fate.HUNG_UP],
        unfinished_requests=fates[Fate.UNFINISHED],
        goodput_permille=permille(good_tokens, offered_tokens),
        goodput_requests_permille=permille(len(good), len(records)),
        attempts=sum(record.attempts for record in records),
        ttft_ms=_percentiles(record.ttft_us for record in records),
        itl_ms=_percentiles(_itl_us(record) for record in records),
        held_ms=_percentiles(record.held_us for record in records if record.admitted_us is not None),
    )


def _good_share(records: Sequence[Record], targets: Targets) -> int | None:
    return permille(sum(is_good(record, targets) for record in records), len(records))


def _percentiles(values_us: Iterable[int | None]) -> Percentiles:
    values = sorted(value // _US_PER_MS for value in values_us if value is not None)
    return Percentiles(p50=percentile(values, 50), p95=percentile(values, 95), p99=percentile(values, 99))


def _tokens(record: Record) -> int:
    return record.asked.request.input_tokens + record.asked.request.output_tokens


def _itl_us(record: Record) -> int | None:
    steps = record.asked.request.output_tokens - 1
    if (
        record.fate is not Fate.SERVED
        or record.first_token_us is None
        or record.ended_us is None
        or steps < 1
    ):
        return None
    return (record.ended_us - record.first_token_us) // steps


def _by_tenant(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.asked.tenant.id].append(record)
    return dict(groups)


def _bulk_share(grants: Iterable[Grant]) -> int | None:
    tokens: Counter[Lane] = Counter()
    for grant in grants:
        tokens[grant.lane] += grant.tokens
    return permille(tokens[Lane.BULK], tokens[Lane.BULK] + tokens[Lane.INTERACTIVE])


def _series(
    run: Run,
    by_lane: Mapping[Lane, Sequence[Record]],
    weights: Mapping[str, int],
    targets: Targets,
    *,
    seconds: float,
    interval_s: float,
) -> Series:
    count = max(1, -(-int(seconds * 1000) // int(interval_s * 1000)))
    interval_us = int(interval_s * 1_000_000)

    def cut(values: Iterable[T], at_us: Callable[[T], int]) -> list[list[T]]:
        parts: list[list[T]] = [[] for _ in range(count)]
        for value in values:
            position = at_us(value) // interval_us
            if position < count:
                parts[position].append(value)
        return parts

    lanes = {
        lane: cut(records, lambda record: record.asked.request.arrival_us)
        for lane, records in by_lane.items()
    }
    everything = cut(run.records, lambda record: record.asked.request.arrival_us)
    ttft = {
        lane: [_percentiles(record.ttft_us for record in part) for part in parts]
        for lane, parts in lanes.items()
    }
    samples = cut(run.samples, lambda sample: sample.at_us)
    refusals = cut(run.refusals, lambda refusal: refusal.at_us)
    reasons = sorted({str(refusal.reason) for refusal in run.refusals})
    return Series(
        interval_s=interval_s,
        ttft_p50_ms={lane: [part.p50 for part in parts] for lane, parts in ttft.items()},
        ttft_p99_ms={lane: [part.p99 for part in parts] for lane, parts in ttft.items()},
        goodput_permille={
            "all": [_good_share(part, targets) for part in everything],
            **{str(lane): [_good_share(part, targets) for part in parts] for lane, parts in lanes.items()},
        },
        fairness_permille={
            lane: [_fairness(_by_tenant(part), weights, targets) for part in parts]
            for lane, parts in lanes.items()
        },
        bulk_share_permille=[_bulk_share(part) for part in cut(run.grants, lambda grant: grant.at_us)],
        refusals={
            reason: [sum(str(one.reason) == reason for one in part) for part in refusals]
            for reason in reasons
        },
        queue_age_ms={
            lane: [max((s.oldest_us.get(lane, 0) // _US_PER_MS for s in part), default=0) for part in samples]
            for lane in by_lane
        },
        queue_requests={
            lane: [max((s.waiting.get(lane, 0) for s in part), default=0) for part in samples]
            for lane in by_lane
        },
        engine_waiting=[max((s.engine_waiting for s in part), default=0) for part in samples],
        kv_permille=[max((s.kv_permille for s in part), default=0) for part in samples],
    )
