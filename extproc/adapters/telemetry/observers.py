"""Several observers as one, none of which can harm a request or another observer."""

from __future__ import annotations

import logging

from extproc.domain.decision import Decision, Settled
from extproc.ports import Observer

log = logging.getLogger(__name__)


class Observers:
    """Implements `Observer` by telling each of `observers`. The first fault is logged, all are counted."""

    def __init__(self, *observers: Observer) -> None:
        self.faults = 0
        self._observers = observers

    def decided(self, decision: Decision) -> None:
        """See `Observer.decided`."""
        for observer in self._observers:
            try:
                observer.decided(decision)
            except Exception as fault:  # noqa: BLE001 - who watches must not harm what is watched
                self._faulted(observer, fault)

    def settled(self, settled: Settled) -> None:
        """See `Observer.settled`."""
        for observer in self._observers:
            try:
                observer.settled(settled)
            except Exception as fault:  # noqa: BLE001 - who watches must not harm what is watched
                self._faulted(observer, fault)

    def _faulted(self, observer: Observer, fault: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            log.error("an observer failed", exc_info=fault, extra={"observer": type(observer).__name__})
