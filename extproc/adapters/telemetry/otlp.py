"""Exporting to an OpenTelemetry collector, switched on and configured by the standard `OTEL_*` variables.

Nothing is exported unless an endpoint is named (`OTEL_EXPORTER_OTLP_ENDPOINT`, or the same for one signal),
or the signal's exporter is (`OTEL_TRACES_EXPORTER`, `OTEL_METRICS_EXPORTER`: `otlp`, or `none`).
`OTEL_SDK_DISABLED=true` switches everything off. Samplers, headers, time-outs, certificates, compression and
resource attributes are read by the SDK itself.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from enum import StrEnum

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace.export import SpanExporter

import extproc

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Signal(StrEnum):
    """What is exported."""

    TRACES = "traces"
    METRICS = "metrics"


class TelemetrySettingsError(ValueError):
    """An `OTEL_*` variable has a value that this service does not understand."""


def is_wanted(signal: Signal, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for this signal. Raises `TelemetrySettingsError`."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environment.get(name, "").strip().lower()
    if exporter in ("otlp", "none"):
        return exporter == "otlp"
    if exporter:
        raise TelemetrySettingsError(f"{name} is {exporter!r}; use 'otlp' or 'none'")
    return bool(environment.get(ENDPOINT) or environment.get(_of_signal("ENDPOINT", signal)))


def resource() -> Resource:
    """Who sends: `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, else `extproc` and its version."""
    default = {SERVICE_VERSION: extproc.__version__}
    if "OTEL_SERVICE_NAME" not in os.environ:
        default[SERVICE_NAME] = "extproc"
    return Resource.create(default)


def span_exporter(environment: Mapping[str, str] = os.environ) -> SpanExporter:
    """The exporter of traces that the environment names. Raises `TelemetrySettingsError`."""
    exporter = _exporter("trace_exporter", "OTLPSpanExporter", http=_speaks_http(Signal.TRACES, environment))
    assert isinstance(exporter, SpanExporter)
    return exporter


def metric_exporter(environment: Mapping[str, str] = os.environ) -> MetricExporter:
    """The exporter of metrics that the environment names. Raises `TelemetrySettingsError`."""
    exporter = _exporter(
        "metric_exporter", "OTLPMetricExporter", http=_speaks_http(Signal.METRICS, environment)
    )
    assert isinstance(exporter, MetricExporter)
    return exporter


def _exporter(module: str, name: str, *, http: bool) -> object:
    """An exporter of the OTLP packages, imported only when one is wanted.

    `xds-protos` brings old OTLP messages under the same names as `opentelemetry-proto`; where it was installed
    last, the exporters cannot be imported. Everything else works, so only those who export need the remedy.
    """
    protocol = "http" if http else "grpc"
    try:
        exporters = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{module}")
    except (ImportError, TypeError) as error:
        raise TelemetrySettingsError(
            "OTLP export is switched on, but its messages were overwritten by another package; "
            "run: pip install --force-reinstall --no-deps opentelemetry-proto"
        ) from error
    exporter: object = getattr(exporters, name)()
    return exporter


def _speaks_http(signal: Signal, environment: Mapping[str, str]) -> bool:
    for name in (_of_signal("PROTOCOL", signal), "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(name, "").strip().lower()
        if protocol in ("grpc", "http/protobuf"):
            return protocol == "http/protobuf"
        if protocol:
            raise TelemetrySettingsError(f"{name} is {protocol!r}; use 'grpc' or 'http/protobuf'")
    return False


def _of_signal(what: str, signal: Signal) -> str:
    return f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}"
