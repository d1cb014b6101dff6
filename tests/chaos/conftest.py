"""What all chaos has in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop of a worker: it is not the one that comes with Python."""
    return {"uvloop": uvloop.new_event_loop}
