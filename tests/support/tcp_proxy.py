"""A TCP proxy in front of a store, that cuts, swallows or passes what goes through it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self


@dataclass(kw_only=True)
class TcpProxy:
    """`async with TcpProxy(socket_path=...) as proxy:` listens on `proxy.port` and passes everything on.
    With `tls` it speaks TLS to its clients.

    While `swallows`, nothing arrives in either direction and nobody is told. `allow`, if it is set, sees each
    chunk from a client first; when it answers False, all connections are cut instead.
    """

    socket_path: str
    tls: ssl.SSLContext | None = None
    port: int = field(default=0, init=False)
    swallows: bool = field(default=False, init=False)
    allow: Callable[[bytes], bool] | None = field(default=None, init=False)
    connections: int = field(default=0, init=False)
    _server: asyncio.Server | None = field(default=None, init=False)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Close every connection, at once and without a word."""
        for writer in [*self._writers]:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self.socket_path)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}
        for source, target, upwards in ((reader, up_writer, True), (up_reader, writer, False)):
            task = asyncio.create_task(self._pump(source, target, upwards=upwards))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, upwards: bool
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                if self.swallows:
                    continue
                if upwards and self.allow is not None and not self.allow(data):
                    self.cut()
                    return
                target.write(data)
        except ConnectionError:
            pass
        finally:
            target.transport.abort()
            self._writers.discard(target)
