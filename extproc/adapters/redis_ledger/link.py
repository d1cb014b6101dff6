"""Keeps one connection to the server that owns the ledger's slot, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from extproc.adapters.redis_ledger.address import Address, Locator
from extproc.adapters.redis_ledger.connection import Connection, Lost, OnReply, Reply, ReplyError
from extproc.adapters.redis_ledger.scripts import Script

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0

ELSEWHERE = frozenset({"MOVED", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "NOAUTH", "WRONGPASS"})
"""Errors that say that this connection is of no use (any more): find another."""

LATER = frozenset({"NOSCRIPT", "ASK", "TRYAGAIN", "BUSY"})
"""Errors after which the same call may succeed on the same connection."""


class Link:
    """`call` while `is_up`; `on_up` is told of each new connection, `on_down` of its end and of failed attempts."""

    def __init__(
        self, address: Address, *, on_up: Callable[[], None], on_down: Callable[[str], None]
    ) -> None:
        self._locator = Locator(address)
        self._on_up = on_up
        self._on_down = on_down
        self._connection: Connection | None = None
        self._changed = asyncio.Event()
        self._known_digests: set[bytes] = set()
        self._task: asyncio.Task[None] | None = None
        self._asking = False
        self.connections_total = 0

    @property
    def is_up(self) -> bool:
        """Whether there is a connection. That it answers is for the caller to find out."""
        return self._connection is not None and self._connection.is_open

    def start(self) -> None:
        """Begin to connect, and never stop trying."""
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="ledger link")

    async def stop(self) -> None:
        """Close, for good."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.drop()

    def drop(self) -> None:
        """Give this connection up; another one is opened."""
        if self._connection is not None:
            self._connection.abort()

    def call(self, script: Script, keys: Sequence[bytes], argument: bytes, on_reply: OnReply) -> None:
        """Run a script. `on_reply` gets its reply, a `ReplyError` (nothing was done) or `Lost` (who knows).

        A server that has never seen the script gets its text: EVAL needs no permission to load scripts. The
        caller asks again after NOSCRIPT, because it knows what must not be done out of turn.
        """
        connection = self._connection
        if connection is None:
            on_reply(Lost("not connected"))
            return
        known = script.digest in self._known_digests

        def received(reply: Reply) -> None:
            if isinstance(reply, ReplyError):
                self._consider(reply, script)
            on_reply(reply)

        command = (b"EVALSHA", script.digest) if known else (b"EVAL", script.text)
        self._known_digests.add(script.digest)
        try:
            if self._asking:
                connection.call((b"ASKING",), lambda _: None)
            connection.call((*command, len(keys), *keys, argument), received)
        except Lost as lost:
            on_reply(lost)

    def _consider(self, error: ReplyError, script: Script) -> None:
        code, _, rest = str(error).partition(" ")
        if code == "NOSCRIPT":
            self._known_digests.discard(script.digest)
        elif code == "ASK":
            # The slot is moving and our keys are at its new place already.
            self._follow(rest)
            self._asking = True
            self.drop()
        elif code == "MOVED":
            self._follow(rest)
            self._asking = False
            self.drop()
        elif code in ELSEWHERE:
            self._locator.lost()
            self.drop()

    def _follow(self, rest: str) -> None:
        host, _, port = rest.rpartition(" ")[2].rpartition(":")
        self._locator.moved_to(host, int(port))

    def _lost(self, connection: Connection) -> None:
        if connection is self._connection:
            self._connection = None
            self._changed.set()

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                connection = await self._locator.connect(self._lost, CONNECT_TIMEOUT_S)
            except (OSError, TimeoutError, Lost, ReplyError, RedisError) as error:
                self._locator.lost()
                self._on_down(_named(error))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            self._changed.clear()
            self._known_digests.clear()
            self._connection = connection
            self.connections_total += 1
            pause_s = FIRST_PAUSE_S
            if connection.is_open:
                self._on_up()
                await self._changed.wait()
            self._connection = None
            self._on_down("connection lost")
            # A server that hangs up at once must not be asked in a tight loop.
            await asyncio.sleep(FIRST_PAUSE_S)


def _named(error: BaseException) -> str:
    """The kind of fault: texts of errors may hold addresses and credentials."""
    return error.code if isinstance(error, ReplyError) else type(error).__name__
