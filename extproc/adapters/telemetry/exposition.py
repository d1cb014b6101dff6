"""Families in the Prometheus text formats, made in slices so that no scrape holds up a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from prometheus_client import PROCESS_COLLECTOR
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from extproc.adapters.telemetry.instruments import Kind
from extproc.adapters.telemetry.metrics import Buckets, Family, Metrics
from extproc.domain.snapshot import Snapshot

SLICE_SAMPLES = 60
"""Samples that are rendered before others get their turn: well under a millisecond."""

OPENMETRICS_END = b"# EOF\n"


class _Slice:
    """What the encoders of `prometheus_client` want: something to collect from."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        """The one metric."""
        yield self._metric


async def exposition(
    metrics: Metrics, accept: str, snapshot: Callable[[], Awaitable[Snapshot | None]]
) -> tuple[bytes, str]:
    """One scrape: the page and its content type, in the newest format that `accept` allows.

    `snapshot` answers `None` when the ledger cannot be asked; the page then goes without its balances.
    """
    encode, content_type = choose_encoder(accept)
    pieces: list[bytes] = []
    for family in metrics.collect(await metrics.read(await snapshot())):
        pieces.extend(await _rendered(_slices(family), encode))
    for metric in PROCESS_COLLECTOR.collect():
        pieces.extend(await _rendered([metric], encode))
    if content_type.startswith("application/openmetrics-text"):
        pieces.append(OPENMETRICS_END)
    return b"".join(pieces), content_type


async def _rendered(slices: Iterable[Metric], encode: Callable[[Collector], bytes]) -> list[bytes]:
    pieces = []
    for number, metric in enumerate(slices):
        text = encode(_Slice(metric)).removesuffix(OPENMETRICS_END)
        pieces.append(text if number == 0 else _without_head(text))
        await asyncio.sleep(0)
    return pieces


def _without_head(text: bytes) -> bytes:
    """A further slice of a family: its samples without the comment lines above them."""
    at = 0
    while text.startswith(b"#", at):
        at = text.index(b"\n", at) + 1
    return text[at:]


def _slices(family: Family) -> Iterator[Metric]:
    instrument = family.instrument
    per_series = len(instrument.bounds) + 3 if instrument.kind is Kind.HISTOGRAM else 1
    step = max(1, SLICE_SAMPLES // per_series)
    for start in range(0, len(family.series), step):
        metric = Metric(instrument.name, instrument.help, str(instrument.kind), instrument.unit)
        for values, value in family.series[start : start + step]:
            labels = dict(zip(instrument.labels, values, strict=True))
            if isinstance(value, Buckets):
                _add_buckets(metric, family, labels, value)
            else:
                suffix = "_total" if instrument.kind is Kind.COUNTER else ""
                metric.add_sample(instrument.name + suffix, labels, value / instrument.per_unit)
        yield metric


def _add_buckets(metric: Metric, family: Family, labels: dict[str, str], buckets: Buckets) -> None:
    instrument = family.instrument
    below = 0
    edges = [*(_edge(bound, instrument.per_unit) for bound in instrument.bounds), "+Inf"]
    for number, (edge, count) in enumerate(zip(edges, buckets.counts, strict=True)):
        below += count
        traced = buckets.exemplars.get(number)
        exemplar = None
        if traced is not None:
            value = traced.value / instrument.per_unit
            exemplar = Exemplar({"trace_id": traced.trace_id}, value, round(traced.at_s, 3))
        metric.add_sample(instrument.name + "_bucket", {**labels, "le": edge}, below, exemplar=exemplar)
    metric.add_sample(instrument.name + "_count", labels, below)
    metric.add_sample(instrument.name + "_sum", labels, buckets.total / instrument.per_unit)


def _edge(bound: int, per_unit: int) -> str:
    """A bucket's edge as OpenMetrics writes it: a float, always with a point."""
    return str(bound / per_unit)
