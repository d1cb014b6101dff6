"""One page out of several workers' pages: of metrics, and of what happened lately.

Counters and histograms add up, and so do gauges of what a process has for itself (open streams). The other gauges
are one balance of the shared ledger seen by every worker, or a condition: the largest value is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.adapters.telemetry import instruments

ADDITIVE_GAUGES = frozenset(
    instrument.name
    for instrument in (
        instruments.OPEN_STREAMS,
        instruments.TOKENIZER_CACHE,
        instruments.TOKENIZER_QUEUE,
        instruments.DRAINING,
    )
)
"""Gauges of which every worker has its own part."""

RECENT_DECISIONS = 60
"""As many as one worker tells."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def merged_page(pages: Sequence[str], own: Iterable[Metric]) -> bytes:
    """The sum of the workers' pages, and the supervisor's own metrics after them."""
    families: dict[str, Metric] = {}
    totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            families.setdefault(family.name, family)
            values = totals.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if family.type == "gauge" and family.name not in ADDITIVE_GAUGES:
                    values[key] = max(values.get(key, sample.value), sample.value)
                else:
                    values[key] = values.get(key, 0.0) + sample.value
    merged = [_family(families[name], values) for name, values in totals.items()]
    return generate_latest(_Page([*merged, *own]))


def merged_recent(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last decisions of all workers, newest first, and their counts over the last minutes added up."""
    decisions = sorted(
        (decision for document in documents for decision in document["decisions"]),
        key=lambda decision: -int(decision["at_ms"]),
    )
    histories = [document["history"] for document in documents if document["history"]]
    counts: dict[str, list[int]] = {}
    for history in histories:
        for name, per_slot in history["counts"].items():
            before = counts.get(name, [0] * len(per_slot))
            counts[name] = [one + other for one, other in zip(before, per_slot, strict=True)]
    merged: dict[str, Any] = {}
    if histories:
        refusals = {name for history in histories for name in history["refusals"]}
        merged = {"slot_s": histories[0]["slot_s"], "counts": counts, "refusals": sorted(refusals)}
    return {"decisions": decisions[:RECENT_DECISIONS], "history": merged}


def _family(family: Metric, values: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> Metric:
    merged = Metric(family.name, family.documentation, family.type)
    for (name, labels), value in values.items():
        merged.add_sample(name, dict(labels), value)
    return merged


class _Page:
    """What the exposition wants: something to collect from."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """All families."""
        return self._families
