"""Several workers behind one Envoy are one service: one limit, one view, and no request lost with a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import aiohttp
import pytest

from tests.e2e.test_admission import CHAT, chat, post
from tests.support.gateway import Gateway, running_gateway

WORKERS = 2


@pytest.fixture(scope="module")
def workers_gateway(sim_policy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers with an embedded Valkey, as `extproc serve --workers 2` starts them; leases live for a second."""
    policy = sim_policy.replace(
        "limits: {body_bytes: 2MiB}", "limits: {body_bytes: 2MiB, lease_ttl_ms: 2s, orphan_grace_ms: 4s}"
    )
    assert "lease_ttl_ms" in policy
    with running_gateway(tmp_path_factory.mktemp("workers"), policy, workers=WORKERS) as gateway:
        yield gateway


async def test_both_workers_serve_and_share_one_limit(workers_gateway: Gateway) -> None:
    """Two in flight for the tenant, over both workers: twenty at once, and two are admitted."""
    body = chat(max_tokens=200, ignore_eos=True)
    answers = await asyncio.gather(
        *(post(workers_gateway, body, headers={"x-tenant-id": "visitor"}) for _ in range(20))
    )
    assert sorted(status for status, _, _ in answers) == [200] * 2 + [429] * 18
    state = await asyncio.to_thread(workers_gateway.await_idle)
    assert [worker["answering"] for worker in state["workers"]] == [True] * WORKERS
    assert state["service"]["ledger"] == "shared"
    metrics = await asyncio.to_thread(workers_gateway.get, "/metrics")
    counted = sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith("extproc_requests_total{") and 'lane="interactive"' in line
    )
    assert counted >= 20
    assert "extproc_workers 2.0" in metrics


async def test_a_killed_worker_takes_no_answer_with_it_and_leaves_no_lease_behind(
    workers_gateway: Gateway,
) -> None:
    """SIGKILL with answers open: they go on to their ends, newcomers are served, and all counters end at zero."""
    body = chat(max_tokens=150, stream=True, ignore_eos=True)
    async with aiohttp.ClientSession(headers={"x-tenant-id": "acme"}) as client:

        async def whole() -> bytes:
            async with client.post(workers_gateway.url + CHAT, json=body) as answer:
                assert answer.status == 200
                return await answer.read()

        open_answers = [asyncio.create_task(whole()) for _ in range(6)]
        await asyncio.sleep(0.5)
        state = await asyncio.to_thread(workers_gateway.state)
        victim = max(state["workers"], key=lambda worker: worker["open_streams"])
        assert victim["open_streams"] > 0
        os.kill(victim["pid"], signal.SIGKILL)
        answers = await asyncio.gather(*open_answers)
        assert all(answer.rstrip().endswith(b"data: [DONE]") for answer in answers)
        assert (await post(workers_gateway, chat()))[0] == 200

    deadline = time.monotonic() + 30
    while True:
        state = await asyncio.to_thread(workers_gateway.state)
        if state.get("idle") and all(worker["answering"] for worker in state["workers"]):
            break
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.2)
    assert sum(worker["restarts"] for worker in state["workers"]) == 1
