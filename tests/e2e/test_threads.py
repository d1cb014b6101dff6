"""Which threads of the running service may interrupt the event loop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.gateway import Gateway


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this class of threads")
def test_grpcs_messenger_waits_for_the_event_loop(sim_gateway: Gateway) -> None:
    """One thread interrupts nobody, and it is neither the loop's nor one that reads sockets."""
    process = sim_gateway.service.process
    assert process is not None
    waiting = [
        task
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        if os.sched_getscheduler(int(task.name)) == os.SCHED_BATCH
    ]
    assert len(waiting) == 1
    assert int(waiting[0].name) != process.pid
    assert (waiting[0] / "comm").read_text() == "python\n"
