"""One metrics page out of several workers' pages.

Counters and histograms add up, and so do gauges of what a process has for itself (open streams). The other gauges
are one balance of the shared ledger seen by every worker, or a condition: the largest value is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
