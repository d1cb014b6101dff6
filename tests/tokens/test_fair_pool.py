"""Turns among tenants and among jobs; bounds; threads that stay free of long steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event, Lock

import pytest

from extproc.adapters.tokens.fair_pool import LONG_STEP_US, FairPool

PATIENCE_S = 20.0


@dataclass(slots=True)
class Log:
    """Who had a turn, in order."""

    turns: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def note(self, name: str) -> None:
        with self.lock:
            self.turns.append(name)


@dataclass(slots=True)
class Scripted:
    """A job of so many turns."""

    name: str
    log: Log
    turns_left: int = 1
    done: Event = field(default_factory=Event)
    gate: Event | None = None
    entered: Event = field(default_factory=Event)
    next_step_us: int = 0

    def turn(self) -> int | None:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(PATIENCE_S)
        self.log.note(self.name)
        self.turns_left -= 1
        if self.turns_left:
            return self.next_step_us
        self.done.set()
        return None


@pytest.fixture
def pool_of() -> Iterator[Callable[..., FairPool]]:
    """Makes pools, and closes them afterwards."""
    pools: list[FairPool] = []

    def make(
        threads: int, jobs_limit: int = 100, jobs_per_tenant_limit: int = 100, work_limit_us: int = 1_000
    ) -> FairPool:
        pools.append(
            FairPool(
                threads=threads,
                jobs_limit=jobs_limit,
                jobs_per_tenant_limit=jobs_per_tenant_limit,
                work_limit_us=work_limit_us,
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close(PATIENCE_S)


def blocked(pool: FairPool, log: Log) -> Event:
    """A pool of one thread, held until the event is set, so that what is submitted meanwhile queues up."""
    gate = Event()
    holder = Scripted("holder", log, gate=gate)
    assert pool.submit("holder", holder, 0, 0)
    assert holder.entered.wait(PATIENCE_S)
    return gate


def test_tenants_take_turns_and_so_do_their_jobs(pool_of: Callable[..., FairPool]) -> None:
    """A tenant with many long jobs gets every other turn while another has work, and its jobs go round."""
    log = Log()
    pool = pool_of(1)
    gate = blocked(pool, log)
    jobs = [Scripted(f"a{number}", log, turns_left=3) for number in (1, 2)]
    jobs += [Scripted("b1", log, turns_left=2), Scripted("c1", log)]
    for job in jobs:
        assert pool.submit(job.name[0], job, 0, 0)
    gate.set()
    assert all(job.done.wait(PATIENCE_S) for job in jobs)
    assert log.turns == ["holder", "a1", "b1", "c1", "a2", "b1", "a1", "a2", "a1", "a2"]


def test_a_pool_is_bounded_in_jobs_and_in_jobs_of_one_tenant(pool_of: Callable[..., FairPool]) -> None:
    """A tenant over its share is turned away, and everybody when the pool is full; room comes back."""
    log = Log()
    pool = pool_of(1, jobs_limit=4, jobs_per_tenant_limit=2)
    gate = blocked(pool, log)
    jobs = [Scripted(name, log) for name in ("a1", "a2", "a3", "b1", "b2")]
    taken = [pool.submit(job.name[0], job, 0, 0) for job in jobs]
    assert taken == [True, True, False, True, False]
    assert pool.jobs == 4
    gate.set()
    assert jobs[0].done.wait(PATIENCE_S)
    assert jobs[3].done.wait(PATIENCE_S)
    again = Scripted("a4", log)
    until_s = time.monotonic() + PATIENCE_S
    while not pool.submit("a", again, 0, 0):  # the last job is off the books a moment after it is done
        assert time.monotonic() < until_s
    assert again.done.wait(PATIENCE_S)


def test_a_pool_is_bounded_in_work(pool_of: Callable[..., FairPool]) -> None:
    """Half of the work may be one tenant's; a first job is taken even if it is more; room comes back."""
    log = Log()
    pool = pool_of(1, work_limit_us=1_000)
    gate = blocked(pool, log)
    taken = [
        pool.submit(tenant, Scripted(tenant, log), 0, work_us)
        for tenant, work_us in (("a", 600), ("a", 1), ("b", 300), ("b", 200), ("c", 101), ("c", 100))
    ]
    assert taken == [True, False, True, False, False, True]
    gate.set()
    until_s = time.monotonic() + PATIENCE_S
    while pool.jobs:
        assert time.monotonic() < until_s
    assert pool.submit("a", Scripted("a", log), 0, 5_000)


def test_one_thread_stays_free_of_long_steps(pool_of: Callable[..., FairPool]) -> None:
    """While long steps are under way, and more of them wait, a short job is worked on."""
    log, gate = Log(), Event()
    pool = pool_of(2)
    long = [Scripted(f"l{number}", log, gate=gate) for number in range(3)]
    for job in long:
        assert pool.submit(job.name, job, LONG_STEP_US + 1, 0)
    short = Scripted("s", log, turns_left=5)
    assert pool.submit("s", short, LONG_STEP_US, 0)
    assert short.done.wait(PATIENCE_S)
    assert not any(job.done.is_set() for job in long)
    gate.set()
    assert all(job.done.wait(PATIENCE_S) for job in long)


def test_a_job_whose_steps_become_long_leaves_the_free_thread(pool_of: Callable[..., FairPool]) -> None:
    """What counts is the next step, not how the job began."""
    log, gate = Log(), Event()
    pool = pool_of(2)
    turning = [
        Scripted(f"t{number}", log, turns_left=2, next_step_us=LONG_STEP_US + 1) for number in range(3)
    ]
    for job in turning:
        assert pool.submit(job.name, job, 0, 0)
    held = Scripted("held", log, gate=gate)
    assert pool.submit("held", held, LONG_STEP_US + 1, 0)
    short = Scripted("s", log)
    assert pool.submit("s", short, 0, 0)
    assert short.done.wait(PATIENCE_S)
    gate.set()
    assert all(job.done.wait(PATIENCE_S) for job in (*turning, held))


def test_a_single_thread_alternates_between_short_and_long(pool_of: Callable[..., FairPool]) -> None:
    """With one thread, long steps neither starve nor are starved."""
    log = Log()
    pool = pool_of(1)
    gate = blocked(pool, log)
    jobs = [Scripted("s", log, turns_left=3), Scripted("l", log, turns_left=2, next_step_us=LONG_STEP_US + 1)]
    assert pool.submit("s", jobs[0], 0, 0)
    assert pool.submit("l", jobs[1], LONG_STEP_US + 1, 0)
    gate.set()
    assert all(job.done.wait(PATIENCE_S) for job in jobs)
    assert sorted(log.turns[1:5]) == ["l", "l", "s", "s"]


def test_a_closed_pool_takes_nothing_and_its_threads_end(pool_of: Callable[..., FairPool]) -> None:
    """Closing does not wait for jobs that nobody has begun."""
    log = Log()
    pool = pool_of(2)
    pool.close(PATIENCE_S)
    assert not pool.submit("a", Scripted("a", log), 0, 0)
    assert not any(thread.is_alive() for thread in pool._threads)
