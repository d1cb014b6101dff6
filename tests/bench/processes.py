"""Servers under measurement: child processes whose CPU and memory the kernel tells."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and where it listens."""

    process: subprocess.Popen[bytes]
    target: str

    def cpu_s(self) -> float:
        """User and system time so far, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def peak_mb(self) -> float:
        """The most resident memory it ever had."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise LookupError("the kernel tells no VmHWM")

    def resident_mb(self) -> float:
        """Resident memory now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise LookupError("the kernel tells no VmRSS")


@contextmanager
def running(directory: Path, name: str, arguments: list[str], *, socket_flag: str = "") -> Iterator[Server]:
    """Run `python -m ARGUMENTS` listening on a Unix socket of its own, until the block ends."""
    socket_path = directory / f"{name}-{time.monotonic_ns()}.sock"
    target = f"unix:{socket_path}"
    with (directory / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments, f"{socket_flag}{target}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield Server(process, target)
    finally:
        process.kill()
        process.wait()
