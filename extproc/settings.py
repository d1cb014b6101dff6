"""Settings of one process: from the command line and the environment, read once, frozen.

Settings say where this process listens and how it behaves; the policy says what is decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one worker runs.

    `listen` is a gRPC address: `host:port` or `unix:/path`. `admin_host` may be `unix:/path` too; the port is then
    not used. `ledger` is the shared ledger's URL; `None` keeps the books in this process. `drain_wait_ms` is how
    long a stopping worker still takes new requests, so that Envoy's health check can notice (two intervals).
    """

    policy: Path
    listen: str = "127.0.0.1:9002"
    admin_host: str = "127.0.0.1"
    admin_port: int = 9903
    ledger: str | None = None
    ledger_domain: str = "default"
    drain_wait_ms: int = 4_000
    drain_end_ms: int = 5_000
    tokenizer_threads: int = 2
    log_format: str = "auto"
    log_level: str = "info"
