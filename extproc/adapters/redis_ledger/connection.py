"""One connection to one server: calls go out as they come, replies come back in the same order.

This is not `redis.asyncio.Connection` for two reasons. Order: a lease's release must never be run before its
renewal or its reservation, so all calls share one connection and are pipelined on it; redis-py takes a
connection per call in flight. Cost: without a task, a future and a lock per call, what is left is packing,
one write, and hiredis. Addresses, TLS and Sentinel are redis-py's (see `address`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import hiredis

Reply = Any
OnReply = Callable[[Reply], None]


class ReplyError(Exception):
    """The server answered with an error, and has done nothing: scripts write only when all has been decided."""

    @property
    def code(self) -> str:
        """The first word, such as NOSCRIPT or MOVED."""
        return str(self).partition(" ")[0]


class Lost(Exception):
    """The connection is gone. What was asked and not answered may have been done or not."""


class Connection(asyncio.Protocol):
    """A pipelined connection. Every call's `on_reply` is called exactly once: with a reply, a `ReplyError`
    or a `Lost`. `on_lost` is called once, after them.
    """

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self._on_lost = on_lost
        self._reader = hiredis.Reader(replyError=ReplyError)
        self._waiting: deque[OnReply] = deque()
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._transport is not None

    def call(self, arguments: Any, on_reply: OnReply) -> None:
        """Send one command, a tuple of bytes, text and integers. Raises `Lost` when the connection is closed."""
        if self._transport is None:
            raise Lost
        self._waiting.append(on_reply)
        self._transport.write(hiredis.pack_command(arguments))

    def expect(self, on_reply: OnReply) -> None:
        """One more reply comes, without another command: what a subscription delivers."""
        self._waiting.append(on_reply)

    async def ask(self, *arguments: bytes | int | str) -> Reply:
        """The reply to one command. Raises `ReplyError` and `Lost`."""
        replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def on_reply(reply: Reply) -> None:
            if not replied.done():
                replied.set_result(reply)

        self.call(arguments, on_reply)
        reply = await replied
        if isinstance(reply, ReplyError | Lost):
            raise reply
        return reply

    def abort(self) -> None:
        """Close at once; what is not answered is lost."""
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without inheriting from it

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        reader = self._reader
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                self._waiting.popleft()(reply)
        except (hiredis.HiredisError, IndexError):
            self.abort()  # not a server that we know how to talk to

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        while self._waiting:
            self._waiting.popleft()(Lost(type(exc).__name__ if exc is not None else "closed"))
        self._on_lost(self)
