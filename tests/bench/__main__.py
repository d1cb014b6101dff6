"""`make bench`: what one exchange costs, beside a bare no-op ext_proc server in the same run.

Every figure is a ratio to the floor of its own round, because speeds of shared machines are not comparable
and ratios are. Results go to `bench-results/` as JSON and as Markdown.

- `scenarios`: what is compared with the floor, and how (`requests`, `rounds`, `services`, `processes`)
- `native`, `through_envoy`: the same with a client that costs little, without and with Envoy (`h2load`)
- `neighbours`, `disturb`: refusal storm, long documents beside chats, ten thousand open streams
- `targets`, `report`: what should be, and what is

The floor is what `grpc.aio` itself takes. Where there is a C++ compiler with gRPC (Debian: g++ libgrpc++-dev
pkg-config), a no-op in C++ is beside it; and what Envoy and the filter take is in `through_envoy`.

Beside it: `tokens_bench` and `ledger_bench`, each about one part, and `hot_path`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench import h2load, native, neighbours, report, scenarios, targets, through_envoy
from tests.bench.processes import cores
from tests.bench.prompts import MODEL_VARIABLE, write_policy
from tests.bench.services import Services
from tests.support.marked import write_marked

RESULTS = Path("bench-results")
README = Path("README.md")
RESULTS_PAGE = Path("tests/bench/RESULTS.md")
NEIGHBOUR_SECONDS = 8


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of everything; each has a floor of its own"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the exchanges, such as 0.1")
    parser.add_argument(
        "--only", default="", help="only scenarios whose name contains this, and nothing else"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--publish", action="store_true", help=f"write it into {RESULTS_PAGE} and the README")
    parser.add_argument("--model", type=Path, help="directory of another tokenizer than Qwen3's")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    options = options_of()
    if options.model is not None:
        os.environ[MODEL_VARIABLE] = str(options.model)
    options.output.mkdir(parents=True, exist_ok=True)
    document = measured(options, Console(stderr=True))
    (options.output / "exchange.json").write_text(json.dumps(document, indent=2) + "\n")
    text = (
        report.table(report.SCENARIOS, document["scenarios"]) if options.only else report.markdown(document)
    )
    (options.output / "exchange.md").write_text(text)
    print(text)
    if options.publish and not options.only:
        write_marked(RESULTS_PAGE, "measured", text)
        short = f"{report.where(document)}\n{report.table(report.TARGETS, document['targets'])}"
        write_marked(README, "measured", short)


def measured(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything that was asked for."""
    where, load_before = cores(), os.getloadavg()[0]
    if where.client:
        os.sched_setaffinity(0, where.client)
    rounds, scale = options.rounds, options.scale
    seconds = max(0.5, NEIGHBOUR_SECONDS * scale)

    def said(what: str, part: Callable[[], Any]) -> Any:
        console.print(f"[dim]{what}[/dim]")
        return part()

    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as name:
        directory = Path(name)
        policy = write_policy(directory)
        document: dict[str, Any] = {
            "machine": report.machine(where, load_before=load_before),
            "rounds": rounds,
            "scale": scale,
        }
        with Services(directory=directory, policy=policy, cores=where) as services:
            document["scenarios"] = [
                said(one.name, partial(scenarios.compare, one, services, rounds=rounds, scale=scale))
                for one in scenarios.SCENARIOS
                if options.only in one.name
            ]
            if options.only:
                return document
            document["native"] = said(
                "the same with h2load",
                lambda: _with_h2load(lambda: native.measure(services, directory, rounds=rounds, scale=scale)),
            )
            document["storm"] = said(
                "refusal storm", lambda: neighbours.storm(services, rounds=rounds, seconds=seconds)
            )
            document["documents"] = said(
                "long documents", lambda: neighbours.documents(services, rounds=rounds, seconds=seconds)
            )
            document["hostile"] = said(
                "hostile prompts", lambda: neighbours.hostile(services, rounds=rounds, seconds=seconds)
            )
            document["open_streams"] = said(
                "open streams", lambda: neighbours.open_streams(services, scale=scale)
            )
        document["through_envoy"] = said(
            "through Envoy",
            lambda: _with_h2load(
                lambda: through_envoy.measure(directory, policy, where, rounds=rounds, scale=scale)
            ),
        )
    document["targets"] = targets.judged(document)
    return document


def _with_h2load(part: Callable[[], Any]) -> Any:
    return part() if h2load.installed() else "h2load (Debian: nghttp2-client) is not installed"


if __name__ == "__main__":
    main()
