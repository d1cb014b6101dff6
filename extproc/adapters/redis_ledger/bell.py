"""The bell of one worker: another worker's call has let one of its callers go, or has refused one.

It is a channel of the store that only this worker listens to, on a connection of its own, because a connection
that listens can do nothing else. A ring carries nothing, may be lost, and is never needed: it saves waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redis.exceptions import RedisError

from extproc.adapters.redis_ledger.address import Address, Locator
from extproc.adapters.redis_ledger.connection import Connection, Lost, Reply, ReplyError

CONNECT_TIMEOUT_S = 1.0
PAUSE_S = 1.0


class Bell:
    """Calls `on_ring` when somebody rings, and once when it begins to listen."""

    def __init__(self, address: Address, channel: bytes, on_ring: Callable[[], None]) -> None:
        self._locator = Locator(address)
        self._channel = channel
        self._on_ring = on_ring
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen, and never stop trying. Harmless when repeated."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep(), name="ledger bell")

    async def stop(self) -> None:
        """Listen no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            self._lost.clear()
            try:
                connection = await self._locator.connect(lambda _: self._lost.set(), CONNECT_TIMEOUT_S)
            except (OSError, TimeoutError, Lost, ReplyError, RedisError):
                self._locator.lost()
            else:
                try:
                    self._listen(connection)
                    await self._lost.wait()
                except Lost:
                    pass
                finally:
                    connection.abort()
            await asyncio.sleep(PAUSE_S)

    def _listen(self, connection: Connection) -> None:
        def heard(reply: Reply) -> None:
            if isinstance(reply, Lost):
                return
            connection.expect(heard)
            if not isinstance(reply, ReplyError):  # without the right to listen there are still the looks
                self._on_ring()

        connection.call((b"SUBSCRIBE", self._channel), heard)
