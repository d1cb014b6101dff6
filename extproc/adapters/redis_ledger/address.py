"""Where the ledger's server is: one server, a cluster's seeds, or the Sentinels that know it.

    redis://[user:password@]host:port[/db]              rediss:// for TLS, with ?ssl_ca_certs=… and the like
    redis://host1:port,host2:port                       several seeds: a cluster, or any that answers
    unix:///run/valkey.sock[?db=…]
    redis+sentinel://[user:password@]host:port,…/service[/db]   rediss+sentinel:// for TLS to the server

A ledger domain is one hash slot, so a cluster needs no map of slots here: whoever is asked knows the owner
(`MOVED host:port`), and the next connection goes there.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from redis.asyncio.connection import (
    Connection as RedisConnection,
)
from redis.asyncio.connection import (
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import RedisError

from extproc.adapters.redis_ledger.connection import Connection

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")


class AddressError(ValueError):
    """The ledger's address cannot be understood. Names no credential."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One server's host and port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Parsed and checked; `connect` uses it. `repr` shows no credential."""

    text: str
    nodes: tuple[Node, ...]
    path: str | None
    service: str | None
    url: str

    def __repr__(self) -> str:
        """Where, without who."""
        where = self.path or ",".join(f"{node.host}:{node.port}" for node in self.nodes)
        return f"Address({where})"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `AddressError`, which says what is wrong and what is expected."""
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise AddressError(f"ledger address: scheme {parts.scheme!r} is not one of {', '.join(SCHEMES)}")
        if parts.scheme == "unix":
            if not parts.path:
                raise AddressError("ledger address: unix:// needs a path, as in unix:///run/valkey.sock")
            return cls(text=text, nodes=(), path=unquote(parts.path), service=None, url=text)
        userinfo, _, hosts = parts.netloc.rpartition("@")
        nodes = tuple(_node(host) for host in hosts.split(","))
        path = [part for part in parts.path.split("/") if part]
        service = None
        if parts.scheme.endswith("+sentinel"):
            if not path:
                raise AddressError(
                    "ledger address: a Sentinel address ends with the service, as in redis+sentinel://h:26379/ledger"
                )
            service = unquote(path.pop(0))
        scheme = parts.scheme.partition("+")[0]
        credentials = f"{userinfo}@" if userinfo else ""
        database = f"/{path[0]}" if path else ""
        query = f"?{parts.query}" if parts.query else ""
        url = f"{scheme}://{credentials}{nodes[0].host}:{nodes[0].port}{database}{query}"
        address = cls(text=text, nodes=nodes, path=None, service=service, url=url)
        address.options()
        return address

    def options(self) -> RedisConnection | SSLConnection | UnixDomainSocketConnection:
        """What redis-py makes of the URL: credentials, database, TLS. Never connected. Raises `AddressError`."""
        try:
            pool = ConnectionPool.from_url(self.url)
            made: RedisConnection | SSLConnection | UnixDomainSocketConnection = pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, RedisError) as error:
            raise AddressError(f"ledger address: {type(error).__name__} in the URL's options") from None
        return made


def _node(text: str) -> Node:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, "6379"
    if not host or not port.isdigit():
        raise AddressError("ledger address: expected host:port[,host:port…] after the scheme")
    return Node(host=host.strip("[]"), port=int(port))


class Locator:
    """Finds the server that owns the ledger's slot, one attempt at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._options = address.options()
        self._seed = 0
        self._owner: Node | None = None

    def moved_to(self, host: str, port: int) -> None:
        """A server has named the slot's owner. An empty host is the server itself, on another port."""
        before = self._owner or (self._address.nodes[0] if self._address.nodes else None)
        self._owner = Node(host=host or (before.host if before else "127.0.0.1"), port=port)

    def lost(self) -> None:
        """The owner did not answer or has changed: begin with the seeds again."""
        self._owner = None
        self._seed += 1

    async def connect(self, on_lost: Callable[[Connection], None], timeout_s: float) -> Connection:
        """A connection that is authenticated and in its database.

        Raises `OSError`, `TimeoutError`, `Lost`, `ReplyError`, or what Sentinel's client raises.
        """
        async with asyncio.timeout(timeout_s):
            connection = await self._open(on_lost)
            try:
                await self._introduce(connection)
            except BaseException:
                connection.abort()
                raise
            return connection

    async def _open(self, on_lost: Callable[[Connection], None]) -> Connection:
        loop = asyncio.get_running_loop()
        if self._address.path is not None:
            _, connection = await loop.create_unix_connection(lambda: Connection(on_lost), self._address.path)
            return connection
        node = await self._node()
        context = self._tls()
        _, connection = await loop.create_connection(
            lambda: Connection(on_lost),
            node.host,
            node.port,
            ssl=context,
            server_hostname=node.host if context is not None else None,
        )
        return connection

    async def _node(self) -> Node:
        if self._owner is not None:
            return self._owner
        address = self._address
        if address.service is None:
            return address.nodes[self._seed % len(address.nodes)]
        hosts = [(node.host, node.port) for node in address.nodes]
        sentinel = Sentinel(hosts, socket_timeout=0.5)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(address.service)
        finally:
            for client in sentinel.sentinels:
                await client.aclose()
        return Node(host=host, port=int(port))

    def _tls(self) -> ssl.SSLContext | None:
        options = self._options
        return options.ssl_context.get() if isinstance(options, SSLConnection) else None

    async def _introduce(self, connection: Connection) -> None:
        options = self._options
        if options.password:
            user = (options.username,) if options.username else ()
            await connection.ask("AUTH", *user, options.password)
        if options.db:
            await connection.ask("SELECT", int(options.db))
