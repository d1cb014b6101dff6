"""Who watches cannot harm what is watched, nor who else watches."""

from __future__ import annotations

import asyncio
import time

import pytest

from extproc.adapters.telemetry.loop_lag import LoopLag
from extproc.adapters.telemetry.observers import Observers
from extproc.adapters.telemetry.recent import Recent
from extproc.domain.decision import Decision, Settled
from tests.telemetry.facts import a_decision, a_settled


class Faulty:
    """An observer with a mistake in it."""

    def decided(self, decision: Decision) -> None:
        """See `Observer.decided`."""
        raise RuntimeError(decision.lease_id)

    def settled(self, settled: Settled) -> None:
        """See `Observer.settled`."""
        raise RuntimeError(settled.lease_id)


def test_a_fault_of_one_observer_is_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    """The others are told all the same, nothing is raised, the first fault is logged and all are counted."""
    before, after = Recent(), Recent()
    observers = Observers(before, Faulty(), after)
    for _ in range(3):
        observers.decided(a_decision())
        observers.settled(a_settled())

    assert len(before.decisions()) == len(after.decisions()) == 3
    assert observers.faults == 6
    assert [record.getMessage() for record in caplog.records] == ["an observer failed"]


async def test_the_loops_lag_is_what_blocks_it() -> None:
    """A loop that was blocked for a moment shows at least about that much lag; an idle one shows little."""
    lag = LoopLag()
    lag.start()
    await asyncio.sleep(0.05)
    time.sleep(0.5)  # the fault that it is there to find
    await asyncio.sleep(0.1)
    largest_us = lag.largest_us
    await lag.stop()
    await lag.stop()
    assert largest_us >= 300_000
