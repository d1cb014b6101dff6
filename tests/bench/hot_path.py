"""What one request costs, step by step, without gRPC: `python -m tests.bench.hot_path`.

A whole worker runs in this process and is fed by hand (`in_process`). First nothing is timed but the whole, by
processor time, which is the truth; then every step of `STEPS` is timed by itself (`stopwatch`), by the clock,
which slows the whole and tells where the time goes. Both in many small blocks: the median is told, and the first
decile, which is what the code costs where nobody else wanted the processor. Steps come in the order in which a
request meets them first.

`--instructions` counts instructions under callgrind instead: the same number on a busy machine as on a quiet one.
`--document` writes the tables into HOTPATH.md. `--run` only runs a scenario, for a profiler.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from extproc import app
from extproc.adapters import access_log, grpc_server
from extproc.adapters.memory_ledger import MemoryLedger
from extproc.adapters.telemetry.drift_log import DriftLog
from extproc.adapters.telemetry.metrics import Metrics
from extproc.adapters.telemetry.observers import Observers
from extproc.adapters.telemetry.recent import Recent
from extproc.adapters.telemetry.refusal_log import RefusalLog
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.dialects import openai_chat
from extproc.domain.retries import RetryBook
from extproc.driver import Driver
from extproc.exchange import machine
from extproc.exchange.machine import Exchange
from tests.bench.envoy_side import access_log_message, body_message, chat_body, head_message
from tests.bench.in_process import InProcess
from tests.bench.prompts import prompt, write_policy
from tests.bench.stopwatch import Stopwatch, overhead, timing
from tests.support.marked import write_marked
from tests.support.train_tokenizer import TOKENIZER_DIR

RESULTS = Path("bench-results")
DOCUMENT = Path(__file__).with_name("HOTPATH.md")

STREAM = "stream: its task, reading and writing"
RECORDS = "access log: its stream"

COLLECTOR = "garbage collected"

SELDOM_CALLS = 0.01
"""Per exchange. Steps that only the first requests went through are not the path."""

WARM_UP = 112
"""Exchanges before anything is timed: seven of each text, so that caches know it and retries are known as such."""

STEPS: dict[str, tuple[tuple[Any, str], ...]] = {
    "stream: what Envoy said of itself": ((grpc_server, "_said_by_envoy"),),
    "exchange and driver made": ((app.Worker, "_new_driver"),),
    "codec: protobuf to event": ((grpc_server, "event_of"),),
    "driver: events and effects": ((Driver, "receive"),),
    "machine: the law and its moves": ((Exchange, "receive"),),
    "dialect chosen": ((machine, "dialect_for"),),
    "tenant identified, lane and deadline read": (
        (machine, "identify"),
        (machine, "declared_lane"),
        (machine, "declared_deadline_ms"),
    ),
    "retry book": tuple(
        (RetryBook, name) for name in ("key", "arrived", "opened", "closed", "refused", "named_key")
    ),
    "body: JSON to values, within bounds": ((app, "read_here"),),
    "dialect: values to what is asked": ((openai_chat.DIALECT, "read"),),
    "tokens counted": ((ExactTokenCounter, "count"),),
    "plan: lane, demand, reservation": ((machine, "plan"),),
    "ledger: reserve": ((MemoryLedger, "reserve"),),
    "decision and trace context": ((Exchange, "_decision"),),
    "headers for the pool": ((machine, "accounting_headers"), (machine, "address_of")),
    "refusal worded": (
        (machine, "denial"),
        (machine, "refusal_headers"),
        (openai_chat.DIALECT, "error_body"),
    ),
    "codec: answer to protobuf": ((grpc_server, "bytes_of"),),
    "observers called": ((Observers, "decided"), (Observers, "settled")),
    "metrics": ((Metrics, "decided"), (Metrics, "settled")),
    "recent decisions": ((Recent, "decided"), (Recent, "settled")),
    "refusal and drift logs": (
        (RefusalLog, "decided"),
        (RefusalLog, "settled"),
        (DriftLog, "decided"),
        (DriftLog, "settled"),
    ),
    "ledger: release": ((MemoryLedger, "release"),),
    "access log: record read": ((access_log, "settled_of"),),
    "access log: usage settled": ((app, "settle"),),
    "ledger: book": ((MemoryLedger, "book"),),
}
"""Each step's functions. Time counts where it is spent: a step is without the steps that it calls."""

