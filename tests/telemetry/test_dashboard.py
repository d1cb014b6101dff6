"""The dashboard: built from code, about metrics that exist, and every query answered by a real Prometheus."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import runpy
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from extproc.adapters.admin_http import AdminServer, ServiceStatus, Sources
from extproc.adapters.telemetry.instruments import CLOSED_LABELS, INSTRUMENTS, Kind
from extproc.adapters.telemetry.metrics import RECORDED, Reading
from extproc.adapters.telemetry.telemetry import Telemetry
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane
from extproc.domain.snapshot import Snapshot
from tests.builders import a_lane, a_policy
from tests.support.prometheus import Prometheus
from tests.telemetry.facts import a_decision, a_settled, a_snapshot
from tests.telemetry.test_rules import DEPLOY, RULES, exported_names, metrics_in, require_prometheus
from tests.telemetry.test_rules import RECORDED as RECORDING_RULES

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


def concrete(expression: str) -> str:
    """A query as Grafana sends it with everything selected."""
    for name, value in {"$__rate_interval": "1m", "$instance": ".*", "$lane": ".*", "$pool": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_the_file_is_what_the_code_builds() -> None:
    """The dashboard in the repository is the one that its script writes."""
    built = runpy.run_path(str(DEPLOY / "grafana" / "build.py"))["dashboard"]()
    assert built == DASHBOARD, "run: python deploy/grafana/build.py"


def test_the_rows_follow_the_order_of_diagnosis() -> None:
    """Arrivals, admission, queue, engine, tenants, ledger, service; nothing overlaps, every panel explains itself."""
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Arrivals",
        "Admission",
        "Queue",
        "Engine",
        "Engine signals",
        "Tenants",
        "Ledger",
        "Service",
    ]
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"] for panel in PANELS)


@pytest.mark.parametrize("expression", QUERIES)
def test_queries_use_only_metrics_that_exist(expression: str) -> None:
    """Every name in a query is exported by the service or recorded by a rule, and every metric is looked at."""
    assert metrics_in(expression)
    assert metrics_in(expression) <= exported_names() | {rule["record"] for rule in RECORDING_RULES}


def every_reading(tick: Iterable[int]) -> Iterable[Reading]:
    """A value for each instrument that other parts of the service keep, for each of its label values."""
    names = {"model": ["tiny"], "pool": ["chat"], "replica": ["r0"], "tier": ["gold"], "tenant": ["acme"]}
    recorded = {instrument.name for instrument in RECORDED}
    count = next(iter(tick))
    for instrument in INSTRUMENTS.values():
        if instrument.name in recorded or instrument.kind is Kind.HISTOGRAM or "version" in instrument.labels:
            continue
        values = [names.get(label) or sorted(CLOSED_LABELS[label]) for label in instrument.labels]
        for labels in itertools.product(*values):
            value = count if instrument.kind is Kind.COUNTER else 1
            yield Reading(name=instrument.name, labels=labels, value=value)


async def keep_busy(telemetry: Telemetry) -> None:
    """Decisions and records of every kind, as long as it runs."""
    rng = random.Random(5)
    while True:
        for lane in Lane:
            for reason in Reason:
                telemetry.observer.decided(
                    a_decision(outcome=Outcome.REFUSED, reason=reason, lane=lane, retry_after_ms=900)
                )
            for _ in range(40):
                telemetry.observer.decided(a_decision(lane=lane, decided_us=rng.randrange(500, 50_000)))
                telemetry.observer.settled(a_settled(lane=str(lane), ttfb_ms=rng.randrange(50, 3_000)))
            telemetry.observer.decided(a_decision(lane=lane, fallback="pool:spare"))
            telemetry.observer.settled(a_settled(lane=str(lane), used_input_tokens=None))
            telemetry.observer.settled(a_settled(lane=str(lane), used_input_tokens=1_003))
        telemetry.metrics.ledger_called("reserve", rng.randrange(80, 4_000))
        await asyncio.sleep(0.1)


@asynccontextmanager
async def loaded_service(directory: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus that has scraped, for some seconds, an admin port behind which everything moves."""
    policy = a_policy(lanes={lane: a_lane(lane, residence_ms=2_000) for lane in Lane})

    async def held() -> Snapshot:
        return a_snapshot()

    ticks = itertools.count(1)
    telemetry = Telemetry(snapshot=held, readings=[lambda: every_reading(ticks)])
    telemetry.policy_changed(policy)
    await telemetry.start()
    admin = AdminServer(
        sources=Sources(
            ready_checks=dict,
            status=lambda: ServiceStatus(
                version="1",
                started_at_ms=0,
                now_ms=1,
                open_streams=0,
                draining=False,
                policy_version="test",
                policy_loaded_at_ms=0,
            ),
            policy=lambda: policy,
            snapshot=held,
            metrics=telemetry.exposition,
        )
    )
    await admin.start()
    prometheus = Prometheus(
        directory,
        [f"127.0.0.1:{admin.port}"],
        [RULES / "recording.rules.yml", RULES / "alerts.rules.yml"],
    )
    busy = asyncio.create_task(keep_busy(telemetry))
    blocking = ExitStack()
    try:
        await asyncio.to_thread(blocking.enter_context, prometheus)
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(prometheus.numbers, "model:extproc_count_drift:ratio_rate30m"):
                await asyncio.sleep(0.5)
            await asyncio.sleep(3)
        yield prometheus
        assert await asyncio.to_thread(prometheus.scrape_errors) == [""]
    finally:
        busy.cancel()
        await asyncio.to_thread(blocking.close)
        await admin.stop()
        await telemetry.stop()


async def test_every_query_of_the_dashboard_is_answered_by_a_real_prometheus(tmp_path: Path) -> None:
    """A real Prometheus scrapes a service in which everything moves: no query is refused or finds nothing."""
    require_prometheus()
    async with loaded_service(tmp_path) as prometheus:
        silent, firing = await asyncio.to_thread(ask_everything, prometheus)
    assert silent == []
    assert {"RefusingForWantOfCapacity", "LedgerPostureNotNormal", "SignalStale", "CountDrifts"} <= firing


def ask_everything(prometheus: Prometheus) -> tuple[list[str], set[str]]:
    """Queries of the dashboard that find nothing, and the alerts whose cause is in these same numbers."""
    silent = [
        f"{panel['title']}: {target['expr']}"
        for panel in PANELS
        for target in panel["targets"]
        if not prometheus.numbers(concrete(target["expr"]))
    ]
    for annotation in DASHBOARD["annotations"]["list"]:
        prometheus.query(concrete(annotation["expr"]))
    for variable in DASHBOARD["templating"]["list"][1:]:
        found = prometheus.query(variable["query"]["query"].removeprefix("label_values(").split(",")[0])
        assert all(sample["metric"][variable["name"]] for sample in found), variable["name"]
        assert found, variable["name"]
    firing = prometheus.query('ALERTS{alertstate=~"pending|firing"}')
    return silent, {sample["metric"]["alertname"] for sample in firing}
