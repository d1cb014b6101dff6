"""Servers under measurement: child processes, with their own children, whose CPU and memory the kernel tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from extproc.supervisor.supervise import listen_address

STOP_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Who runs where: the client must not take what is measured away from the server."""

    client: frozenset[int]
    server: frozenset[int]

    def one_for_client(self) -> int | None:
        """The core of a client that is a program of its own; `None` if nothing is pinned."""
        return min(self.client) if self.client else None

    def said(self) -> str:
        """For the table."""
        if not self.client:
            return "client and servers share this machine's only core"
        return f"client on core {_listed(self.client)}, servers on core {_listed(self.server)}"


def cores() -> Cores:
    """The first core for the client and the others for the servers; with one core nothing is pinned."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < 2:
        return Cores(client=frozenset(), server=frozenset())
    return Cores(client=frozenset(every[:1]), server=frozenset(every[1:]))


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and where it listens: at `targets`, one for each of its workers."""

    process: subprocess.Popen[bytes]
    target: str
    targets: tuple[str, ...] = field(default=())

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where to send exchanges to, in turn."""
        return self.targets or (self.target,)

    def cpu_s(self) -> float:
        """User and system time so far, of all threads and of the children."""
        return sum(cpu_s(pid) for pid in self._pids())

    def peak_mb(self) -> float:
        """The most resident memory that each process had since `forget_peak`, together."""
        return sum(_status_mb(pid, "VmHWM") for pid in self._pids())

    def private_mb(self) -> float:
        """Memory of its own now, swapped out or not: what the kernel drops of program files does not count."""
        return sum(_status_mb(pid, "RssAnon") + _status_mb(pid, "VmSwap") for pid in self._pids())

    def forget_peak(self) -> None:
        """Let `peak_mb` begin anew."""
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def _pids(self) -> list[int]:
        return family(self.process.pid)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found.extend(family(int(child)))
    return found


def cpu_s(pid: int) -> float:
    """User and system time of one process so far, to the nanosecond, threads that have ended included."""
    clock = (~pid << 3) | 2  # how Linux numbers the clocks of other processes: clock_getcpuclockid(3)
    return time.clock_gettime_ns(clock) / 1e9


def _status_mb(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"the kernel tells no {name}")


def pin(pid: int, numbers: frozenset[int]) -> None:
    """Put a process that runs already, with all its threads, on these cores; on none: leave it where it is."""
    if numbers:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), numbers)


@contextmanager
def running(
    directory: Path,
    name: str,
    arguments: list[str],
    *,
    program: Sequence[str | Path] = (sys.executable, "-m"),
    socket_flag: str = "",
    workers: int = 1,
    pinned: frozenset[int] = frozenset(),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run `python -m ARGUMENTS`, or another program, listening on a Unix socket of its own until the block ends."""
    socket_path = directory / f"{name}-{time.monotonic_ns()}.sock"
    target = f"unix:{socket_path}"
    more = [] if workers == 1 else [f"--workers={workers}"]
    targets = (target,) if workers == 1 else tuple(listen_address(target, each) for each in range(workers))
    with (directory / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*program, *arguments, *more, f"{socket_flag}{target}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
    if pinned:
        os.sched_setaffinity(process.pid, pinned)  # before it has threads or children: they inherit it
    try:
        yield Server(process, target, targets)
    finally:
        if workers > 1:
            process.send_signal(signal.SIGTERM)  # it ends its workers
        else:
            process.kill()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
