"""What the figures should be, as a table; each measured by one part of the run. Missed ones are said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench.scenarios import CACHED, LONG, REFUSED, SETTLED, STEADY, UNSAMPLED, UNWATCHED
from tests.bench.through_envoy import OURS

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One measure: at most, or at least, so much. `of` finds it; `None` where it was not measured."""

    measure: str
    of: Callable[[Document], float | None]
    most: float | None = None
    least: float | None = None

    def row(self, document: Document) -> dict[str, Any]:
        """The measure beside what it should be."""
        value = self.of(document)
        met = None
        if value is not None:
            met = (self.most is None or value <= self.most) and (self.least is None or value >= self.least)
        return {
            "measure": self.measure,
            "target": f"<= {self.most:g}" if self.most is not None else f">= {self.least:g}",
            "measured": None if value is None else round(value, 2),
            "met": met,
        }


def _scenario(name: str, *keys: str) -> Callable[[Document], float | None]:
    def of(document: Document) -> float | None:
        return _in(_found(document["scenarios"], scenario=name), *keys)

    return of


def _part(part: str, *keys: str) -> Callable[[Document], float | None]:
    return lambda document: _in(document[part], *keys)


def _per_stream(document: Document) -> float | None:
    kilobytes: float | None = document["open_streams"]["kb_per_stream"]
    return kilobytes


def _gateway(*keys: str) -> Callable[[Document], float | None]:
    def of(document: Document) -> float | None:
        rows = document["through_envoy"]
        return None if isinstance(rows, str) else _in(_found(rows, gateway=OURS, rate_per_s=500), *keys)

    return of


def _unsampled(document: Document) -> float:
    unsampled = _scenario(UNSAMPLED, "cpu_us", "min")(document)
    off = _scenario(UNWATCHED, "cpu_us", "min")(document)
    assert unsampled is not None and off is not None  # noqa: PT018
    return unsampled / off


def _per_refusal(document: Document) -> float:
    refused = _scenario(REFUSED, "cpu_us", "median")(document)
    admitted = _scenario(SETTLED, "cpu_us", "median")(document)
    assert refused is not None and admitted is not None  # noqa: PT018
    return refused / admitted


def _p95_ms(key: str) -> Callable[[Document], float | None]:
    def of(document: Document) -> float:
        p95_us = _scenario(STEADY, key, "median")(document)
        assert p95_us is not None
        return p95_us / 1000

    return of


def _found(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    return next(row for row in rows if all(row[key] == value for key, value in wanted.items()))


def _in(row: Any, *keys: str) -> float:
    for key in keys:
        row = row[key]
    return float(row)


TARGETS: tuple[Target, ...] = (
    Target(
        measure="CPU per admitted cached 300-token chat / no-op ext_proc",
        of=_scenario(CACHED, "ratio", "median"),
        most=2.0,
    ),
    Target(
        measure="cores at 500 requests/s of 200/100 tokens, access logs settled",
        of=_scenario(STEADY, "cores", "median"),
        most=0.3,
    ),
    Target(
        measure="the same through Envoy: the service's cores", of=_gateway("server_cores", "median"), most=0.3
    ),
    Target(
        measure="P95 decision latency there, the body's bytes to the answer, ms",
        of=_p95_ms("decided_p95_us"),
        most=4,
    ),
    Target(
        measure="P95 from when the request was due, the client's own lateness included, ms",
        of=_p95_ms("p95_us"),
        most=4,
    ),
    Target(measure="75k-token prompts, requests/s per core", of=_scenario(LONG, "per_core_s"), least=60),
    Target(measure="CPU per refusal / CPU per admission and its record", of=_per_refusal, most=0.7),
    Target(measure="memory per open stream, KB (10,000 of them at full scale)", of=_per_stream, most=40),
    Target(
        measure="p99 of interactive exchanges beside 100k-token bodies / without",
        of=_part("documents", "ratio", "median"),
        most=2,
    ),
    Target(
        measure="p99 of interactive exchanges beside hostile prompts / without",
        of=_part("hostile", "ratio", "median"),
        most=2,
    ),
    Target(measure="CPU with telemetry on, unsampled / off (best rounds)", of=_unsampled, most=1.1),
    Target(
        measure="p99 of admitted exchanges in a refusal storm / without",
        of=_part("storm", "ratio", "median"),
        most=2,
    ),
)


def judged(document: Document) -> list[dict[str, Any]]:
    """Every target with what was measured."""
    return [target.row(document) for target in TARGETS]
