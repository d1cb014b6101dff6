"""Child processes that are kept alive: a dead one is started again, later and later if it keeps dying."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
STEADY_S = 10.0
"""A child that has lived this long has started well: its next restart is a quick one again."""


@dataclass(slots=True)
class Child:
    """One child: how it is started, and how it is."""

    name: str
    command: Sequence[str]
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    started_at_s: float = 0.0
    _stopping: bool = field(default=False, repr=False)

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self.process.pid if self.is_alive and self.process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.returncode is None

    async def keep_alive(self) -> None:
        """Run the child until `stop` is called; start it again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            self.started_at_s = time.monotonic()
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.DEVNULL
            )
            code = await self.process.wait()
            if self._stopping:
                return
            if time.monotonic() - self.started_at_s >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            log.error(
                "child ended", extra={"child": self.name, "code": code, "pause_ms": int(pause_s * 1000)}
            )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            self.restarts += 1

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if there is anybody to get it."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL for one that does not end in time. It is not started again."""
        self._stopping = True
        self.signal(signal.SIGTERM)
        if self.process is None or self.process.returncode is not None:
            return
        try:
            await asyncio.wait_for(self.process.wait(), timeout=timeout_s)
        except TimeoutError:
            log.warning("child killed", extra={"child": self.name})
            self.signal(signal.SIGKILL)
            await self.process.wait()