PARSED = ("protobuf parsed", "access log: protobuf parsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is sent. `text` is sent again and again, or never twice; the same goes for whole bodies."""

    title: str
    input_tokens: int
    tenant: str = "acme"
    new_text: bool = False
    new_body: bool = False
    share: float = 1.0
    """Of the blocks: long requests take long."""


SCENARIOS = {
    "cached": Scenario(title="chat of 300 tokens, cached", input_tokens=290),
    "fresh": Scenario(title="chat of 300 tokens, never seen", input_tokens=290, new_text=True),
    "refused": Scenario(
        title="refusal: the tenant is over its rate", input_tokens=290, tenant="pauper", new_body=True
    ),
    "early": Scenario(
        title="refusal: the same request again, before its time", input_tokens=290, tenant="pauper"
    ),
    "8k": Scenario(title="8,000 tokens, never seen", input_tokens=8_000, new_text=True, share=0.2),
}

Messages = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Sent:
    """Makes a scenario's messages, outside of what is timed."""

    scenario: Scenario
    serial: count[int]

    def messages(self, number: int) -> Messages:
        """`number` exchanges: heads and bodies, serialized as Envoy would."""
        made = []
        for each in range(number):
            serial = next(self.serial)
            text = prompt(self.scenario.input_tokens, seed=each % 16)
            if self.scenario.new_text:
                text = f"{serial} {time.monotonic_ns()} {text}"
            body = chat_body(text, seed=serial if self.scenario.new_body else None)
            head = head_message(len(body), tenant=self.scenario.tenant)
            made.append((head, body_message(body)))
        return made


async def block(
    service: InProcess, messages: Messages, watch: Stopwatch | None = None
) -> tuple[float, float]:
    """Processor microseconds per exchange, and for its access-log record, over one block."""
    watch = watch or Stopwatch()
    answers = []
    begun_ns = time.process_time_ns()
    for head, body in messages:
        with watch.span(STREAM):
            answers.append(await service.exchange(head, body))
    exchange_ns = time.process_time_ns() - begun_ns
    made = (access_log_message(answer, output_tokens=50) for answer in answers)
    records = [record for record in made if record is not None]
    begun_ns = time.process_time_ns()
    if records:
        with watch.span(RECORDS):
            await service.settle(records)
    record_ns = time.process_time_ns() - begun_ns
    return exchange_ns / len(messages) / 1e3, record_ns / len(messages) / 1e3


async def whole(policy: Path, scenario: Scenario, *, blocks: int, size: int) -> list[tuple[float, float]]:
    """The cost of the whole, block by block, with nothing else timed."""
    service = InProcess(policy)
    service.load()
    sent = Sent(scenario, count())
    await block(service, sent.messages(WARM_UP))
    taken = [await block(service, sent.messages(size)) for _ in range(blocks)]
    service.close()
    return taken


async def steps(
    policy: Path, scenario: Scenario, *, blocks: int, size: int
) -> dict[str, list[tuple[float, float]]]:
    """Microseconds and calls per exchange of every step, block by block, in the order of their first call."""
    watch = Stopwatch()
    taken: dict[str, list[tuple[float, float]]] = {}
    with timing(watch, STEPS), watch.collector(COLLECTOR):
        service = InProcess(policy)
        service.load()
        service.deserialize = watch.wrap(PARSED[0], service.deserialize)
        service.deserialize_record = watch.wrap(PARSED[1], service.deserialize_record)
        sent = Sent(scenario, count())
        await block(service, sent.messages(WARM_UP), watch)
        for number in range(blocks):
            messages, cost = sent.messages(size), overhead()
            watch.clear()
            await block(service, messages, watch)
            for name, one in watch.taken.items():
                rows = taken.setdefault(name, [(0.0, 0.0)] * number)
                rows.append((cost.net_ns(one) / size / 1e3, one.calls / size))
        service.close()
    return taken


def measure(policy: Path, scenario: Scenario, *, blocks: int, size: int) -> dict[str, Any]:
    """The scenario's figures: the whole, and its steps."""
    blocks = max(2, int(blocks * scenario.share))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        wholes = runner.run(whole(policy, scenario, blocks=blocks, size=size))
        parts = runner.run(steps(policy, scenario, blocks=blocks, size=size))
    rows: list[dict[str, Any]] = [
        {
            "step": name,
            "calls": round(statistics.fmean(calls for _, calls in taken), 2),
            "low_us": round(first_decile([us for us, _ in taken]), 2),
            "median_us": round(statistics.median(us for us, _ in taken), 2),
        }
        for name, taken in parts.items()
        if statistics.fmean(calls for _, calls in taken) >= SELDOM_CALLS
    ]
    return {
        "scenario": scenario.title,
        "low_us": round(first_decile([sum(pair) for pair in wholes]), 1),
        "median_us": round(statistics.median(sum(pair) for pair in wholes), 1),
        "record_low_us": round(first_decile([record for _, record in wholes]), 1),
        "steps_low_us": round(sum(row["low_us"] for row in rows), 1),
        "steps": rows,
    }


def first_decile(values: list[float]) -> float:
    """What nine of ten blocks exceed."""
    return sorted(values)[len(values) // 10]


def markdown(result: dict[str, Any]) -> str:
    """One scenario's table."""
    told = (
        f"Whole, with nothing else timed: {result['low_us']} µs of processor time (median block "
        f"{result['median_us']}), of which the access-log record {result['record_low_us']}. "
        f"The steps by themselves, together: {result['steps_low_us']} µs."
    )
    lines = [
        f"### {result['scenario']}",
        "",
        told,
        "",
        "| step, by itself | calls | µs | median µs | share |",
        "|---|---|---|---|---|",
    ]
    lines.extend(
        f"| {row['step']} | {row['calls']:g} | {row['low_us']} | {row['median_us']} "
        f"| {row['low_us'] / result['steps_low_us']:.0%} |"
        for row in result["steps"]
    )
    return "\n".join(lines) + "\n"


# Instructions, where valgrind is installed.


def instructions(scenario: str, number: int) -> float:
    """Instructions per exchange, its access-log record included, counted by callgrind."""
    command = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--callgrind-out-file=/dev/null",
        sys.executable,
        "-m",
        "tests.bench.hot_path",
        f"--counted={scenario}",
        f"--block={number}",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    )
    collected = re.findall(r"Collected : (\d+)", done.stderr)
    return int(collected[-1]) / number


def be_counted(scenario: Scenario, number: int) -> None:
    """Under callgrind: warm up, have the counter switched on, run one block, have it switched off."""

    def switch(state: str) -> None:
        subprocess.run(
            ["callgrind_control", f"--instr={state}", str(os.getpid())], check=True, stdout=sys.stderr
        )

    async def run(policy: Path) -> None:
        service = InProcess(policy)
        service.load()
        sent = Sent(scenario, count())
        await block(service, sent.messages(WARM_UP))
        messages = sent.messages(number)
        switch("on")
        await block(service, messages)
        switch("off")
        service.close()

    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as name:
        # The package's small tokenizer: what is cached costs the same, and it loads in a bearable time.
        policy = write_policy(Path(name), tokenizer_file=TOKENIZER_DIR / "tokenizer.json")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(policy))


