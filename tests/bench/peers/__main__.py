"""Peers side by side: same upstream, same requests, same machine, one at a time.

    python -m tests.bench.peers [--only NAME ...] [--rounds 3] [--seconds 6] [--output DIR] [--readme]

Each peer is installed, pinned, into an environment of its own under `.cache/peers/`. A peer that does not install, or
has no such limit, is a row that says so. Figures go to `OUTPUT/peers.json` and, as tables, to `OUTPUT/peers.md`;
`--readme` also puts the tables into the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.peers import client, measures, table
from tests.bench.peers.litellm import LiteLLM
from tests.bench.peers.ours import Ours
from tests.bench.peers.peer import NotMeasuredError, Peer, Running, Scene
from tests.bench.peers.prompts import OUTPUT_TOKENS, PROMPT_TOKENS, usual
from tests.bench.peers.routers import SGLANG_ROUTER, VLLM_ROUTER
from tests.bench.peers.upstream import Upstream, running_upstream
from tests.bench.peers.vllm import Vllm
from tests.support.llama_cpp import LlamaServer
from tests.support.marked import write_marked
from tests.support.qwen3 import qwen3_dir
from tests.support.tiny_model import tiny_model

PEERS: tuple[Peer, ...] = (Ours(), LiteLLM(), VLLM_ROUTER, SGLANG_ROUTER, Vllm())
README = Path(__file__).with_name("README.md")
DISTINCT_BODIES = 256
ENGINE = "vllm"
ENGINE_IS_THE_TRUTH = "its own count is what others are held to"
ENGINE_HAS_NO_COST = "engine and limiter in one: there is no upstream to compare it with"


class Bench:
    """One run: its upstream, its directory, and the figures so far."""

    def __init__(
        self, upstream: Upstream, directory: Path, output: Path, about: dict[str, Any], console: Console
    ) -> None:
        self.upstream = upstream
        self.output = output
        self.about = about
        self.directory = directory
        self.console = console
        self.models = qwen3_dir(directory / "models")
        self.results: dict[str, dict[str, Any]] = {}

    def note(self, peer: Peer, measure: str, what: Callable[[], Any]) -> None:
        """Measure, and keep the figures or the reason why there are none."""
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')} {peer.name}: {measure}[/dim]")
        row = self.results[peer.name]
        try:
            figures = what()
        except NotMeasuredError as error:
            self.console.print(f"{peer.name}: {measure}: {error}")
            figures = {"not_measured": str(error)}
        except Exception as error:  # one peer's surprise must not cost the others their figures
            self.console.print_exception()
            figures = {"not_measured": f"failed: {type(error).__name__}: {error}"[:300]}
        row[measure] = figures
        self.keep()

    def keep(self) -> None:
        """Write down what there is so far: a run that is cut short has measured something too."""
        figures = {"about": self.about, "peers": self.results}
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "peers.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")

    def scene(self, peer: Peer, name: str, **limits: Any) -> Scene:
        """Limits, in a directory of their own."""
        options = {"upstream_url": self.upstream.url} | limits
        return Scene(directory=self.directory / f"{peer.name}-{name}", **options)

    def install(self, peers: list[Peer]) -> list[Peer]:
        """Those that are there afterwards."""
        there: list[Peer] = []
        for peer in peers:
            self.results[peer.name] = {"setting": peer.setting}
            self.note(peer, "version", peer.version)
            if isinstance(self.results[peer.name]["version"], str):
                there.append(peer)
        return there

    def costs(self, peers: list[Peer], *, rounds: int, seconds: float) -> None:
        """Throughput and added latency, all up and one after another in each round."""
        bodies = [client.encode(usual(self.models, seed=seed)) for seed in range(DISTINCT_BODIES)]
        direct = Running(url=self.upstream.url, parts={})
        with ExitStack() as stack:
            up: dict[str, Running] = {}
            for peer in peers:
                if peer.name == ENGINE:
                    self.results[peer.name]["costs"] = {"not_measured": ENGINE_HAS_NO_COST}
                    continue

                def start(peer: Peer = peer) -> dict[str, Any]:
                    up[peer.name] = stack.enter_context(peer.run(self.scene(peer, "wide")))
                    # Connections, caches and lazy imports are nobody's cost per request.
                    client.warm_up(up[peer.name], bodies, directory=self.directory)
                    return {"rounds": []}

                self.note(peer, "costs", start)
            for number in range(1, rounds + 1):
                for peer in peers:
                    if "rounds" not in self.results[peer.name]["costs"]:
                        continue
                    running = up[peer.name]

                    def one(running: Running = running) -> dict[str, Any]:
                        return measures.throughput(
                            running, bodies, seconds=seconds, directory=self.directory
                        ) | measures.latency(running, direct, bodies, seconds=seconds)

                    self.note(peer, f"round {number}", one)
                    figures = self.results[peer.name].pop(f"round {number}")
                    self.results[peer.name]["costs"]["rounds"].append(figures)
            for name, running in up.items():
                self.results[name]["peak_mb"] = round(running.peak_mb())

    def limits(self, peer: Peer) -> None:
        """Refusals, over-admission and hang-ups."""

        def inflight() -> Any:
            limited = self.scene(peer, "inflight", inflight_requests=measures.INFLIGHT_LIMIT)
            with peer.run(limited) as running:
                figures = measures.requests_at_once(running, self.upstream, self.models)
                return figures | {"stream_refusal": measures.stream_refusal(running, self.models)}

        def tokens() -> Any:
            with peer.run(self.scene(peer, "tokens", tokens_per_minute=measures.BUDGET_TOKENS)) as running:
                return measures.tokens_at_once(running, self.models)

        def hang_ups() -> Any:
            with peer.run(self.scene(peer, "hang-ups", inflight_requests=measures.HANGING_UP)) as running:
                return measures.hang_ups(running, self.upstream, self.models)

        self.note(peer, "inflight", inflight)
        self.note(peer, "tokens", tokens)
        self.note(peer, "hang_ups", hang_ups)

    def counts(self, peers: list[Peer]) -> None:
        """Counted tokens beside those of a real engine with the same vocabulary."""
        model = tiny_model(self.models, self.directory)
        with LlamaServer(model=model, log=self.directory / "llama.log", parallel=2) as engine:
            for peer in peers:
                if peer.name == ENGINE:
                    self.results[peer.name]["counts"] = {"not_measured": ENGINE_IS_THE_TRUTH}
                    continue

                def count(peer: Peer = peer) -> Any:
                    with peer.run(
                        self.scene(
                            peer, "counts", upstream_url=engine.url, tokens_per_minute=measures.BUDGET_TOKENS
                        )
                    ) as running:
                        return measures.counts(running, self.models)

                self.note(peer, "counts", count)


def machine() -> dict[str, Any]:
    """What it ran on: class, no names."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {round(memory / 2**30)} GiB",
        "load_average_before": round(os.getloadavg()[0], 1),
        "client": "wrk" if client.has_wrk() else "this benchmark's own client, for wrk is not installed",
    }


def main() -> None:
    """Run what was asked for, and write it down."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=[peer.name for peer in PEERS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--output", type=Path, default=Path("bench-results"))
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    console = Console()
    command = f"python -m tests.bench.peers --rounds {options.rounds} --seconds {options.seconds:g}"
    about = machine() | {"command": command}
    with (
        tempfile.TemporaryDirectory(prefix="peers-") as name,
        running_upstream(prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS) as upstream,
    ):
        bench = Bench(upstream, Path(name), options.output, about, console)
        peers = bench.install([peer for peer in PEERS if not options.only or peer.name in options.only])
        started = time.monotonic()
        bench.costs(peers, rounds=options.rounds, seconds=options.seconds)
        for peer in peers:
            bench.limits(peer)
        bench.counts(peers)
        about["minutes"] = round((time.monotonic() - started) / 60, 1)
    bench.keep()
    page = table.page({"about": about, "peers": bench.results})
    (options.output / "peers.md").write_text(page)
    if options.readme:
        write_marked(README, "figures", page)
    console.print(page, markup=False, highlight=False)


if __name__ == "__main__":
    main()
