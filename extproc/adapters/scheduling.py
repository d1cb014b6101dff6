"""Which thread may interrupt which."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress


def let_wait(threads: Iterable[threading.Thread]) -> None:
    """From now on these threads interrupt nobody when they have something to do; they wait for their turn.

    Linux has a class of threads for that, SCHED_BATCH, which needs no privilege. Elsewhere nothing changes.
    """
    if sys.platform == "linux":
        for thread in threads:
            assert thread.native_id is not None
            with suppress(OSError):  # a sandbox may forbid it
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
