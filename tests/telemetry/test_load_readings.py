"""What is known of engines, as metrics: what is unknown has no series."""

from __future__ import annotations

from extproc.adapters.telemetry.load_readings import load_readings
from extproc.adapters.telemetry.metrics import Metrics
from extproc.domain.breaker import BreakerState
from extproc.domain.load import PoolLoad, ReplicaLoad
from extproc.domain.policy import Lane, Replica
from extproc.domain.signals import ProbeResult
from tests.admin.port import an_engine
from tests.builders import a_policy, a_pool
from tests.telemetry.facts import Sample, scraped, value


def scrape(*loads: PoolLoad | ReplicaLoad) -> dict[Sample, float]:
    """One scrape of a service that knows this."""
    replicas = tuple(Replica(name=name, ceiling_tokens=1_000) for name in ("r0", "r1", "r2"))
    metrics = Metrics(readings=(lambda: load_readings(loads),))
    metrics.policy_changed(a_policy(pools=(a_pool(replicas=replicas),)))
    samples = scraped(metrics)
    assert value(samples, "extproc_unknown_readings") == 0
    return samples


def test_each_replica_by_itself() -> None:
    """One that tells, one whose reading is too old, and one that nobody asks."""
    samples = scrape(
        PoolLoad(pool="chat", pressure_permille=900, lanes={Lane.BULK: True, Lane.OVERFLOW: False}),
        an_engine("chat", "r0", probes={ProbeResult.OK: 7, ProbeResult.TIMEOUT: 2}),
        an_engine("chat", "r1", signal=None, age_ms=6_500, breaker=BreakerState.OPEN, breaker_opened_total=3),
        an_engine("chat", "r2", signal=None, age_ms=None, is_probed=False, probes={}),
    )
    told = {
        (name, dict(labels).get("replica") or dict(labels).get("lane"), dict(labels).get("result")): number
        for (name, labels), number in samples.items()
        if name.startswith(("extproc_engine_", "extproc_signal", "extproc_breaker", "extproc_probes"))
        or name == "extproc_lane_suspended"
    }
    assert told == {
        ("extproc_lane_suspended", "bulk", None): 1,
        ("extproc_lane_suspended", "overflow", None): 0,
        ("extproc_engine_waiting_requests", "r0", None): 3,
        ("extproc_engine_running_requests", "r0", None): 8,
        ("extproc_engine_kv_used_ratio", "r0", None): 0.64,
        ("extproc_signal_age_seconds", "r0", None): 2,
        ("extproc_signal_age_seconds", "r1", None): 6.5,
        ("extproc_signal_stale", "r0", None): 0,
        ("extproc_signal_stale", "r1", None): 1,
        ("extproc_probes_total", "r0", "ok"): 7,
        ("extproc_probes_total", "r0", "timeout"): 2,
        ("extproc_probes_total", "r1", "ok"): 7,
        ("extproc_breaker_open", "r0", None): 0,
        ("extproc_breaker_open", "r1", None): 1,
        ("extproc_breaker_open", "r2", None): 0,
        ("extproc_breaker_opened_total", "r0", None): 0,
        ("extproc_breaker_opened_total", "r1", None): 3,
        ("extproc_breaker_opened_total", "r2", None): 0,
    }
