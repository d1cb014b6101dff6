"""The floor and the service driven by h2load: throughput of a busy core, and latency on a clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import h2load
from tests.bench.envoy_side import PROCESS, await_listening, body_message, chat_body, head_message
from tests.bench.processes import Server
from tests.bench.prompts import prompt
from tests.bench.scenarios import spread
from tests.bench.services import AS_IT_COMES, Services

HEADERS = {"content-type": "application/grpc", "te": "trailers"}
RATES_PER_S = (200, 500)
FLAT_OUT = 4000
SECONDS = 5


def measure(services: Services, directory: Path, *, rounds: int, scale: float) -> list[dict[str, Any]]:
    """A row per load: all servers in turn, the no-op in C++ among them where it can be made."""
    chat = chat_body(prompt(290))
    body = h2load.grpc_body((head_message(len(chat)), body_message(chat)))

    def run(server: Server, rate_per_s: float | None) -> tuple[h2load.Answered, float, float]:
        count = max(50, int((FLAT_OUT if rate_per_s is None else rate_per_s * SECONDS) * scale))
        begun_s = server.cpu_s()
        done = h2load.load(
            directory,
            f"http://extproc{PROCESS}",
            body=body,
            headers=HEADERS,
            count=count,
            rate_per_s=rate_per_s,
            at_once=16 if rate_per_s is None else 1000,
            unix_socket=server.target.removeprefix("unix:"),
            core=services.cores.one_for_client(),
        )
        used_s = server.cpu_s() - begun_s
        return done, used_s / count * 1e6, used_s / count * done.per_s

    def rows() -> Iterator[dict[str, Any]]:
        for rate_per_s in (None, *RATES_PER_S):
            taken = [
                (run(services.floor(), rate_per_s), run(services.service(AS_IT_COMES), rate_per_s))
                for _ in range(rounds)
            ]
            native = [run(native_floor, rate_per_s)[1] for _ in range(rounds)] if native_floor else None
            yield {
                "load": "flat out, 16 at once" if rate_per_s is None else f"{rate_per_s}/s",
                "cpu_us": spread(ours[1] for _, ours in taken),
                "floor_cpu_us": spread(floor[1] for floor, _ in taken),
                "native_floor_cpu_us": spread(native) if native else None,
                "ratio": spread(ours[1] / floor[1] for floor, ours in taken),
                "cores": spread(ours[2] for _, ours in taken),
                "per_s": spread(ours[0].per_s for _, ours in taken),
                "floor_per_s": spread(floor[0].per_s for floor, _ in taken),
                "p50_us": spread(ours[0].quantile_us(0.5) for _, ours in taken),
                "p95_us": spread(ours[0].quantile_us(0.95) for _, ours in taken),
                "p99_us": spread(ours[0].quantile_us(0.99) for _, ours in taken),
                "floor_p50_us": spread(floor[0].quantile_us(0.5) for floor, _ in taken),
                "floor_p95_us": spread(floor[0].quantile_us(0.95) for floor, _ in taken),
            }

    native_floor = services.native_floor()
    for server in (services.floor(), services.service(AS_IT_COMES), native_floor):
        if server is not None:
            await_listening(server.target)
    return list(rows())
