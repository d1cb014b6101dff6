"""Probes of engines that hang, flood, fail, lie and die; and of the real llama.cpp."""

from __future__ import annotations

import asyncio
import logging
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from extproc.adapters.engine_probe.probe import Target, a_client, probe
from extproc.adapters.engine_probe.watch import EngineWatch, targets
from extproc.domain.breaker import BreakerState
from extproc.domain.load import LoadBook, ReplicaLoad
from extproc.domain.policy import BreakerPolicy, Policy, PoolFallback, ProbePolicy, Replica
from extproc.domain.signals import ProbeResult
from tests.builders import a_model, a_policy, a_pool
from tests.engines.engine import BadEngine, bad_engine
from tests.support import child
from tests.support.llama_cpp import LlamaServer

RULES = ProbePolicy(interval_ms=50, timeout_ms=400, stale_ms=1_500)
PATIENT = ProbePolicy(timeout_ms=20_000)


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def a_target(address: str, rules: ProbePolicy = PATIENT) -> Target:
    return Target(pool="chat", replica="r0", address=address, rules=rules, models=frozenset({"tiny"}))


def a_policy_of(*addresses: str, rules: ProbePolicy = RULES) -> Policy:
    """A pool of engines at these addresses."""
    replicas = tuple(
        Replica(name=f"r{number}", ceiling_tokens=96_000, address=address)
        for number, address in enumerate(addresses)
    )
    return a_policy(
        pools=(a_pool(replicas=replicas, probe=rules, breaker=BreakerPolicy(failures=3, open_ms=600)),)
    )


@asynccontextmanager
async def watched(policy: Policy) -> AsyncIterator[tuple[LoadBook, EngineWatch]]:
    """A load book that is kept up to date."""
    book = LoadBook(policy)
    watch = EngineWatch(book, now_ms=now_ms)
    await watch.start(policy)
    try:
        yield book, watch
    finally:
        await watch.stop()


def loads(book: LoadBook) -> list[ReplicaLoad]:
    return [one for one in book.states(now_ms()) if isinstance(one, ReplicaLoad)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, generously."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("mood", "result", "problem"),
    [
        ("well", ProbeResult.OK, None),
        ("hangs", ProbeResult.TIMEOUT, "it does not answer in time"),
        ("drips", ProbeResult.TIMEOUT, "it does not answer in time"),
        ("fails", ProbeResult.ERROR, "it answers 500"),
        ("lost", ProbeResult.ERROR, "it answers 404"),
        ("redirects", ProbeResult.ERROR, "it answers 302"),
        ("cut", ProbeResult.ERROR, "reading it failed: ClientPayloadError"),
        ("stops halfway", ProbeResult.ERROR, "the page was cut off"),
        ("closes", ProbeResult.ERROR, "reading it failed: ServerDisconnectedError"),
        ("floods", ProbeResult.ERROR, "the page is too large"),
        ("long line", ProbeResult.ERROR, "a line is too long"),
        ("garbage", ProbeResult.ERROR, "reading it failed: ClientResponseError"),
        ("compressed", ProbeResult.ERROR, "it answers in an encoding it was not asked for"),
        ("empty", ProbeResult.MISS, "it tells none of the numbers of an engine known here"),
    ],
)
async def test_every_way_to_answer(mood: str, result: ProbeResult, problem: str | None) -> None:
    """Only a good page is a signal; nothing that an engine says in place of it says that it is gone."""
    rules = RULES if result is ProbeResult.TIMEOUT else PATIENT
    async with bad_engine(mood) as engine, a_client() as client:
        probed = await probe(client, a_target(engine.address, rules), now_ms)
    assert (probed.result, probed.problem) == (result, problem)
    assert (probed.signal is not None) is (result is ProbeResult.OK)


async def test_where_nobody_listens() -> None:
    """The one answer that says so."""
    (port,) = child.free_ports(1)
    async with a_client() as client:
        probed = await probe(client, a_target(f"127.0.0.1:{port}"), now_ms)
        assert probed.result is ProbeResult.REFUSED
        probed = await probe(client, a_target("nowhere.invalid:80"), now_ms)
        assert probed.result is ProbeResult.ERROR


async def test_a_flood_does_not_hold_up_the_loop() -> None:
    """Four engines that write as fast as they can, read in pieces: others get their turn in between."""
    lags: list[float] = []

    async def measure() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - before)

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(bad_engine("floods")) for _ in range(4)]
        client = await stack.enter_async_context(a_client())
        measuring = asyncio.create_task(measure())
        found = await asyncio.gather(*(probe(client, a_target(one.address), now_ms) for one in engines))
        measuring.cancel()
    assert {one.result for one in found} == {ProbeResult.ERROR}
    assert len(lags) > 50, "the loop was free many times meanwhile"


async def test_a_hanging_engine_delays_no_other_and_becomes_stale() -> None:
    """Its signal grows old and is then unknown; the breaker stays closed; a good answer brings it back."""
    async with bad_engine() as good, bad_engine() as bad:
        async with watched(a_policy_of(good.address, bad.address)) as (book, _):
            await until(lambda: all(one.signal is not None for one in loads(book)))
            bad.mood = "hangs"
            await until(lambda: loads(book)[1].is_stale)
            healthy, hanging = loads(book)
            assert healthy.signal is not None
            assert hanging.age_ms is not None
            assert hanging.age_ms > RULES.stale_ms
            assert hanging.probes[ProbeResult.TIMEOUT] >= 2
            assert hanging.breaker is BreakerState.CLOSED
            assert bad.asked <= sum(hanging.probes.values()) + 1, "one probe at a time"
            bad.mood = "well"
            bad.hang_up()
            await until(lambda: not loads(book)[1].is_stale)
        asked = good.asked
        await asyncio.sleep(0.3)
        assert good.asked == asked, "nobody asks any more"


