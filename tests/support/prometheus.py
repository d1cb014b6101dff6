"""The real Prometheus, from Debian's package."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tests.support import child

START_TIMEOUT_S = 30


class Prometheus:
    """`with Prometheus(directory, targets, rule_files) as prometheus:` scrapes every second until the block ends."""

    def __init__(self, directory: Path, targets: list[str], rule_files: list[Path]) -> None:
        self._directory = directory
        (port,) = child.free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rule_files],
            "scrape_configs": [{"job_name": "extproc", "static_configs": [{"targets": targets}]}],
        }
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._command = [
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with (self._directory / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self._process.poll() is None, (self._directory / "prometheus.log").read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):
                    return self
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, "Prometheus was not ready in time"
                time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            child.stop(self._process)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that an expression is now. Raises `urllib.error.HTTPError` where it does not parse."""
        url = f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=10) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result

    def numbers(self, expression: str) -> list[float]:
        """The finite values that an expression has now."""
        values = [float(sample["value"][1]) for sample in self.query(expression)]
        return [value for value in values if math.isfinite(value)]

    def scrape_errors(self) -> list[str]:
        """What went wrong at the last scrape of each target; empty texts where nothing did."""
        with urllib.request.urlopen(f"{self.url}/api/v1/targets", timeout=10) as answer:
            return [str(target["lastError"]) for target in json.load(answer)["data"]["activeTargets"]]
