"""`make bench`: what one exchange costs, beside a bare no-op ext_proc server in the same run.

Every figure is a ratio to the floor of its own round, because speeds of shared machines are not comparable
and ratios are. Results go to `bench-results/` as JSON and as a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import uvloop
from grpc import aio
from rich.console import Console

from tests.bench.envoy_side import EnvoySide, access_log_message, body_message, chat_body, head_message
from tests.bench.loads import Exchange, OpenLoop, chats, open_loop, open_streams
from tests.bench.processes import Server, running
from tests.bench.prompts import prompt, write_policy

RESULTS = Path("bench-results")
PACKAGES = ("grpcio", "xds-protos", "tokenizers", "tiktoken", "orjson", "uvloop", "protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One measured round: server CPU per exchange, decision latency, and rate."""

    cpu_us: float
    p50_us: float
    p95_us: float
    per_s: float


async def measure(
    server: Server, exchange: Callable[[EnvoySide, int], Awaitable[int]], *, count: int, at_once: int
) -> Round:
    """`count` exchanges, `at_once` at a time, after a warm-up of a tenth."""
    side = EnvoySide(server.target)
    await side.ready()

    async def work(start: int, number: int) -> list[int]:
        return [await exchange(side, start + each) for each in range(number)]

    each = count // at_once
    await asyncio.gather(*(work(worker * each, each // 10 + 1) for worker in range(at_once)))
    cpu_s, started = server.cpu_s(), time.perf_counter()
    latencies = await asyncio.gather(*(work(worker * each, each) for worker in range(at_once)))
    elapsed_s, used_s = time.perf_counter() - started, server.cpu_s() - cpu_s
    await side.close()
    flat = sorted(latency for one in latencies for latency in one)
    return Round(
        cpu_us=used_s / len(flat) * 1e6,
        p50_us=statistics.median(flat),
        p95_us=flat[int(len(flat) * 0.95)],
        per_s=len(flat) / elapsed_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is sent. `texts` are cycled through; `log` sends each admitted request's access-log record."""

    name: str
    texts: tuple[str, ...]
    count: int
    tenant: str = "acme"
    log: bool = False
    unique: bool = False
    status: int | None = None

    def exchange(self) -> Callable[[EnvoySide, int], Awaitable[int]]:
        """One exchange of this scenario, by its number."""
        bodies = [body_message(chat_body(text)) for text in self.texts]
        heads = [head_message(len(body), tenant=self.tenant) for body in bodies]

        async def run(side: EnvoySide, number: int) -> int:
            body = bodies[number % len(bodies)]
            if self.unique:
                body = body_message(chat_body(f"{number} {time.monotonic_ns()} {self.texts[0]}"))
            done = await side.exchange(heads[number % len(heads)], body)
            if self.log and (record := access_log_message(done.answer, output_tokens=50)) is not None:
                await side.log(record)
            return done.decision_us

        return run


def scenarios(scale: float) -> list[Scenario]:
    """Everything that is measured, from the common case to the extremes."""
    chat = tuple(prompt(290, seed=seed) for seed in range(16))

    def count(number: int) -> int:
        return max(16, int(number * scale))

    return [
        Scenario(name="chat 300 tokens, cached", texts=chat, count=count(6000)),
        Scenario(name="chat 300 tokens, cached, with access log", texts=chat, count=count(6000), log=True),
        Scenario(name="chat 300 tokens, never seen", texts=chat[:1], count=count(4000), unique=True),
        Scenario(name="refusal (tenant over its rate)", texts=chat, count=count(6000), tenant="pauper"),
        Scenario(name="8k tokens, never seen", texts=(prompt(8_000),), count=count(600), unique=True),
        Scenario(name="75k tokens, never seen", texts=(prompt(75_000),), count=count(120), unique=True),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds per scenario; each has a floor of its own"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the exchanges to run, such as 0.02"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as name:
        results = [
            compare(scenario, Path(name), rounds=options.rounds, console=console)
            for scenario in scenarios(options.scale)
        ]
        measures = targets(results) + loads(Path(name), scale=options.scale, console=console)
    options.output.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "scenarios": results, "targets": measures}
    (options.output / "exchange.json").write_text(json.dumps(document, indent=2) + "\n")
    table = f"{markdown(results)}\n{targets_markdown(measures)}"
    (options.output / "exchange.md").write_text(table)
    print(table)


def compare(scenario: Scenario, directory: Path, *, rounds: int, console: Console) -> dict[str, Any]:
    """Floor and service in turn, `rounds` times; the service keeps running, so that its caches are warm."""
    policy = write_policy(directory)
    serve = [
        "extproc",
        "serve",
        f"--policy={policy}",
        "--admin=127.0.0.1:0",
        "--drain-wait-ms=0",
    ]
    exchange = scenario.exchange()
    at_once = 8 if scenario.count >= 1000 else 2
    ratios: list[float] = []
    ours: list[Round] = []
    floors: list[Round] = []
    with (
        running(directory, "noop", ["tests.bench.noop_server"]) as floor,
        running(directory, "extproc", serve, socket_flag="--listen=") as service,
    ):
        for number in range(rounds):
            console.print(f"[dim]{scenario.name}: round {number + 1} of {rounds}[/dim]")
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                floors.append(runner.run(measure(floor, exchange, count=scenario.count, at_once=at_once)))
                ours.append(runner.run(measure(service, exchange, count=scenario.count, at_once=at_once)))
            ratios.append(ours[-1].cpu_us / max(floors[-1].cpu_us, 1e-9))
        peak_mb = service.peak_mb()
    middle = sorted(ours, key=lambda one: one.cpu_us)[len(ours) // 2]
    return {
        "scenario": scenario.name,
        "cpu_us": round(middle.cpu_us),
        "floor_cpu_us": round(statistics.median(one.cpu_us for one in floors)),
        "ratio_min": round(min(ratios), 2),
        "ratio_median": round(statistics.median(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        "decision_p50_us": round(middle.p50_us),
        "decision_p95_us": round(middle.p95_us),
        "floor_p50_us": round(statistics.median(one.p50_us for one in floors)),
        "per_core_s": round(1e6 / middle.cpu_us, 1),
        "peak_mb": round(peak_mb),
    }


def targets(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets that the scenarios answer."""
    by_name = {one["scenario"]: one for one in results}
    chat, refusal = by_name["chat 300 tokens, cached"], by_name["refusal (tenant over its rate)"]
    long = by_name["75k tokens, never seen"]
    return [
        target("CPU per admitted cached 300-token chat / no-op ext_proc", chat["ratio_median"], most=2.0),
        target("CPU per refusal / CPU per admission", refusal["cpu_us"] / chat["cpu_us"], most=0.7),
        target("75k-token prompts, requests/s per core", long["per_core_s"], least=60),
    ]


def target(
    name: str, value: float, *, most: float | None = None, least: float | None = None
) -> dict[str, Any]:
    """One measure beside what it should be."""
    met = (most is None or value <= most) and (least is None or value >= least)
    wanted = f"<= {most:g}" if most is not None else f">= {least:g}"
    return {"measure": name, "target": wanted, "measured": round(value, 2), "met": met}


def loads(directory: Path, *, scale: float, console: Console) -> list[dict[str, Any]]:
    """What only arrivals on a clock and many open streams can show."""
    serve = [
        "extproc",
        "serve",
        f"--policy={directory / 'policy.yaml'}",
        "--admin=127.0.0.1:0",
        "--drain-wait-ms=0",
    ]
    seconds = max(1.0, 10 * scale)
    streams = max(100, int(10_000 * scale))
    texts = tuple(prompt(190, seed=seed) for seed in range(64))

    async def steady(server: Server, exchange: Exchange, rate_per_s: int) -> OpenLoop:
        return await open_loop(server, exchange, rate_per_s=rate_per_s, seconds=seconds)

    async def beside_documents(server: Server) -> OpenLoop:
        side = EnvoySide(server.target)
        await side.ready()
        feeding = asyncio.create_task(documents(side, prompt(100_000)))
        try:
            return await steady(server, chats(texts), 100)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with running(directory, "loads", serve, socket_flag="--listen=") as server:
            console.print("[dim]open loop: 500 requests/s of 200 + 100 tokens, with access logs[/dim]")
            busy = runner.run(steady(server, chats(texts, log=True), 500))
            console.print("[dim]interactive alone, then beside 100k-token documents[/dim]")
            alone = runner.run(steady(server, chats(texts), 100))
            crowded = runner.run(beside_documents(server))
        with running(directory, "streams", serve, socket_flag="--listen=") as server:
            console.print(f"[dim]{streams} open streams[/dim]")
            kilobytes = runner.run(open_streams(server, texts[0], streams))
    return [
        target("cores at 500 requests/s of 200/100 tokens, access logs settled", busy.cores, most=0.3),
        target("P95 there, due time to end of exchange, ms", busy.quantile_us(0.95) / 1000, most=4),
        target(
            "p99 of interactive exchanges beside 100k-token bodies / without",
            crowded.quantile_us(0.99) / alone.quantile_us(0.99),
            most=2,
        ),
        target(f"memory per open stream at {streams:,}, KB", kilobytes, most=40),
    ]


async def documents(side: EnvoySide, text: str) -> None:
    """Ten documents a second, each one new to every cache, until cancelled."""
    number = 0
    running: set[asyncio.Task[object]] = set()
    while True:
        number += 1
        body = body_message(chat_body(f"{number} {time.monotonic_ns()} {text}"))
        task = asyncio.create_task(_quietly(side, head_message(len(body)), body))
        running.add(task)
        task.add_done_callback(running.discard)
        await asyncio.sleep(0.1)


async def _quietly(side: EnvoySide, head: bytes, body: bytes) -> object:
    try:
        return await side.exchange(head, body)
    except aio.AioRpcError:
        return None


def targets_markdown(measures: list[dict[str, Any]]) -> str:
    """The targets as a table."""
    lines = ["| measure | target | measured | met |", "|---|---|---|---|"]
    lines.extend(
        f"| {one['measure']} | {one['target']} | {one['measured']:g} | {'yes' if one['met'] else 'no'} |"
        for one in measures
    )
    return "\n".join(lines) + "\n"


def markdown(results: list[dict[str, Any]]) -> str:
    """The results as a table."""
    lines = [
        "| scenario | CPU per exchange | no-op ext_proc | ratio (min-max) | decision p50 / p95 | per core and s |",
        "|---|---|---|---|---|---|",
    ]
    lines.extend(
        f"| {one['scenario']} | {one['cpu_us']} µs | {one['floor_cpu_us']} µs | "
        f"{one['ratio_median']} ({one['ratio_min']}-{one['ratio_max']}) | "
        f"{one['decision_p50_us'] / 1000:.2f} / {one['decision_p95_us'] / 1000:.2f} ms | {one['per_core_s']} |"
        for one in results
    )
    return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    """What it ran on: class and versions, no names."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {package: metadata.version(package) for package in PACKAGES},
    }


if __name__ == "__main__":
    main()
