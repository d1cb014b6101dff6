"""Several runs of one workload, side by side, and what that shows.

The claims are the ones that admission control is for. Each is judged against the runs that are there: a claim
without its other run is not made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from extproc.domain.policy import Lane
from extproc.sim.measures import Measured, Targets

P99_MOST_PERMILLE = 1_200
"""How much slower the slowest hundredth of interactive requests may be because of bulk, against without."""


class Role(StrEnum):
    """What a run is compared as."""

    POLICY = "policy"
    OTHER_POLICY = "other_policy"
    WITHOUT_BULK = "without_bulk"
    NO_CONTROL = "no_control"
    REQUEST_LIMIT = "request_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run, and what it is compared as."""

    role: Role
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A claim, what was found, and whether it holds."""

    claim: str
    found: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that a report tells. The first run is the policy's."""

    streams: tuple[str, ...]
    engines: tuple[str, ...]
    policy: str
    policy_version: str
    seconds: float
    seed: int
    targets: Targets
    bulk_floor_permille: int
    runs: tuple[Compared, ...]
    effects: tuple[Effect, ...] = ()


def effects_of(runs: tuple[Compared, ...], *, bulk_floor_permille: int) -> tuple[Effect, ...]:
    """What the first run shows against the others."""
    return tuple(_effects(runs, bulk_floor_permille))


def _effects(runs: tuple[Compared, ...], floor_permille: int) -> Iterator[Effect]:
    own = runs[0].measured
    own_p99 = _interactive_p99(own)
    for other in runs[1:]:
        p99 = _interactive_p99(other.measured)
        if own_p99 is None or p99 is None or p99 == 0:
            continue
        if other.role is Role.WITHOUT_BULK:
            yield Effect(
                claim=f"Bulk makes interactive TTFT p99 at most {P99_MOST_PERMILLE / 1000:g} times as long",
                found=f"{duration(own_p99)} with bulk, {duration(p99)} without: {own_p99 / p99:.2f} times",
                holds=own_p99 * 1000 <= p99 * P99_MOST_PERMILLE,
            )
        elif other.role is not Role.OTHER_POLICY:
            yield Effect(
                claim=f"Interactive TTFT p99 is shorter than with {_of(other)}",
                found=f"{duration(own_p99)} against {duration(p99)}",
                holds=own_p99 < p99,
            )
    share = own.bulk_waiting_share_permille
    if share is not None and floor_permille:
        yield Effect(
            claim="While bulk waits, it gets at least its floor",
            found=f"{percent(share)} of the tokens let through; its floor is {percent(floor_permille)}",
            holds=share >= floor_permille,
        )
    for other in runs[1:]:
        if other.role not in {Role.NO_CONTROL, Role.REQUEST_LIMIT}:
            continue
        for unit, mine, theirs in (
            ("requests", own.total.goodput_requests_permille, other.measured.total.goodput_requests_permille),
            ("tokens", own.total.goodput_permille, other.measured.total.goodput_permille),
        ):
            if mine is not None and theirs is not None:
                yield Effect(
                    claim=f"Goodput over offered, in {unit}, is higher than with {_of(other)}",
                    found=f"{percent(mine)} against {percent(theirs)}",
                    holds=mine > theirs,
                )


def _of(run: Compared) -> str:
    return f"a {run.measured.name} requests" if run.role is Role.REQUEST_LIMIT else run.measured.name


def _interactive_p99(measured: Measured) -> int | None:
    figures = measured.lanes.get(Lane.INTERACTIVE)
    return None if figures is None else figures.ttft_ms.p99


def duration(ms: int | None) -> str:
    """As people read it: three digits and a unit."""
    if ms is None:
        return "–"  # noqa: RUF001 - a dash in a table
    if ms < 1_000:
        return f"{ms} ms"
    seconds = ms / 1_000
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def percent(permille: int | None) -> str:
    """Thousandths as a percentage."""
    return "–" if permille is None else f"{permille / 10:.1f} %"  # noqa: RUF001 - a dash in a table