def only_run(scenario: Scenario, *, blocks: int, size: int) -> None:
    """Blocks of exchanges and their records, with nothing timed."""
    with (
        tempfile.TemporaryDirectory(prefix="extproc-bench-") as name,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(whole(write_policy(Path(name)), scenario, blocks=blocks, size=size))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", help=f"some of {', '.join(SCENARIOS)}; by default all")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--block", type=int, default=5, help="exchanges per block")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--instructions", action="store_true", help="count instructions (needs valgrind)")
    parser.add_argument("--run", choices=SCENARIOS, help="only run it, --blocks times: for a profiler")
    parser.add_argument("--document", action="store_true", help="write the tables into HOTPATH.md")
    parser.add_argument("--counted", choices=SCENARIOS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.counted:
        be_counted(SCENARIOS[options.counted], options.block)
        return
    if options.run:
        only_run(SCENARIOS[options.run], blocks=options.blocks, size=options.block)
        return
    unknown = set(options.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    wanted = {name: SCENARIOS[name] for name in options.scenarios or SCENARIOS}
    options.output.mkdir(parents=True, exist_ok=True)
    if options.instructions:
        counted = {name: round(instructions(name, 40 * options.block)) for name in wanted}
        (options.output / "instructions.json").write_text(json.dumps(counted, indent=2) + "\n")
        for name, number in counted.items():
            print(f"{wanted[name].title}: {number:,} instructions")
        return
    results = []
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as name:
        policy = write_policy(Path(name))
        for scenario in wanted.values():
            console.print(f"[dim]{scenario.title}[/dim]")
            results.append(measure(policy, scenario, blocks=options.blocks, size=options.block))
    machine_class = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load": os.getloadavg(),
    }
    (options.output / "hot_path.json").write_text(
        json.dumps({"machine": machine_class, "scenarios": results}, indent=2) + "\n"
    )
    tables = "\n".join(markdown(result) for result in results)
    (options.output / "hot_path.md").write_text(tables)
    if options.document:
        write_marked(DOCUMENT, "measured", tables)
    print(tables)


if __name__ == "__main__":
    main()
