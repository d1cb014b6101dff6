"""Metrics, traces and logs of the service. Everything here listens; nothing decides."""

from __future__ import annotations

from extproc.adapters.telemetry.logs import install_log
from extproc.adapters.telemetry.metrics import Metrics, Reading
from extproc.adapters.telemetry.otlp import TelemetrySettingsError
from extproc.adapters.telemetry.telemetry import Telemetry

__all__ = ["Metrics", "Reading", "Telemetry", "TelemetrySettingsError", "install_log"]
