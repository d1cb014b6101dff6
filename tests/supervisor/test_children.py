"""Children are kept alive, and end when they are told to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from extproc.supervisor.children import Child


async def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds; fails when it never does."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


async def test_a_dead_child_is_started_again() -> None:
    """SIGKILL from outside: another process takes its place."""
    child = Child("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"])
    keeper = asyncio.create_task(child.keep_alive())
    await until(lambda: child.is_alive)
    first = child.pid
    assert child.process is not None
    child.process.kill()
    await until(lambda: child.is_alive and child.pid != first)
    assert child.restarts == 1
    await child.stop(10)
    await keeper
    assert not child.is_alive


async def test_a_child_that_will_not_end_is_killed() -> None:
    """SIGTERM is asked first; SIGKILL answers those who do not listen."""
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    child = Child("deaf", [sys.executable, "-c", ignore])
    keeper = asyncio.create_task(child.keep_alive())
    await until(lambda: child.is_alive)
    await asyncio.sleep(0.3)
    await child.stop(0.5)
    await keeper
    assert not child.is_alive
    assert child.restarts == 0
