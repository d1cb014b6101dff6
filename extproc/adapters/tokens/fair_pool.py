"""A few threads that work on the jobs of many tenants by turns.

Tenants take turns, and the jobs of one tenant take turns among themselves: whoever brings a hundred long jobs waits
for them, and everybody else goes on as before. A job cannot be interrupted inside a step, so one thread never
takes long steps: with two threads or more there is always one that turns to short jobs within a short step.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread, get_native_id
from typing import Protocol

LONG_STEP_US = 30_000
"""More than a slice of any text takes: what is longer is a text without a place to cut."""

NICENESS = 10
"""How far the threads step back, in Unix's terms: a tenth of the event loop's share where both want one processor."""


class Job(Protocol):
    """Work that can be paused."""

    def turn(self) -> int | None:
        """Work for a while. About how many microseconds the next step takes, or None if there is none.

        Must not raise.
        """
        ...


_Queued = tuple[Job, int]
"""A job and about how many microseconds it means altogether."""


@dataclass(slots=True)
class _Share:
    """What a tenant has in the pool."""

    jobs: int = 0
    work_us: int = 0


class _Rotation:
    """Jobs by tenant; the tenant whose turn it is comes first."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[_Queued]] = OrderedDict()

    def put(self, tenant: str, job: _Queued) -> None:
        self._tenants.setdefault(tenant, deque()).append(job)

    def take(self) -> tuple[str, _Queued] | None:
        if not self._tenants:
            return None
        tenant, jobs = self._tenants.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._tenants[tenant] = jobs
        return tenant, job


class FairPool:
    """Bounded in threads, in jobs and in the work they mean, of all tenants and of each."""

    def __init__(
        self, *, threads: int, jobs_limit: int, jobs_per_tenant_limit: int, work_limit_us: int
    ) -> None:
        """One tenant's work is at most half of `work_limit_us`; a first job is taken whatever its size."""
        self._jobs_limit = jobs_limit
        self._jobs_per_tenant_limit = jobs_per_tenant_limit
        self._work_limit_us = work_limit_us
        self._short = _Rotation()
        self._long = _Rotation()
        self._long_is_next = False
        self._shares: dict[str, _Share] = {}
        self._work_us = 0
        self._changed = Condition()
        self._closed = False
        self.jobs = 0
        """Jobs that wait or are being worked on."""
        self._threads = [
            Thread(
                target=self._work, args=(threads > 1 and number == 0,), name=f"tokens-{number}", daemon=True
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tenant: str, job: Job, next_step_us: int, work_us: int) -> bool:
        """Take a job of about `work_us` altogether, unless there is too much to do. False if it was not taken."""
        with self._changed:
            share = self._shares.get(tenant) or _Share()
            if (
                self._closed
                or self.jobs >= self._jobs_limit
                or share.jobs >= self._jobs_per_tenant_limit
                or (self.jobs and self._work_us + work_us > self._work_limit_us)
                or (share.jobs and share.work_us + work_us > self._work_limit_us // 2)
            ):
                return False
            self._shares[tenant] = share
            self._book(share, jobs=1, work_us=work_us)
            self._queue(tenant, job, next_step_us, work_us)
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """Take no more jobs and drop those that wait; what is inside a step ends it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _book(self, share: _Share, *, jobs: int, work_us: int) -> None:
        share.jobs += jobs
        share.work_us += work_us
        self.jobs += jobs
        self._work_us += work_us

    def _queue(self, tenant: str, job: Job, next_step_us: int, work_us: int) -> None:
        rotation = self._long if next_step_us > LONG_STEP_US else self._short
        rotation.put(tenant, (job, work_us))
        self._changed.notify_all()  # the one that wakes might be the one that takes no long steps

    def _next(self, short_only: bool) -> tuple[str, _Queued] | None:
        """The next job, when there is one; None when there will be no more."""
        with self._changed:
            while not self._closed:
                taken = self._take(short_only)
                if taken is not None:
                    return taken
                self._changed.wait()
        return None

    def _take(self, short_only: bool) -> tuple[str, _Queued] | None:
        if short_only:
            return self._short.take()
        rotations = (self._long, self._short) if self._long_is_next else (self._short, self._long)
        self._long_is_next = not self._long_is_next
        return rotations[0].take() or rotations[1].take()

    def _work(self, short_only: bool) -> None:
        _step_back()
        while True:
            taken = self._next(short_only)
            if taken is None:
                return
            tenant, (job, work_us) = taken
            next_step_us = job.turn()
            with self._changed:
                if next_step_us is not None:
                    self._queue(tenant, job, next_step_us, work_us)
                    continue
                share = self._shares[tenant]
                self._book(share, jobs=-1, work_us=-work_us)
                if not share.jobs:
                    del self._shares[tenant]


def _step_back() -> None:
    """Let the event loop go first: it has everybody waiting. Only Linux gives threads a priority of their own."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it; then all are equal
            os.setpriority(os.PRIO_PROCESS, get_native_id(), NICENESS)
