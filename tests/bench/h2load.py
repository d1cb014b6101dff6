"""h2load (of nghttp2, in C) as a client: it costs so little that what is seen is the server.

It sends one fixed body per stream, so what it can ask is a cached chat: through Envoy any HTTP request, and to an
ext_proc server both messages at once, each behind gRPC's length, with the stream's end right behind them.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.rounds import quantile_of

PROGRAM = "h2load"


class ClientFailed(Exception):
    """Not every request was answered with 200; the message holds what h2load said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What h2load saw. Latencies are µs, sorted, from a request's sending to its end."""

    per_s: float
    latencies_us: tuple[int, ...]

    def quantile_us(self, quantile: float) -> int:
        """The latency that this share of requests did not exceed."""
        return quantile_of(self.latencies_us, quantile)


def installed() -> bool:
    """Whether there is such a client here."""
    return shutil.which(PROGRAM) is not None


def grpc_body(messages: Sequence[bytes]) -> bytes:
    """Messages as a gRPC request's body: each behind a flag (not compressed) and its length."""
    return b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)


def load(
    directory: Path,
    url: str,
    *,
    body: bytes,
    headers: Mapping[str, str],
    count: int,
    rate_per_s: float | None = None,
    connections: int = 1,
    at_once: int = 100,
    unix_socket: str | None = None,
    core: int | None = None,
) -> Answered:
    """`count` POSTs: with a rate on a clock of one connection, without as fast as they are answered.

    On a clock it sends every 10 ms or so what is due by then: 500 a second are bursts of five. Latencies count from
    when a request was sent, for that pace is the client's; what has been sent does not keep it from sending more.
    Raises `ClientFailed`.
    """
    data, log = directory / "h2load.body", directory / "h2load.log"
    data.write_bytes(body)
    log.unlink(missing_ok=True)
    command = [
        *(["taskset", "--cpu-list", str(core)] if core is not None and shutil.which("taskset") else []),
        PROGRAM,
        f"--requests={count}",
        f"--clients={connections}",
        f"--max-concurrent-streams={at_once}",
        f"--data={data}",
        f"--log-file={log}",
        *(f"--header={name}: {value}" for name, value in headers.items()),
        *([f"--rps={rate_per_s:g}"] if rate_per_s is not None else []),
        *([f"--base-uri=unix:{unix_socket}"] if unix_socket is not None else []),
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = (
        [tuple(map(int, line.split()[:3])) for line in log.read_text().splitlines()] if log.exists() else []
    )
    if done.returncode or len(rows) != count or any(status != 200 for _, status, _ in rows):
        raise ClientFailed(f"{len(rows)} of {count} answered:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return answered(rows)


def answered(rows: Sequence[tuple[int, ...]]) -> Answered:
    """Figures of h2load's log: start (µs), status and duration (µs) of each request."""
    begun_us = min(start_us for start_us, _, _ in rows)
    ended_us = max(start_us + took_us for start_us, _, took_us in rows)
    return Answered(
        per_s=len(rows) / max(1, ended_us - begun_us) * 1e6,
        latencies_us=tuple(sorted(took_us for _, _, took_us in rows)),
    )
