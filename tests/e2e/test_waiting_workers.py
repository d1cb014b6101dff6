"""Waiting with several workers on one Valkey, through a real Envoy: one line, whoever holds the caller."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.test_waiting import (
    CROWD,
    QUEUE_REQUESTS,
    a_full_pool,
    ask,
    clients,
    policy,
    queued,
    resident_kib,
    until_queued,
)
from tests.support.gateway import Gateway, running_gateway
from tests.support.patient_engine import patient_engine

WORKERS = 2
HELD_MOST = 40
"""So many in a row do not all go to the same one of two workers, unless Envoy knows only one."""

STORE_TOO_SLOW = ("token_budget_exhausted", "ledger_unavailable")
"""What a worker says by itself when a machine is so busy that the store does not answer within its budget."""

SHORT_LIVED = "\nlimits: {lease_ttl_ms: 2s, orphan_grace_ms: 4s}\n"
LONG_S = 30

Answer = tuple[int, dict[str, str], Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """An engine whose streamed answers go on until their clients leave."""
    with patient_engine() as address:
        yield address


@pytest.fixture(scope="module")
def patient(engine: str, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers whose requests wait for up to half a minute."""
    text = policy(engine, tokenizer_dir, residence=f"{LONG_S}s") + SHORT_LIVED
    text = text.replace("deadline_ms: 60s", "deadline_ms: 120s")
    with running_gateway(tmp_path_factory.mktemp("patient"), text, workers=WORKERS) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def brisk(engine: str, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two workers whose requests wait for up to 3 s."""
    text = policy(engine, tokenizer_dir) + SHORT_LIVED
    with running_gateway(tmp_path_factory.mktemp("brisk"), text, workers=WORKERS) as gateway:
        yield gateway


def streams(gateway: Gateway) -> dict[int, int]:
    """Open streams by worker process, of those that answer."""
    workers = gateway.state()["workers"]
    return {worker["pid"]: worker["open_streams"] for worker in workers if worker["answering"]}


def in_flight(gateway: Gateway) -> int:
    """Requests that hold tokens."""
    return sum(lane["requests"] for pool in gateway.state()["pools"] for lane in pool["lanes"])


async def eventually(check: Callable[[], bool], *, timeout_s: float = LONG_S) -> None:
    """Until it is so; `check` may block."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(check):
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Held:
    """A request that waits, and the worker process that holds it."""

    pid: int
    task: asyncio.Task[Answer]


async def hold_on_each(gateway: Gateway, session: aiohttp.ClientSession) -> list[Held]:
    """Let requests wait, one after the other, until each worker holds one."""
    held: list[Held] = []
    while len({one.pid for one in held}) < WORKERS:
        assert len(held) < HELD_MOST, "all requests wait with one worker"
        before = await asyncio.to_thread(streams, gateway)
        task = asyncio.create_task(ask(session, max_tokens=400))
        await until_queued(gateway, len(held) + 1)
        after = await asyncio.to_thread(streams, gateway)
        [pid] = [pid for pid, count in after.items() if count > before[pid]]
        held.append(Held(pid, task))
    return held


async def all_workers_serve(gateway: Gateway, restarts: int) -> None:
    """Until every worker answers again, and nothing is held any more."""

    def check() -> bool:
        state = gateway.state()
        return (
            all(worker["answering"] for worker in state["workers"])
            and sum(worker["restarts"] for worker in state["workers"]) == restarts
            and state["idle"]
            and state["service"]["open_streams"] == 0
            and gateway.envoy.stats("cluster.extproc.membership_healthy").popitem()[1] == WORKERS
        )

    await eventually(check)


def restarts(gateway: Gateway) -> int:
    """How often workers have been started again."""
    return sum(worker["restarts"] for worker in gateway.state()["workers"])


async def test_room_that_one_worker_makes_lets_the_other_workers_callers_go(patient: Gateway) -> None:
    """Held by both, while the answer that fills the pool is with one of them: its end admits them all."""
    async with clients(patient) as session:
        async with a_full_pool(session):
            held = await hold_on_each(patient, session)
        answers = await asyncio.gather(*(one.task for one in held))
        assert [status for status, _, _ in answers] == [200] * len(held)
    for _, headers, _ in answers:
        admission = (await asyncio.to_thread(patient.logged, headers["x-request-id"]))["admission"]
        assert 0 < admission["waited_ms"] < LONG_S * 1000
    await asyncio.to_thread(patient.await_idle)


async def test_who_hangs_up_while_held_is_gone_from_the_shared_line(patient: Gateway) -> None:
    """Their places are given up while the pool stays full, and nobody is admitted into the void."""
    async with clients(patient) as session, a_full_pool(session):
        held = await hold_on_each(patient, session)
        for one in held:
            one.task.cancel()
        await until_queued(patient, 0)
        assert await asyncio.to_thread(in_flight, patient) == 1
    await asyncio.to_thread(patient.await_idle)


async def test_who_has_waited_long_enough_in_the_shared_line_is_refused(brisk: Gateway) -> None:
    """429 with the reason, from either worker, and how long the oldest has waited was to be seen."""
    async with clients(brisk) as session, a_full_pool(session):
        held = await hold_on_each(brisk, session)
        lanes = (await asyncio.to_thread(brisk.state))["pools"][0]["lanes"]
        answers = await asyncio.gather(*(one.task for one in held))
    assert 0 < max(lane["oldest_queued_ms"] for lane in lanes) < 3_000
    for status, headers, content in answers:
        assert (status, headers["x-admission-reason"]) == (429, "residence_expired")
        assert content["error"]["waited_ms"] >= 3_000
    await asyncio.to_thread(brisk.await_idle)


@pytest.mark.parametrize("with_the_full_pool", [False, True])
async def test_a_worker_that_drains_sends_its_own_callers_away(
    patient: Gateway, *, with_the_full_pool: bool
) -> None:
    """SIGTERM to one of two: its callers get 503 draining, the other's go on waiting and are served.

    The answer that fills the pool goes on, whoever began it; if that worker is gone, the record of its end
    reaches the other one, and lets its callers go.
    """
    before = await asyncio.to_thread(restarts, patient)
    async with clients(patient) as session:
        async with a_full_pool(session):
            [full] = [pid for pid, count in streams(patient).items() if count]
            held = await hold_on_each(patient, session)
            victim = full if with_the_full_pool else next(one.pid for one in held if one.pid != full)
            os.kill(victim, signal.SIGTERM)
            for one in held:
                if one.pid == victim:
                    status, headers, _ = await one.task
                    assert (status, headers["x-admission-reason"]) == (503, "draining")
            others = [one for one in held if one.pid != victim]
            await until_queued(patient, len(others))
        answers = await asyncio.gather(*(one.task for one in others))
    assert [status for status, _, _ in answers] == [200] * len(others)
    await all_workers_serve(patient, before + 1)


async def test_the_line_passes_a_worker_that_was_killed(patient: Gateway) -> None:
    """SIGKILL to the worker of the first in line: whoever waits with the other one is served, well in time."""
    before = await asyncio.to_thread(restarts, patient)
    async with clients(patient) as session:
        async with a_full_pool(session):
            held = await hold_on_each(patient, session)
            victim = held[0].pid
            os.kill(victim, signal.SIGKILL)
            for one in held:
                if one.pid == victim:
                    assert (await one.task)[0] >= 500
        began = time.monotonic()
        others = [one for one in held if one.pid != victim]
        answers = await asyncio.gather(*(one.task for one in others))
        assert time.monotonic() - began < LONG_S / 2
    assert [status for status, _, _ in answers] == [200] * len(others)
    await all_workers_serve(patient, before + 1)


async def test_a_reloaded_policy_lets_those_who_wait_go(patient: Gateway) -> None:
    """SIGHUP with a pool of twice the size: the held are served while the answer that fills the old one goes on."""
    path = patient.directory / "policy.yaml"
    text = path.read_text()

    def versions() -> set[str]:
        return {worker["policy_version"] for worker in patient.state()["workers"]}

    assert patient.service.process is not None
    before = await asyncio.to_thread(versions)
    async with clients(patient) as session, a_full_pool(session):
        held = await hold_on_each(patient, session)
        larger = text.replace("ceiling_tokens: 2_000", "ceiling_tokens: 4_000")
        assert larger != text
        path.write_text(larger)
        patient.service.process.send_signal(signal.SIGHUP)
        answers = await asyncio.gather(*(one.task for one in held))
    assert [status for status, _, _ in answers] == [200] * len(held)
    path.write_text(text)
    patient.service.process.send_signal(signal.SIGHUP)
    await eventually(lambda: versions() == before)
    await asyncio.to_thread(patient.await_idle)


async def test_a_crowd_finds_one_bounded_line(brisk: Gateway) -> None:
    """Of 2,000 at once no more than the bound wait, over both workers together; then every counter is zero."""
    most_queued = 0
    pids = list(await asyncio.to_thread(streams, brisk))
    before_kib = {pid: resident_kib(pid) for pid in pids}
    most_kib = dict(before_kib)

    async def watch() -> None:
        nonlocal most_queued
        while True:
            most_queued = max(most_queued, await asyncio.to_thread(queued, brisk))
            for pid in pids:
                most_kib[pid] = max(most_kib[pid], resident_kib(pid))
            await asyncio.sleep(0.05)

    async with clients(brisk) as session, a_full_pool(session, 1_960):
        watcher = asyncio.create_task(watch())
        crowd = (ask(session, text=f"Question {number}", max_tokens=24) for number in range(CROWD))
        answers = await asyncio.gather(*crowd)
        watcher.cancel()
    reasons = {headers.get("x-admission-reason", "admitted") for _, headers, _ in answers}
    assert {status for status, _, _ in answers} <= {200, 429, 503}
    assert reasons <= {"admitted", "queue_full", "residence_expired", *STORE_TOO_SLOW}
    assert 0 < most_queued <= QUEUE_REQUESTS
    assert all(most_kib[pid] - before_kib[pid] < 200 * 1024 for pid in pids)
    state = await asyncio.to_thread(brisk.await_idle)
    assert [worker["open_streams"] for worker in state["workers"]] == [0] * WORKERS
