"""How late the event loop is: the first thing to know when everything is a little slow."""

from __future__ import annotations

import asyncio

EVERY_S = 0.2
WINDOW_S = 15.0
"""The largest delay of the last one to two windows is told: a scrape every 15 s misses none."""


class LoopLag:
    """Measures from `start` to `stop`, by sleeping and seeing how much longer it took."""

    def __init__(self) -> None:
        self._before_us = 0
        self._now_us = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def largest_us(self) -> int:
        """The largest delay lately, in microseconds."""
        return max(self._before_us, self._now_us)

    def start(self) -> None:
        """Begin to measure."""
        self._task = asyncio.get_running_loop().create_task(self._measure())

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        window_ends_s = loop.time() + WINDOW_S
        while True:
            due_s = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            now_s = loop.time()
            self._now_us = max(self._now_us, int((now_s - due_s) * 1_000_000))
            if now_s >= window_ends_s:
                self._before_us, self._now_us = self._now_us, 0
                window_ends_s = now_s + WINDOW_S
