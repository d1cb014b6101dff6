"""What watching costs: `python -m tests.bench.telemetry_bench`.

One exchange with its access-log record, through four services that run side by side and take turns:

- off: nothing watches,
- metrics: as it comes, with metrics, recent decisions and the log, but no tracing,
- unsampled: tracing to a collector, but every caller's trace is unsampled,
- sampled: tracing to a collector, and every caller's trace is sampled.

Server CPU per exchange, as a ratio to "off": of the best rounds, which others on the machine disturb least, and
the range over all rounds. The collector is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvloop
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from tests.bench.__main__ import RESULTS, Round, machine, measure
from tests.bench.envoy_side import EnvoySide, access_log_message, body_message, chat_body, head_message
from tests.bench.processes import Server, running
from tests.bench.prompts import prompt, write_policy
from tests.support.train_tokenizer import TOKENIZER_DIR

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
VARIANTS = ("off", "metrics", "unsampled", "sampled")
TARGET = 1.10
"""What an unsampled exchange may cost at most, beside one that nobody watches."""


def traced_head(body_bytes: int, *, flags: str | None) -> bytes:
    """The head of a request whose caller has a trace with these flags, or none."""
    head = head_message(body_bytes)
    if flags is None:
        return head
    message = pb.ProcessingRequest.FromString(head)
    value = f"00-{TRACE}-00f067aa0ba902b7-{flags}".encode()
    message.request_headers.headers.headers.append(HeaderValue(key="traceparent", raw_value=value))
    serialized: bytes = message.SerializeToString()
    return serialized


def exchange(flags: str | None) -> Callable[[EnvoySide, int], Awaitable[int]]:
    """A short chat that is counted from the cache, admitted, and settled by its record."""
    bodies = [body_message(chat_body(prompt(290, seed=seed))) for seed in range(16)]
    heads = [traced_head(len(body), flags=flags) for body in bodies]

    async def run(side: EnvoySide, number: int) -> int:
        done = await side.exchange(heads[number % len(heads)], bodies[number % len(bodies)])
        record = access_log_message(done.answer, output_tokens=50)
        if record is not None:
            await side.log(record)
        return done.decision_us

    return run


@contextmanager
def collector() -> Iterator[str]:
    """A collector in a process of its own, which throws away what it gets; its address."""
    script = (
        "import sys, tests.telemetry.collector as c\n"
        "class Lost(list):\n"
        "    def append(self, item): pass\n"
        "with c.grpc_collector() as received:\n"
        "    received.spans = Lost()\n"
        "    print(received.address, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def services(directory: Path) -> Iterator[dict[str, Server]]:
    """One service per variant, all running."""
    policy = write_policy(directory, tokenizer_file=TOKENIZER_DIR / "tokenizer.json")
    arguments = [f"--policy={policy}", "--admin=127.0.0.1:0", "--drain-wait-ms=0"]
    with ExitStack() as stack:
        address = stack.enter_context(collector())
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}"}
        started = {}
        for variant in VARIANTS:
            module = ["tests.bench.unwatched"] if variant == "off" else ["extproc", "serve"]
            environment = traced if variant in ("unsampled", "sampled") else {}
            with patch.dict(os.environ, environment):
                started[variant] = stack.enter_context(
                    running(directory, variant, [*module, *arguments], socket_flag="--listen=")
                )
        yield started


def compare(rounds: int, count: int) -> dict[str, Any]:
    """All variants in turn, `rounds` times."""
    flags = {"off": None, "metrics": None, "unsampled": "00", "sampled": "01"}
    measured: dict[str, list[Round]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as name, services(Path(name)) as servers:
        for number in range(rounds):
            # Another order in each round, so that no variant always follows the same one.
            order = VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]
            for variant in order:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    measured[variant].append(
                        runner.run(
                            measure(servers[variant], exchange(flags[variant]), count=count, at_once=8)
                        )
                    )
    result: dict[str, Any] = {}
    for variant, one in measured.items():
        ratios = [mine.cpu_us / off.cpu_us for mine, off in zip(one, measured["off"], strict=True)]
        result[variant] = {
            "cpu_us": round(min(each.cpu_us for each in one), 1),
            "decision_p50_us": round(statistics.median(each.p50_us for each in one)),
            "ratio": round(
                min(each.cpu_us for each in one) / min(each.cpu_us for each in measured["off"]), 3
            ),
            "ratio_min": round(min(ratios), 3),
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_max": round(max(ratios), 3),
        }
    return result


def markdown(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = ["| watching | CPU per exchange | ratio to off (range) | decision p50 |", "|---|---|---|---|"]
    lines.extend(
        f"| {variant} | {one['cpu_us']} µs | {one['ratio']} ({one['ratio_min']}-{one['ratio_max']}) "
        f"| {one['decision_p50_us'] / 1000:.2f} ms |"
        for variant, one in result.items()
    )
    met = "met" if result["unsampled"]["ratio"] <= TARGET else "missed"
    lines.append(f"\nUnsampled at most {TARGET}: {met}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--count", type=int, default=1_500, help="exchanges per round and variant")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = compare(options.rounds, options.count)
    options.output.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine(), "telemetry": result}
    (options.output / "telemetry.json").write_text(json.dumps(document, indent=2) + "\n")
    table = markdown(result)
    (options.output / "telemetry.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
