"""The whole service as users run it: `extproc serve` as a process, and the real Envoy in front of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from extproc.adapters.envoy_bootstrap import GatewayOptions, PipeAddress, SocketAddress, bootstrap
from extproc.adapters.policy_file import load_policy
from extproc.supervisor.supervise import listen_address
from tests.support import child
from tests.support.envoy_binary import EnvoyProcess

START_TIMEOUT_S = 60
IDLE_TIMEOUT_S = 15
LOOPBACK = "127.0.0.1"


@dataclass(kw_only=True)
class Gateway:
    """A running gateway. `url` is Envoy's listener, `admin_url` the service's admin port."""

    directory: Path
    url: str
    admin_url: str
    envoy: EnvoyProcess
    service: Service

    def state(self) -> dict[str, Any]:
        """What is held right now."""
        state: dict[str, Any] = json.loads(self.get("/state"))
        return state

    def get(self, path: str) -> str:
        """The admin port's answer."""
        with urllib.request.urlopen(self.admin_url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def await_idle(self) -> dict[str, Any]:
        """The idle rule: once all streams are closed, nothing is held. Fails when it is not so in time."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            state = self.state()
            if state["idle"] and state["service"]["open_streams"] == 0:
                return state
            assert time.monotonic() < deadline, f"not idle: {state}"
            time.sleep(0.05)

    def access_log(self) -> list[dict[str, Any]]:
        """Envoy's own log of requests, oldest first."""
        return self.envoy.access_log()

    def logged(self, request_id: str) -> dict[str, Any]:
        """See `EnvoyProcess.logged`."""
        return self.envoy.logged(request_id)


@dataclass(kw_only=True)
class Service:
    """`extproc serve` as a child process. It can be killed and started again on the same addresses."""

    arguments: list[str]
    log: Path
    ready_url: str
    process: subprocess.Popen[str] | None = field(default=None)

    def start(self) -> None:
        """Start, and wait until it is ready."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "extproc", "serve", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, f"the service ended:\n{self.log.read_text()[-2000:]}"
            try:
                with urllib.request.urlopen(self.ready_url, timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            assert time.monotonic() < deadline, f"not ready:\n{self.log.read_text()[-2000:]}"
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process is not None
        return self.process.pid

    def reload(self) -> None:
        """Have the policy file read again."""
        os.kill(self.pid, signal.SIGHUP)

    def kill(self) -> None:
        """As a crash would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, and wait."""
        if self.process is not None:
            child.stop(self.process)
            self.process = None


@contextmanager
def running_gateway(
    directory: Path,
    policy_text: str,
    *,
    drain_wait_ms: int = 0,
    arguments: tuple[str, ...] = (),
    workers: int = 1,
    **options: Any,
) -> Iterator[Gateway]:
    """Run the service with this policy, and an Envoy with the configuration generated from it and `options`."""
    directory.mkdir(parents=True, exist_ok=True)
    policy_path = directory / "policy.yaml"
    policy_path.write_text(policy_text)
    # Socket paths are short by law (107 bytes); pytest's directories are not.
    listen = f"unix:/tmp/extproc-{os.getpid()}-{time.monotonic_ns()}.sock"
    sockets = [listen] if workers == 1 else [listen_address(listen, worker) for worker in range(workers)]
    (admin_port,) = child.free_ports(1)
    admin_url = f"http://{LOOPBACK}:{admin_port}"
    service = Service(
        arguments=[
            f"--policy={policy_path}",
            f"--listen={listen}",
            f"--workers={workers}",
            f"--admin={LOOPBACK}:{admin_port}",
            f"--drain-wait-ms={drain_wait_ms}",
            *arguments,
        ],
        log=directory / "service.log",
        ready_url=f"{admin_url}/readyz",
    )
    (listen_port,) = child.free_ports(1)
    config = bootstrap(
        load_policy(policy_path),
        GatewayOptions(
            extproc=tuple(PipeAddress(path=path.removeprefix("unix:")) for path in sockets),
            listen=SocketAddress(host=LOOPBACK, port=listen_port),
            trust_identity_header=True,  # the test's client plays the trusted proxy
            **options,
        ),
    )
    with ExitStack() as stack:
        for path in sockets:
            stack.callback(Path(path.removeprefix("unix:")).unlink, missing_ok=True)
        service.start()
        stack.callback(service.stop)
        envoy = stack.enter_context(
            EnvoyProcess(
                config_text=config,
                directory=directory / "envoy",
                # Envoy writes its log every ten seconds unless told otherwise.
                arguments=("--file-flush-interval-msec", "50"),
            )
        )
        gateway = Gateway(
            directory=directory,
            url=f"http://{LOOPBACK}:{listen_port}",
            admin_url=admin_url,
            envoy=envoy,
            service=service,
        )
        await_healthy(envoy, workers)
        yield gateway


def await_healthy(envoy: EnvoyProcess, workers: int = 1) -> None:
    """Wait until Envoy's health check has found every worker."""
    deadline = time.monotonic() + START_TIMEOUT_S
    name = "cluster.extproc.membership_healthy"
    while envoy.stats(name).get(name) != workers:
        assert time.monotonic() < deadline, f"Envoy did not find {workers} healthy workers"
        time.sleep(0.05)
