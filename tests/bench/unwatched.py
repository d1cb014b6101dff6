"""The service with nobody watching: what watching is compared with. Options as of `extproc serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

import uvloop

from extproc.adapters.telemetry.observers import Observers
from extproc.app import Worker
from extproc.settings import Settings


async def run(settings: Settings) -> None:
    """Serve until told to stop."""
    worker = Worker(settings)
    worker._telemetry._observers = Observers()
    await worker.run()


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--admin", required=True)
    parser.add_argument("--drain-wait-ms", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    host, _, port = options.admin.rpartition(":")
    settings = Settings(
        policy=options.policy,
        listen=options.listen,
        admin_host=host,
        admin_port=int(port),
        drain_wait_ms=options.drain_wait_ms,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings))


if __name__ == "__main__":
    main()
