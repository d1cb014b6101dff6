"""The whole service, scraped by the real Prometheus while clients use it through the real Envoy."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from tests.e2e.test_admission import SENTENCE, chat, post
from tests.support.gateway import Gateway
from tests.support.prometheus import Prometheus
from tests.telemetry.test_dashboard import PANELS, concrete
from tests.telemetry.test_rules import RULES, require_prometheus

NEED_MORE = {
    "Call time",
    "Calls",
    "Operations per call",
    "Ledger events",
    "Posture",
    "Leases taken back",
    "Count cache",
    "Telemetry dropped",
    "Sent elsewhere",
}
"""Panels about parts that one worker with an in-memory ledger, and a policy without fallbacks, does not have."""


async def some_traffic(gateway: Gateway) -> None:
    """Requests that are admitted, and requests that are refused for several reasons."""
    for number in range(4):
        await asyncio.gather(
            *(post(gateway, chat(f"{number} {SENTENCE * 3}")) for _ in range(6)),
            post(gateway, chat(SENTENCE * 4_000)),
            post(gateway, chat(SENTENCE * 600), headers={"x-request-deadline-ms": "20"}),
            post(gateway, chat(max_tokens=900), headers={"x-tenant-id": "visitor"}),
            post(gateway, chat(max_tokens=1_500), headers={"x-tenant-id": "visitor"}),
            post(gateway, b"{"),
        )
        await asyncio.sleep(1.1)


async def test_a_loaded_service_answers_the_dashboard(own_gateway: Gateway, tmp_path: Path) -> None:
    """Every panel about parts that this service has shows data, and the numbers are those of the traffic."""
    require_prometheus()
    with ExitStack() as stack:
        prometheus = Prometheus(
            tmp_path / "prometheus",
            [urlsplit(own_gateway.admin_url).netloc],
            [RULES / "recording.rules.yml", RULES / "alerts.rules.yml"],
        )
        await asyncio.to_thread(stack.enter_context, prometheus)
        await some_traffic(own_gateway)
        await asyncio.sleep(3)
        silent = {
            panel["title"]
            for panel in PANELS
            for target in panel["targets"]
            if not prometheus.numbers(concrete(target["expr"]))
        }
        offered = prometheus.numbers("sum(extproc_requests_total)")
        too_long = prometheus.numbers('extproc_requests_total{reason="context_limit"}')
        answered = prometheus.numbers('sum(extproc_completions_total{status="2xx"})')
        checked = prometheus.numbers("sum(extproc_count_checked_total)")
        errors = prometheus.scrape_errors()

    assert errors == [""]
    assert silent <= NEED_MORE
    assert offered == [44]
    assert too_long == [4]
    assert answered[0] >= 20
    assert checked == answered


async def test_all_that_the_service_counts_is_in_the_instrument_set(sim_gateway: Gateway) -> None:
    """No part of the service gives a reading under a name that no instrument has."""
    await asyncio.to_thread(sim_gateway.get, "/metrics")
    page = await asyncio.to_thread(sim_gateway.get, "/metrics")
    assert "extproc_unknown_readings 0.0" in page
