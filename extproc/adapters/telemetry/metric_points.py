"""Families as OpenTelemetry's data points: the same instruments, pushed instead of scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

import extproc
from extproc.adapters.telemetry.instruments import Kind
from extproc.adapters.telemetry.metrics import Buckets, Family

UNITS = {"seconds": "s", "tokens": "{token}", "bytes": "By", "ratio": "1", "": "1"}
"""Our units as UCUM writes them."""

SLICE_SERIES = 50
"""Series that are converted before others get their turn."""


async def metrics_data(
    families: Iterable[Family], *, resource: Resource, started_ns: int, now_ns: int
) -> MetricsData:
    """One export: every family, counted since `started_ns`, as of `now_ns`."""
    metrics = []
    converted = 0
    for family in families:
        metrics.append(_metric(family, started_ns, now_ns))
        converted += len(family.series)
        if converted >= SLICE_SERIES:
            converted = 0
            await asyncio.sleep(0)
    scope = ScopeMetrics(
        scope=InstrumentationScope("extproc", extproc.__version__), metrics=metrics, schema_url=""
    )
    return MetricsData(
        resource_metrics=[ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")]
    )


def _metric(family: Family, started_ns: int, now_ns: int) -> Metric:
    instrument = family.instrument
    data: Sum | Gauge | Histogram
    if instrument.kind is Kind.HISTOGRAM:
        data = Histogram(
            data_points=_histogram_points(family, started_ns, now_ns),
            aggregation_temporality=AggregationTemporality.CUMULATIVE,
        )
    else:
        points = [
            NumberDataPoint(
                attributes=dict(zip(instrument.labels, labels, strict=True)),
                start_time_unix_nano=started_ns,
                time_unix_nano=now_ns,
                value=value if instrument.per_unit == 1 else value / instrument.per_unit,
            )
            for labels, value in family.series
            if isinstance(value, int)
        ]
        if instrument.kind is Kind.COUNTER:
            data = Sum(
                data_points=points,
                aggregation_temporality=AggregationTemporality.CUMULATIVE,
                is_monotonic=True,
            )
        else:
            data = Gauge(data_points=points)
    return Metric(name=instrument.name, description=instrument.help, unit=UNITS[instrument.unit], data=data)


def _histogram_points(family: Family, started_ns: int, now_ns: int) -> list[HistogramDataPoint]:
    instrument = family.instrument
    bounds = [bound / instrument.per_unit for bound in instrument.bounds]
    return [
        HistogramDataPoint(
            attributes=dict(zip(instrument.labels, labels, strict=True)),
            start_time_unix_nano=started_ns,
            time_unix_nano=now_ns,
            count=sum(buckets.counts),
            sum=buckets.total / instrument.per_unit,
            bucket_counts=list(buckets.counts),
            explicit_bounds=bounds,
            # The extremes are not kept; the bounds that enclose the values are true of them.
            min=_lower(bounds, buckets),
            max=_upper(bounds, buckets),
        )
        for labels, buckets in family.series
        if isinstance(buckets, Buckets)
    ]


def _lower(bounds: list[float], buckets: Buckets) -> float:
    """The lower edge of the first bucket that holds anything."""
    first = next((number for number, count in enumerate(buckets.counts) if count), 0)
    return 0.0 if first == 0 else bounds[first - 1]


def _upper(bounds: list[float], buckets: Buckets) -> float:
    """The upper edge of the last bucket that holds anything; the last bound where that has none."""
    last = max((number for number, count in enumerate(buckets.counts) if count), default=0)
    return bounds[min(last, len(bounds) - 1)]
