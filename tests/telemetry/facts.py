"""Facts of exchanges with every field defaulted, and a page of metrics read back."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from extproc.adapters.telemetry.exposition import exposition
from extproc.adapters.telemetry.metrics import Metrics
from extproc.domain.decision import Decision, Settled
from extproc.domain.outcome import Outcome
from extproc.domain.policy import Lane
from extproc.domain.snapshot import LaneState, ReplicaState, Snapshot, TenantState

Sample = tuple[str, frozenset[tuple[str, str]]]


def a_decision(**changes: Any) -> Decision:
    """An admitted interactive request of the builders' policy."""
    fields: dict[str, Any] = {
        "outcome": Outcome.ADMITTED,
        "lease_id": "lease-1",
        "tenant": "acme",
        "tier": "gold",
        "model": "tiny",
        "lane": Lane.INTERACTIVE,
        "pool": "chat",
        "replica": "r0",
        "dialect": "openai_chat",
        "input_tokens": 1_000,
        "output_tokens": 500,
        "work_units": 1_500,
        "policy_version": "test",
        "read_us": 100,
        "counted_us": 400,
        "decided_us": 1_400,
    }
    return Decision(**(fields | changes))


def a_settled(**changes: Any) -> Settled:
    """That request's record: it used a fifth of what it might have."""
    fields: dict[str, Any] = {
        "lease_id": "lease-1",
        "tenant": "acme",
        "model": "tiny",
        "lane": "interactive",
        "pool": "chat",
        "replica": "r0",
        "status": 200,
        "flags": "",
        "input_tokens": 1_000,
        "output_tokens": 500,
        "work_units": 1_500,
        "used_input_tokens": 1_000,
        "used_output_tokens": 100,
        "ttfb_ms": 120,
        "duration_ms": 2_000,
    }
    return Settled(**(fields | changes))


def a_snapshot(**changes: Any) -> Snapshot:
    """One replica, two lanes and two tenants with something in flight."""
    fields: dict[str, Any] = {
        "at_ms": 1_000,
        "replicas": (
            ReplicaState(
                pool="chat",
                replica="r0",
                ceiling_tokens=96_000,
                guard_band_tokens=9_600,
                reserved_tokens=66_000,
                requests=7,
                request_cap=64,
                prefill_backlog_tokens=1_200,
            ),
        ),
        "lanes": (
            LaneState(
                pool="chat", lane=Lane.INTERACTIVE, limit_tokens=86_400, reserved_tokens=60_000, requests=5
            ),
            LaneState(
                pool="chat",
                lane=Lane.BULK,
                limit_tokens=40_000,
                reserved_tokens=6_000,
                requests=2,
                queued_requests=3,
                queued_input_tokens=9_000,
                oldest_queued_ms=4_200,
            ),
        ),
        "tenants": (
            TenantState(
                tenant="acme",
                tier="gold",
                inflight_tokens=60_000,
                inflight_requests=5,
                tokens_remaining=1_000,
                requests_remaining=None,
            ),
            TenantState(
                tenant="zeta",
                tier="gold",
                inflight_tokens=6_000,
                inflight_requests=2,
                tokens_remaining=None,
                requests_remaining=None,
            ),
        ),
        "leases": 7,
        "unbooked": 1,
        "orphans": 0,
    }
    return Snapshot(**(fields | changes))


def scraped(metrics: Metrics, snapshot: Snapshot | None = None) -> dict[Sample, float]:
    """Every sample of one scrape, as Prometheus' own parser reads it."""

    async def ask() -> Snapshot | None:
        return snapshot

    page, _ = asyncio.run(exposition(metrics, "", ask))
    samples: dict[Sample, float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is exported twice"
            samples[key] = sample.value
    return samples


def value(samples: dict[Sample, float], name: str, **labels: str) -> float:
    """The one sample with this name and exactly these labels."""
    return samples[name, frozenset(labels.items())]
