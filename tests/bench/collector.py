"""A collector that throws away what it gets: `python -m tests.bench.collector` prints its address and stays."""

from __future__ import annotations

import sys
from typing import Any

from tests.telemetry.collector import grpc_collector


class Lost(list[Any]):
    """Keeps nothing."""

    def append(self, item: Any) -> None:
        """Forget it."""

    def extend(self, items: Any) -> None:
        """Forget them."""


def main() -> None:
    """Collect until the standard input ends."""
    with grpc_collector() as received:
        received.spans = Lost()
        print(received.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
