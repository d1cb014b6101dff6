"""One answer for all who ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_Answer = TypeVar("_Answer")


class Shared(Generic[_Answer]):
    """Asks `fetch` at most once at a time and once per `max_age_s`, and at most `timeout_s` long.

    However many pages and scrapers poll, what is behind them is asked as if it were one. `ask` raises what
    `fetch` raised, and `TimeoutError`; failures are not kept.
    """

    def __init__(
        self, fetch: Callable[[], Awaitable[_Answer]], *, max_age_s: float, timeout_s: float
    ) -> None:
        self._fetch = fetch
        self._max_age_s = max_age_s
        self._timeout_s = timeout_s
        self._running: asyncio.Task[_Answer] | None = None
        self._answer: tuple[float, _Answer] | None = None

    async def ask(self) -> _Answer:
        """The answer, at most `max_age_s` old."""
        if self._answer is not None:
            at_s, answer = self._answer
            if asyncio.get_running_loop().time() - at_s <= self._max_age_s:
                return answer
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._once())
            self._running.add_done_callback(self._ended)
        # Whoever gives up first must not take the answer from the others.
        return await asyncio.shield(self._running)

    async def close(self) -> None:
        """End the question that is under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _once(self) -> _Answer:
        answer = await asyncio.wait_for(self._fetch(), self._timeout_s)
        self._answer = (asyncio.get_running_loop().time(), answer)
        return answer

    def _ended(self, task: asyncio.Task[_Answer]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # taken here too, in case everybody who asked has left
