"""A service to administrate: its answers are what a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from extproc.adapters.admin_http.server import AdminServer
from extproc.adapters.admin_http.sources import ServiceStatus, Sources
from extproc.domain.breaker import BreakerState
from extproc.domain.load import PoolLoad, ReplicaLoad
from extproc.domain.policy import Lane, Policy
from extproc.domain.signals import EngineSignal, ProbeResult
from extproc.domain.snapshot import Snapshot
from tests.builders import a_policy
from tests.telemetry.facts import a_snapshot


@dataclass
class FakeService:
    """Every answer of the service, to be changed by the test; `asked` counts the ledger's."""

    checks: dict[str, str | None] = field(default_factory=lambda: {"tokenizers": None})
    held: Snapshot = field(default_factory=a_snapshot)
    rules: Policy = field(default_factory=a_policy)
    page: tuple[bytes, str] = (b"extproc_up 1\n", "text/plain; version=0.0.4")
    fault: Exception | None = None
    policy_error: str | None = None
    asked: int = 0
    accepts: list[str] = field(default_factory=list)
    decisions: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)
    load: Sequence[PoolLoad | ReplicaLoad] = ()

    async def snapshot(self) -> Snapshot:
        """What is held."""
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        return self.held

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """A page of metrics."""
        self.accepts.append(accept)
        return self.page

    def status(self) -> ServiceStatus:
        """How the process is: up for 90 seconds."""
        return ServiceStatus(
            version="1.2.3",
            started_at_ms=1_000_000,
            now_ms=1_090_000,
            open_streams=7,
            draining=False,
            policy_version=self.rules.version,
            policy_loaded_at_ms=1_000_500,
            policy_error=self.policy_error,
        )

    def sources(self) -> Sources:
        """These answers as the admin port wants them."""
        return Sources(
            ready_checks=lambda: self.checks,
            status=self.status,
            policy=lambda: self.rules,
            snapshot=self.snapshot,
            metrics=self.metrics,
            recent=lambda: self.decisions,
            history=lambda: self.counts,
            load=lambda: self.load,
        )


def an_engine(pool: str, replica: str, **changes: Any) -> ReplicaLoad:
    """An engine that told its load two seconds ago."""
    fields: dict[str, Any] = {
        "pool": pool,
        "replica": replica,
        "is_probed": True,
        "signal": EngineSignal(waiting_requests=3, running_requests=8, kv_used_permille=640, at_ms=0),
        "age_ms": 2_000,
        "breaker": BreakerState.CLOSED,
        "breaker_wait_ms": 0,
        "breaker_opened_total": 0,
        "probes": {ProbeResult.OK: 7},
    }
    return ReplicaLoad(**(fields | changes))


def some_load(pool: str, *engines: ReplicaLoad) -> tuple[PoolLoad | ReplicaLoad, ...]:
    """What is known of a pool in which bulk is suspended."""
    return (PoolLoad(pool=pool, pressure_permille=1_200, lanes={Lane.BULK: True}), *engines)


@asynccontextmanager
async def open_port(
    service: FakeService, **arguments: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, AdminServer]]:
    """The admin port of `service`, and a client that calls it by its address."""
    server = AdminServer(sources=service.sources(), **arguments)
    await server.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client:
            yield client, server
    finally:
        await server.stop()
