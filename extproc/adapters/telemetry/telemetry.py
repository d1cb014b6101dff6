"""Everything that watches one worker, put together: what its exchanges tell, and where that goes."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from extproc.adapters.telemetry import instruments as i
from extproc.adapters.telemetry.drift_log import DriftLog
from extproc.adapters.telemetry.export_queue import ExportQueue
from extproc.adapters.telemetry.exposition import exposition
from extproc.adapters.telemetry.loop_lag import LoopLag
from extproc.adapters.telemetry.metric_points import metrics_data
from extproc.adapters.telemetry.metrics import Metrics, Reading
from extproc.adapters.telemetry.observers import Observers
from extproc.adapters.telemetry.otlp import Signal, is_wanted, metric_exporter, resource, span_exporter
from extproc.adapters.telemetry.recent import Recent
from extproc.adapters.telemetry.refusal_log import RefusalLog
from extproc.adapters.telemetry.tracing import Tracing
from extproc.domain.policy import Policy
from extproc.domain.snapshot import Snapshot
from extproc.ports import LedgerFault, Observer

log = logging.getLogger(__name__)

STOP_S = 4.0
"""What a stop may take because of telemetry, with its collector gone."""

SNAPSHOT_TIMEOUT_S = 1.0
"""A scrape goes without the ledger's balances rather than wait longer."""

PUSH_INTERVAL_MS = 60_000
"""How often metrics are pushed where `OTEL_METRIC_EXPORT_INTERVAL` does not say."""


class Telemetry:
    """Watches one worker from `start` to `stop`. `observer` is what its exchanges tell.

    `snapshot` asks the ledger and may raise `LedgerFault`; `readings` tell what other parts count. Traces and
    metrics are pushed where the environment says so (see `otlp`); an exporter that is given is used instead.
    Raises `TelemetrySettingsError` where the environment is wrong.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], Awaitable[Snapshot]],
        readings: Iterable[Callable[[], Iterable[Reading]]] = (),
        top_tenants: int = 0,
        spans: SpanExporter | None = None,
        points: MetricExporter | None = None,
    ) -> None:
        self.recent = Recent()
        self._snapshot = snapshot
        self._resource = Resource.get_empty()
        self._started_ns = time.time_ns()
        self._spans: ExportQueue[ReadableSpan] | None = None
        self._points: ExportQueue[MetricsData] | None = None
        self._push: asyncio.Task[None] | None = None
        self._lag = LoopLag()
        self.metrics = Metrics(readings=(*readings, self._own_readings), top_tenants=top_tenants)
        observers: list[Observer] = [self.metrics, self.recent, RefusalLog(), DriftLog()]
        if spans is None and is_wanted(Signal.TRACES):
            spans = span_exporter()
        if points is None and is_wanted(Signal.METRICS):
            points = metric_exporter()
        if spans is not None or points is not None:
            self._resource = resource()
        if spans is not None:
            self._spans = _span_queue(spans)
            observers.append(
                Tracing(
                    sampler=TracerProvider(shutdown_on_exit=False, resource=self._resource).sampler,
                    put=self._spans.put,
                    resource=self._resource,
                    exemplify=self.metrics.exemplify,
                )
            )
        if points is not None:
            self._points = _point_queue(points)
        self._observers = Observers(*observers)

    @property
    def observer(self) -> Observer:
        """Whom to tell of decisions and settlements."""
        return self._observers

    def policy_changed(self, policy: Policy) -> None:
        """From now on labels are this policy's names."""
        self.metrics.policy_changed(policy)

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """A page for Prometheus and its content type."""
        return await exposition(self.metrics, accept, self._balances)

    def decisions(self) -> Sequence[Mapping[str, Any]]:
        """The last decisions, newest first."""
        return self.recent.decisions()

    def history(self) -> Mapping[str, Any]:
        """Decisions and refusals over the last minutes."""
        return self.recent.history()

    async def start(self) -> None:
        """Begin to measure the loop, and to push metrics where they are pushed."""
        self._lag.start()
        if self._points is not None:
            self._push = asyncio.get_running_loop().create_task(self._push_regularly(self._points))

    async def stop(self) -> None:
        """Export what is still queued, within `STOP_S`. Call it when every lease has been given back."""
        await self._lag.stop()
        if self._push is not None:
            self._push.cancel()
            await asyncio.wait([self._push])
            if self._points is not None:
                await self._push_once(self._points)
        queues = [queue for queue in (self._spans, self._points) if queue is not None]
        await asyncio.gather(*(asyncio.to_thread(queue.close, STOP_S) for queue in queues))

    async def _push_regularly(self, points: ExportQueue[MetricsData]) -> None:
        interval_s = _push_interval_ms() / 1_000
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._push_once(points)
            except Exception:
                log.exception("metrics not pushed")

    async def _push_once(self, points: ExportQueue[MetricsData]) -> None:
        families = self.metrics.collect(await self.metrics.read(await self._balances()))
        points.put(
            await metrics_data(
                families, resource=self._resource, started_ns=self._started_ns, now_ns=time.time_ns()
            )
        )

    async def _balances(self) -> Snapshot | None:
        try:
            return await asyncio.wait_for(self._snapshot(), SNAPSHOT_TIMEOUT_S)
        except (LedgerFault, TimeoutError):
            return None

    def _own_readings(self) -> Iterable[Reading]:
        if self._spans is not None:
            yield Reading(name=i.TELEMETRY_DROPPED.name, labels=("traces",), value=self._spans.dropped)
        if self._points is not None:
            yield Reading(name=i.TELEMETRY_DROPPED.name, labels=("metrics",), value=self._points.dropped)
        yield Reading(name=i.LOOP_LAG.name, value=self._lag.largest_us)
        yield Reading(name=i.OBSERVER_FAULTS.name, value=self._observers.faults)


def _span_queue(exporter: SpanExporter) -> ExportQueue[ReadableSpan]:
    return ExportQueue(
        name=Signal.TRACES,
        export=lambda batch: exporter.export(batch) is SpanExportResult.SUCCESS,
        cut=exporter.shutdown,
    )


def _point_queue(exporter: MetricExporter) -> ExportQueue[MetricsData]:
    # One export is the whole state: an older one that waits is worth nothing beside a newer one.
    return ExportQueue(
        name=Signal.METRICS,
        export=lambda batch: exporter.export(batch[-1]) is MetricExportResult.SUCCESS,
        cut=exporter.shutdown,
        most_items=2,
        batch_items=2,
    )


def _push_interval_ms() -> int:
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    return int(text) if text.isdecimal() and int(text) > 0 else PUSH_INTERVAL_MS
