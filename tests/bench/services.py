"""What is measured: the floor, and the service in each of its shapes, started when first asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.bench.processes import Cores, Server, running
from tests.support.valkey import ValkeyServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the service runs. `traced`: it exports to a collector; `watched`: metrics, recent decisions and log."""

    workers: int = 1
    shared_ledger: bool = False
    watched: bool = True
    traced: bool = False


AS_IT_COMES = Shape()
SHARED_LEDGER = Shape(shared_ledger=True)
TWO_WORKERS = Shape(workers=2, shared_ledger=True)
UNOBSERVED = Shape(watched=False)
TRACED = Shape(traced=True)


NATIVE = "native"
NOOP_SOURCE = Path(__file__).with_name("noop_server.cc")


def compiled(source: Path, program: Path) -> bool:
    """Whether `program` could be made of `source` with this machine's C++ compiler and gRPC."""
    if shutil.which("c++") is None or shutil.which("pkg-config") is None:
        return False
    grpc = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "grpc++"], capture_output=True, text=True, check=False
    )
    if grpc.returncode != 0:
        return False
    subprocess.run(["c++", "-O2", "-std=c++17", source, *grpc.stdout.split(), "-o", program], check=True)
    return True


@dataclass(slots=True)
class Services:
    """`with Services(...) as services:` ends all that it started."""

    directory: Path
    policy: Path
    cores: Cores
    _stack: ExitStack = field(default_factory=ExitStack)
    _running: dict[Shape | str | None, Server] = field(default_factory=dict)
    _collector: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def floor(self) -> Server:
        """A bare no-op ext_proc in `grpc.aio`."""
        if None not in self._running:
            self._running[None] = self._start("noop", ["tests.bench.noop_server"])
        return self._running[None]

    def native_floor(self) -> Server | None:
        """The same in C++, compiled here; `None` where there is no compiler or no gRPC for it."""
        if NATIVE not in self._running:
            program = self.directory / "noop-server"
            if not compiled(NOOP_SOURCE, program):
                return None
            self._running[NATIVE] = self._start("noop-native", [], program=[program])
        return self._running[NATIVE]

    def service(self, shape: Shape) -> Server:
        """The service in this shape."""
        if shape not in self._running:
            self._running[shape] = self.fresh(shape)
        return self._running[shape]

    def fresh(self, shape: Shape) -> Server:
        """One more of this shape, that nothing has been sent to."""
        module = ["extproc", "serve"] if shape.watched else ["tests.bench.unwatched"]
        arguments = [*module, f"--policy={self.policy}", "--admin=127.0.0.1:0", "--drain-wait-ms=0"]
        if shape.shared_ledger:
            ledger = self._stack.enter_context(ValkeyServer())
            arguments.append(f"--ledger={ledger.url}")
        environment = {}
        if shape.traced:
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{self._collector_address()}"
        return self._start(
            "service", arguments, socket_flag="--listen=", workers=shape.workers, environment=environment
        )

    def _start(
        self,
        name: str,
        arguments: list[str],
        *,
        socket_flag: str = "",
        workers: int = 1,
        environment: dict[str, str] | None = None,
        program: Sequence[str | Path] = (sys.executable, "-m"),
    ) -> Server:
        return self._stack.enter_context(
            running(
                self.directory,
                name,
                arguments,
                program=program,
                socket_flag=socket_flag,
                workers=workers,
                pinned=self.cores.server,
                environment=environment,
            )
        )

    def _collector_address(self) -> str:
        """A collector in a process of its own, which throws away what it gets."""
        if self._collector is None:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.collector"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._stack.callback(process.communicate)
            self._stack.callback(process.kill)
            assert process.stdout is not None
            self._collector = process.stdout.readline().strip()
        return self._collector
