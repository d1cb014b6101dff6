"""Asks every replica that has an address, over and over, and tells the load book; and lets its time pass.

Each worker asks by itself: what it knows does not depend on another process, and an engine's metrics page is
made for more askers than there are workers. Each replica has a task of its own, so one that hangs delays nobody;
intervals are jittered, so that askers do not fall into step.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import aiohttp

from extproc.adapters.engine_probe.probe import Probed, Target, a_client, probe
from extproc.domain.load import LoadBook
from extproc.domain.policy import Policy
from extproc.domain.signals import ProbeResult

log = logging.getLogger(__name__)

TICK_S = 1.0
JITTER = 0.25
"""An interval is longer or shorter by up to this part of it."""


class EngineWatch:
    """Runs from `start` to `stop`, in one event loop. `now_ms` is the clock of the load book."""

    def __init__(self, load: LoadBook, *, now_ms: Callable[[], int]) -> None:
        self._load = load
        self._now_ms = now_ms
        self._client: aiohttp.ClientSession | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self._problems: dict[tuple[str, str], str] = {}

    async def start(self, policy: Policy) -> None:
        """Begin to ask."""
        self._client = a_client()
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        self.policy_changed(policy)

    def policy_changed(self, policy: Policy) -> None:
        """Ask the engines of this policy from now on, and no others."""
        if self._client is None:
            return
        wanted = targets(policy)
        for target in self._tasks.keys() - wanted:
            self._tasks.pop(target).cancel()
        for target in wanted - self._tasks.keys():
            self._tasks[target] = asyncio.get_running_loop().create_task(self._ask(self._client, target))
        known = {(target.pool, target.replica) for target in wanted}
        self._problems = {key: problem for key, problem in self._problems.items() if key in known}

    async def stop(self) -> None:
        """Ask no more. Harmless when it has never begun."""
        tasks = [*self._tasks.values(), *([self._ticker] if self._ticker is not None else [])]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._client is not None:
            await self._client.close()

    async def _ask(self, client: aiohttp.ClientSession, target: Target) -> None:
        interval_s = target.rules.interval_ms / 1000
        await asyncio.sleep(random.uniform(0, JITTER) * interval_s)  # noqa: S311 - to spread, not to hide
        while True:
            try:
                probed = await probe(client, target, self._now_ms)
            except Exception:  # one engine that nobody can ask must not be forgotten for good
                log.exception("engine not asked", extra={"pool": target.pool, "replica": target.replica})
                probed = Probed(result=ProbeResult.ERROR, problem="asking it failed here")
            self._load.probed(target.pool, target.replica, probed.result, probed.signal, self._now_ms())
            if probed.problem is None:
                self._problems.pop((target.pool, target.replica), None)
            else:
                self._problems[target.pool, target.replica] = probed.problem
            await asyncio.sleep(random.uniform(1 - JITTER, 1 + JITTER) * interval_s)  # noqa: S311 - as above

    async def _tick(self) -> None:
        while True:
            try:
                self._load.tick(self._now_ms())
                self._tell()
            except Exception:  # time must go on: what is suspended would stay so
                log.exception("engines not judged")
            await asyncio.sleep(TICK_S)

    def _tell(self) -> None:
        """One line for each thing that has changed."""
        for change in self._load.changes(self._now_ms()):
            fields = {"state": change.what, "pool": change.pool}
            if change.lane is not None:
                fields["lane"] = str(change.lane)
            if change.replica is not None:
                fields["replica"] = change.replica
                problem = self._problems.get((change.pool, change.replica))
                if problem is not None:
                    fields["detail"] = problem
            log.log(logging.WARNING if change.is_trouble else logging.INFO, "engine changed", extra=fields)


def targets(policy: Policy) -> frozenset[Target]:
    """Every replica that has an address."""
    names: dict[str, set[str]] = {pool: set() for pool in policy.pools}
    for model in policy.models.values():
        for pool in policy.pools_of(model):
            names[pool].update((model.name, *model.aliases))
    return frozenset(
        Target(
            pool=pool.name,
            replica=replica.name,
            address=replica.address,
            rules=pool.probe,
            models=frozenset(names[pool.name]),
        )
        for pool in policy.pools.values()
        for replica in pool.replicas
        if replica.address is not None
    )
