"""What every peer is to the benchmark: something to install, something to start, and limits to start it with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".cache" / "peers"
START_TIMEOUT_S = 600  # vLLM needs half a minute on a quiet machine
MODEL = "default"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class NotMeasuredError(Exception):
    """This peer cannot be measured so; the message says why, and goes into the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The limits to start with, and the engine behind: `None` is a limit that is never reached."""

    upstream_url: str
    directory: Path
    inflight_requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def admitted(self) -> bool:
        """Whether it is an answer. An engine may say 200 and put the refusal into the first event."""
        return self.status == 200 and b'"error"' not in self.body[:2_000]


def no_headers(_client: str) -> dict[str, str]:
    """For peers that do not know their clients."""
    return {}


def no_gauges() -> dict[str, float]:
    """For peers that tell nobody what they hold."""
    return {}


def no_count(_reply: Reply, _body: Mapping[str, Any]) -> int | None:
    """For peers that count no input tokens before they let a request in."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A peer at work.

    `parts` are the roots of its process trees by name: all of them are its cost. `headers` tell it which client is
    asking: limits are per client where the peer knows clients. `gauges` is what it says it holds; all zero when idle.
    `counted` is the input tokens that it took a request for before it let it in. A peer with its `own_engine` has no
    upstream.
    """

    url: str
    parts: Mapping[str, int]
    headers: Callable[[str], dict[str, str]] = no_headers
    gauges: Callable[[], dict[str, float]] = no_gauges
    counted: Callable[[Reply, Mapping[str, Any]], int | None] = no_count
    own_engine: bool = False

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by part."""
        return {name: tree_cpu_s(pid) for name, pid in self.parts.items()}

    def peak_mb(self) -> float:
        """The most resident memory of each process, added up."""
        return sum(peak_mb(pid) for root in self.parts.values() for pid in process_tree(root))


class Peer(Protocol):
    """One row of the table."""

    name: str
    setting: str
    """The limits it offers, as documented, in a few words."""

    def version(self) -> str:
        """Installs it if need be. Raises NotMeasuredError."""

    def run(self, scene: Scene) -> AbstractContextManager[Running]:
        """Start it in front of `scene.upstream_url`. Raises NotMeasuredError if it has no such limit."""


def process_tree(root: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((directory / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):  # it ended meanwhile
            continue
        children.setdefault(parent, []).append(int(directory.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def tree_cpu_s(root: int) -> float:
    """User and system time of the tree, with what its ended and awaited children used."""
    ticks = 0
    for pid in process_tree(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks += sum(int(value) for value in fields[11:15])
    return ticks / TICKS_PER_S


def others_cpu_s() -> float:
    """What the machine has spent on everybody else's work so far: all that is not this process or its children."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / TICKS_PER_S - tree_cpu_s(os.getpid())


def peak_mb(pid: int) -> float:
    """The most resident memory that the process ever had; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def installed(name: str, package: str, *requirements: str, prune: tuple[str, ...] = ()) -> str:
    """The version of `package` in the peer's own environment, made now if it is not there.

    Raises NotMeasuredError with pip's last words. An environment elsewhere can be linked to `.cache/peers/NAME`.
    """
    python = program(name, "python")
    ask = [python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    if not Path(python).exists() or subprocess.run(ask, capture_output=True).returncode:
        HOME.mkdir(parents=True, exist_ok=True)
        steps = [
            [sys.executable, "-m", "venv", str(HOME / name)],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements],
        ]
        if prune:
            steps.append([python, "-m", "pip", "uninstall", "--quiet", "--yes", *prune])
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                shutil.rmtree(HOME / name, ignore_errors=True)
                said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
                raise NotMeasuredError(f"does not install here: {' '.join(said[-2:])[:300]}")
    found = subprocess.run(ask, capture_output=True, text=True)
    if found.returncode:
        raise NotMeasuredError(f"installs, but {package} is not in it: {found.stderr.strip()[-200:]}")
    version: str = found.stdout.strip()
    return version


def program(name: str, file: str) -> str:
    """A program of the peer's own environment."""
    return str(HOME / name / "bin" / file)


@contextmanager
def process(
    arguments: list[str], *, log: Path, ready_url: str, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run a peer's server until the block ends; its pid. Raises NotMeasuredError if it does not get ready."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(env or {}),
            start_new_session=True,
        )
    try:
        _await_ready(child, ready_url, log)
        yield child.pid
    finally:
        tree = process_tree(child.pid)
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pid in tree[1:]:
            _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _await_ready(child: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise NotMeasuredError(f"ended while starting: {' '.join(last)[-300:]}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise NotMeasuredError(f"was not ready within {START_TIMEOUT_S} s")


def scrape(url: str, *names: str) -> dict[str, float]:
    """The samples of a Prometheus page whose metric is one of `names`, added up over their labels."""
    with urllib.request.urlopen(url, timeout=3) as answer:
        return read_metrics(answer.read().decode(), *names)


def read_metrics(page: str, *names: str) -> dict[str, float]:
    """As `scrape`, from the page's text; a metric without samples is 0."""
    found = dict.fromkeys(names, 0.0)
    for line in page.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in found:
            found[name] += float(line.rsplit(" ", 1)[1])
    return found