async def test_a_dead_engine_opens_its_breaker_and_a_new_one_closes_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by probes alone, logged once each way."""
    caplog.set_level(logging.INFO, logger="extproc")
    (port,) = child.free_ports(1)
    async with watched(a_policy_of(f"127.0.0.1:{port}")) as (book, _):
        await until(lambda: loads(book)[0].breaker is BreakerState.OPEN)
        await asyncio.sleep(1.2)
        assert loads(book)[0].breaker_opened_total == 1
        async with bad_engine(port=port):
            await until(lambda: loads(book)[0].breaker is BreakerState.CLOSED)
            await until(lambda: loads(book)[0].signal is not None)
            await asyncio.sleep(1.2)
    told = [
        (
            getattr(record, "state", None),
            record.levelname,
            getattr(record, "replica", None),
            getattr(record, "detail", None),
        )
        for record in caplog.records
        if record.name.endswith("engine_probe.watch")
    ]
    assert told.count(("breaker open", "WARNING", "r0", "nobody accepts connections")) == 1
    assert told.count(("breaker closed", "INFO", "r0", None)) == 1
    assert told.count(("engine signal back", "INFO", "r0", None)) == 1


async def test_a_fault_of_our_own_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking and judging go on after whatever should not have happened."""
    faults: list[str] = []

    def once(name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            if name not in faults:
                faults.append(name)
                raise RuntimeError(name)
            return really(*arguments)

        return act

    ticked = asyncio.Event()
    book = LoadBook(a_policy())

    def tick(now: int) -> None:
        ticked.set()

    monkeypatch.setattr("extproc.adapters.engine_probe.watch.probe", once("probe", probe))
    monkeypatch.setattr(book, "tick", once("tick", tick))
    async with bad_engine() as engine:
        policy = a_policy_of(engine.address)
        book.policy_changed(policy)
        watch = EngineWatch(book, now_ms=now_ms)
        await watch.start(policy)
        try:
            await until(lambda: ticked.is_set() and loads(book)[0].signal is not None)
        finally:
            await watch.stop()
    assert sorted(faults) == ["probe", "tick"]


async def test_a_new_policy_asks_its_own_engines() -> None:
    """Those that are gone are left alone, those that stay are asked on, without a pause or twice."""
    async with bad_engine() as first, bad_engine() as second, bad_engine() as third:
        policy = a_policy_of(first.address, second.address)
        async with watched(policy) as (book, watch):
            await until(lambda: first.asked > 1 and second.asked > 1)
            policy = a_policy_of(first.address, third.address)
            book.policy_changed(policy)
            watch.policy_changed(policy)
            await until(lambda: third.asked > 1)
            asked_first, asked_second = first.asked, second.asked
            await until(lambda: first.asked > asked_first + 2)
            assert second.asked == asked_second


async def test_many_engines_of_all_kinds_at_once() -> None:
    """Thirty, each as bad as it likes: the good ones are known all the time."""
    moods = ("well", "hangs", "floods", "fails", "cut", "garbage")
    async with AsyncExitStack() as stack:
        engines: list[BadEngine] = [
            await stack.enter_async_context(bad_engine(moods[number % 6])) for number in range(30)
        ]
        rules = ProbePolicy(interval_ms=500, timeout_ms=2_000, stale_ms=20_000)
        policy = a_policy_of(*(engine.address for engine in engines), rules=rules)
        book, _ = await stack.enter_async_context(watched(policy))
        await until(lambda: all(one.probes for one in loads(book)))
        await until(lambda: all(one.signal for one in loads(book)[::6]))
        await asyncio.sleep(1)
        assert all(one.signal for one in loads(book)[::6])
        assert not any(one.signal for number, one in enumerate(loads(book)) if number % 6)


def test_models_that_an_engine_may_serve_under() -> None:
    """Those that lead to its pool, by all their names, fallbacks included; replicas without address are not asked."""
    model = a_model(aliases=("default",), fallbacks=(PoolFallback(pool="spare"),))
    replicas = (
        Replica(name="x", ceiling_tokens=1_000, address="h:1"),
        Replica(name="y", ceiling_tokens=1_000),
    )
    policy = a_policy(models=(model,), pools=(a_pool(), a_pool(name="spare", replicas=replicas)))
    assert [(one.pool, one.replica, one.models) for one in targets(policy)] == [
        ("spare", "x", frozenset({"tiny", "default"}))
    ]


async def test_the_real_llama_cpp(llama_server: LlamaServer) -> None:
    """An idle one tells that nobody waits and nothing runs; a busy one that it runs."""
    target = a_target(llama_server.url.removeprefix("http://"))
    async with a_client() as client:
        idle = await probe(client, target, now_ms)
        assert idle.signal is not None
        assert (idle.signal.waiting_requests, idle.signal.running_requests) == (0, 0)

        def generate() -> None:
            body = b'{"prompt": "Once upon a time", "n_predict": 400, "ignore_eos": true}'
            request = urllib.request.Request(f"{llama_server.url}/completion", body)
            request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()

        running = [asyncio.create_task(asyncio.to_thread(generate)) for _ in range(6)]
        most_running = most_waiting = 0
        while not all(task.done() for task in running):
            busy = await probe(client, target, now_ms)
            if busy.signal is not None:
                most_running = max(most_running, busy.signal.running_requests or 0)
                most_waiting = max(most_waiting, busy.signal.waiting_requests or 0)
        await asyncio.gather(*running)
    assert most_running == 4
    assert most_waiting >= 1
