"""The imperative shell of one exchange: performs what the exchange asks for, feeds the answers back.

Everything here is synchronous. Ports answer by callback, at once or later; answers to Envoy go to `send`,
which must not block. So a decision whose inputs are at hand is made in one go, and one that must wait leaves
nothing behind that could be cancelled halfway.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from extproc.domain.decision import Settled
from extproc.domain.demand import Demand
from extproc.domain.policy import Policy
from extproc.domain.reservation import Booking
from extproc.exchange.events import (
    Answer,
    CloseStream,
    CountTokens,
    Effect,
    Event,
    Faulted,
    Observe,
    ReadBody,
    Release,
    Reserve,
    Send,
    Withdraw,
)
from extproc.exchange.law import State
from extproc.exchange.machine import Exchange
from extproc.ports import BodyReader, Clock, Ledger, Observer, TokenCounter

log = logging.getLogger(__name__)


class Driver:
    """Drives one exchange. `receive` may be called again from within any port or `send`."""

    __slots__ = (
        "_busy",
        "_clock",
        "_close",
        "_counter",
        "_events",
        "_exchange",
        "_ledger",
        "_observer",
        "_reader",
        "_send",
    )

    def __init__(
        self,
        *,
        exchange: Exchange,
        clock: Clock,
        reader: BodyReader,
        counter: TokenCounter,
        ledger: Ledger,
        observer: Observer,
        send: Callable[[Answer], None],
        close: Callable[[bool], None],
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._reader = reader
        self._counter = counter
        self._ledger = ledger
        self._observer = observer
        self._send = send
        self._close = close
        self._events: deque[Event] = deque()
        self._busy = False

    @property
    def state(self) -> State:
        """Where the exchange is."""
        return self._exchange.state

    def receive(self, event: Event) -> None:
        """Let `event` happen, with all that follows from it. Never raises."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event = self._events.popleft()
                try:
                    for effect in self._exchange.receive(event, self._clock.now_us()):
                        self._EFFECTS[type(effect)](self, effect)
                except Exception as fault:  # noqa: BLE001 - one bad request must never affect another
                    self._failed(event, fault)
        finally:
            self._busy = False

    def _failed(self, event: Event, fault: Exception) -> None:
        log.error("exchange failed", exc_info=fault, extra={"event": type(event).__name__})
        if isinstance(event, Faulted):
            self._close(True)
        else:
            self._events.append(Faulted(detail=type(fault).__name__))

    def _on_send(self, effect: Send) -> None:
        self._send(effect.answer)

    def _on_read_body(self, effect: ReadBody) -> None:
        self._reader.read(effect.body, tenant=effect.tenant, deliver=self.receive)

    def _on_count_tokens(self, effect: CountTokens) -> None:
        self._counter.count(
            model=effect.model,
            prompt=effect.prompt,
            limit_tokens=effect.limit_tokens,
            tenant=effect.tenant,
            deliver=self.receive,
        )

    def _on_reserve(self, effect: Reserve) -> None:
        self._ledger.reserve(effect.reservation, self.receive)

    def _on_withdraw(self, effect: Withdraw) -> None:
        self._ledger.withdraw(effect.lease_id)

    def _on_release(self, effect: Release) -> None:
        if effect.unused:
            self._ledger.book(Booking(lease_id=effect.lease_id, work_units=0))
        else:
            self._ledger.release(effect.lease_id)

    def _on_observe(self, effect: Observe) -> None:
        self._observer.decided(effect.decision)

    def _on_close(self, effect: CloseStream) -> None:
        self._close(effect.failed)

    _EFFECTS: ClassVar[Mapping[type[Effect], Callable[[Driver, Any], None]]] = {
        Send: _on_send,
        ReadBody: _on_read_body,
        CountTokens: _on_count_tokens,
        Reserve: _on_reserve,
        Withdraw: _on_withdraw,
        Release: _on_release,
        Observe: _on_observe,
        CloseStream: _on_close,
    }


def settle(settled: Settled, *, policy: Policy, ledger: Ledger, observer: Observer) -> None:
    """Book what an access-log record says was used, and tell whoever watches.

    A side that the engine did not report is booked as it was reserved: unknown is never zero. A record that
    reports nothing at all leaves the whole charge as it is.
    """
    work_units = None
    model = policy.models.get(settled.model)
    if model is not None and (
        settled.used_input_tokens is not None or settled.used_output_tokens is not None
    ):
        used = Demand(
            input_tokens=_known(settled.used_input_tokens, settled.input_tokens),
            output_tokens=_known(settled.used_output_tokens, settled.output_tokens),
            longest_sequence_tokens=0,
        )
        work_units = used.work_units(model, policy.limits)
    ledger.book(Booking(lease_id=settled.lease_id, work_units=work_units))
    observer.settled(settled)


def _known(used: int | None, reserved: int) -> int:
    return reserved if used is None else used
