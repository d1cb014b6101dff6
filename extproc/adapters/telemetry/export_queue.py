"""A queue between requests and a collector that may be slow, or gone.

The event loop only appends; one daemon thread exports. What does not fit is dropped and counted. The SDK's
own batch processors do not tell how much they dropped, log from the caller's thread for each drop, and may
wait half a minute at the end; batches here are small as well, because encoding one holds the interpreter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

QUEUE_ITEMS = 2_048
BATCH_ITEMS = 64
DELAY_S = 1.0
QUIET_S = 60.0
"""A collector that stays away is logged this often, not per batch."""

_Item = TypeVar("_Item")


class ExportQueue(Generic[_Item]):
    """Hands what is put to `export` in batches, from a thread of its own.

    `export` answers whether the batch arrived; it may block and raise. `cut` makes a blocked `export` return
    and lets no further one succeed. `dropped` counts items that did not fit or did not arrive.
    """

    def __init__(
        self,
        *,
        name: str,
        export: Callable[[Sequence[_Item]], bool],
        cut: Callable[[], None],
        most_items: int = QUEUE_ITEMS,
        batch_items: int = BATCH_ITEMS,
        delay_s: float = DELAY_S,
    ) -> None:
        self.exported = 0
        self._overflowed = 0
        self._lost = 0
        self._name = name
        self._export = export
        self._cut = cut
        self._most_items = most_items
        self._batch_items = batch_items
        self._delay_s = delay_s
        self._items: deque[_Item] = deque()
        self._woken = threading.Event()
        self._closed = False
        self._complained_at_s = -QUIET_S
        self._thread = threading.Thread(target=self._work, name=f"export-{name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Items that were lost so far."""
        return self._overflowed + self._lost

    def put(self, item: _Item) -> None:
        """Queue one item, or drop it where the queue is full or closed. Never blocks."""
        if self._closed or len(self._items) >= self._most_items:
            self._overflowed += 1
            return
        self._items.append(item)
        if len(self._items) >= self._batch_items and not self._woken.is_set():
            self._woken.set()

    def close(self, within_s: float) -> None:
        """Export what is queued, for at most about `within_s`; the rest is dropped. Blocks that long."""
        if self._closed:
            return
        self._closed = True
        self._woken.set()
        self._thread.join(within_s * 0.7)
        self._cut()
        self._thread.join(within_s * 0.3)
        if self._thread.is_alive():
            log.warning("telemetry not flushed in time", extra={"signal": self._name})

    def _work(self) -> None:
        while not self._closed:
            self._woken.wait(self._delay_s)
            self._woken.clear()
            # A short rest while it trickles, none while a batch is full.
            self._export_queued()
        self._export_queued()

    def _export_queued(self) -> None:
        while self._items:
            batch = [self._items.popleft() for _ in range(min(len(self._items), self._batch_items))]
            if self._arrived(batch):
                self.exported += len(batch)
            else:
                self._lost += len(batch)
                if self._closed:
                    # Whoever waits for the end has no time for another try.
                    self._lost += len(self._items)
                    self._items.clear()

    def _arrived(self, batch: Sequence[_Item]) -> bool:
        try:
            if self._export(batch):
                return True
            fault = "refused"
        except Exception as error:  # noqa: BLE001 - an exporter's fault must not end the thread
            fault = type(error).__name__
        now_s = time.monotonic()
        if now_s - self._complained_at_s >= QUIET_S:
            self._complained_at_s = now_s
            log.warning("telemetry not exported", extra={"signal": self._name, "fault": fault})
        return False
