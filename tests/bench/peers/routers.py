"""vllm-router and sglang-router: one family, the same limits under the same flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.peers.peer import NotMeasuredError, Running, Scene, installed, process, program, scrape
from tests.support import child


class Router:
    """A router with its limit on requests in flight; no line, so that a refusal is a refusal."""

    setting = "for the whole router: `--max-concurrent-requests`, `--queue-size 0`; no limit on tokens"

    def __init__(
        self, name: str, requirement: str, command: tuple[str, ...], gauges: tuple[str, ...]
    ) -> None:
        self.name = name
        self._requirement = requirement
        self._command = command
        self._gauges = gauges

    def version(self) -> str:
        """Pinned, in an environment of its own."""
        return installed(self.name, self._requirement.split("==")[0], self._requirement)

    @contextmanager
    def run(self, scene: Scene) -> Iterator[Running]:
        """In front of the one upstream. Where no limit is asked for, its own default stays."""
        if scene.tokens_per_minute is not None:
            raise NotMeasuredError("it has no limit on tokens (its rate limit's tokens are requests)")
        port, metrics_port = child.free_ports(2)
        limits = (
            []
            if scene.inflight_requests is None
            else [f"--max-concurrent-requests={scene.inflight_requests}", "--queue-size=0"]
        )
        url = f"http://127.0.0.1:{port}"
        with process(
            [
                program(self.name, self._command[0]),
                *self._command[1:],
                "--host=127.0.0.1",
                f"--port={port}",
                f"--prometheus-port={metrics_port}",
                "--prometheus-host=127.0.0.1",
                "--log-level=error",
                "--worker-urls",
                scene.upstream_url,
                *limits,
            ],
            log=scene.directory / f"{self.name}.log",
            ready_url=f"{url}/v1/models",
        ) as pid:
            yield Running(
                url=url,
                parts={"router": pid},
                gauges=lambda: scrape(f"http://127.0.0.1:{metrics_port}/metrics", *self._gauges),
            )


VLLM_ROUTER = Router("vllm-router", "vllm-router==0.1.17", ("vllm-router",), ())
SGLANG_ROUTER = Router(
    "sglang-router",
    "sglang-router==0.3.2",
    ("python", "-m", "sglang_router.launch_router", "--backend=openai"),
    ("smg_http_connections_active",),
)
