"""What one exchange needs from the world, as questions; and how each may fail.

Answers are delivered by callback, exactly once and on the event loop's thread, possibly before the call
returns. That keeps the common case (an answer that is already known) free of tasks and futures, and it
makes a caller's departure harmless: the answer still arrives, and the exchange gives back what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from extproc.dialects.body import Body, BodyRead, BodyRefused
from extproc.domain.decision import Decision, Settled
from extproc.domain.policy import Policy
from extproc.domain.prompt import AtLeast, Count, Counted, CountFailed, Prompt
from extproc.domain.reservation import Answer, Booking, Reservation
from extproc.domain.snapshot import Snapshot

__all__ = [
    "AtLeast",
    "BodyReader",
    "Clock",
    "Count",
    "CountFailed",
    "Counted",
    "Ledger",
    "LedgerFault",
    "Observer",
    "PolicySource",
    "TokenCounter",
]


class BodyReader(Protocol):
    """What does a long body ask for?"""

    def read(
        self, body: Body, *, tenant: str, deliver: Callable[[BodyRead | BodyRefused | CountFailed], None]
    ) -> None:
        """Read `body` without keeping anybody waiting.

        Never raises: what is wrong with the body is delivered as `BodyRefused`, and that there is too much to do,
        or a fault, as `CountFailed`.
        """
        ...


class TokenCounter(Protocol):
    """How many input tokens will the engine see?"""

    def count(
        self,
        *,
        model: str,
        prompt: Prompt,
        limit_tokens: int,
        tenant: str,
        deliver: Callable[[Count], None],
    ) -> None:
        """Count `prompt` with the tokenizer of the policy's model `model`.

        May answer `AtLeast` instead of an exact count when one sequence is provably over `limit_tokens`.
        Never raises: whatever goes wrong is delivered as `CountFailed`.
        """
        ...


class Ledger(Protocol):
    """Who holds how much, shared by all who ask it. Time is the ledger's own."""

    def reserve(self, reservation: Reservation, deliver: Callable[[Answer], None]) -> None:
        """Grant every scope of the reservation or none, and deliver the answer.

        If the reservation may wait for room, the answer may come much later: within its `hold_ms`, and never
        past its deadline. A ledger that cannot be asked in time delivers `Unavailable`; it never raises. A
        grant is delivered even when the caller has left: it must be given back like any other.
        """
        ...

    def withdraw(self, lease_id: str) -> None:
        """The caller that waits for this lease has gone: give up its place, and deliver its answer promptly.

        That answer is a denial, or a grant that had fallen already. Harmless when repeated or unknown.
        """
        ...

    def release(self, lease_id: str) -> None:
        """The lease's stream has ended: free its tokens and slots. Harmless when repeated or unknown."""
        ...

    def book(self, booking: Booking) -> None:
        """Book real usage once, from the access-log record. Harmless when repeated, early or unknown."""
        ...

    async def snapshot(self, policy: Policy) -> Snapshot:
        """All balances beside the limits of `policy`. Raises `LedgerFault` when the ledger cannot be asked."""
        ...


class LedgerFault(Exception):
    """The ledger cannot be asked right now. The text names the fault and no address or credential."""


class PolicySource(Protocol):
    """Which policy is in force right now? An exchange keeps the one it began with."""

    @property
    def current(self) -> Policy:
        """The last good policy."""
        ...


class Clock(Protocol):
    """What time is it on this machine, for durations only?"""

    def now_us(self) -> int:
        """Microseconds from an arbitrary start; never goes backwards."""
        ...


class Observer(Protocol):
    """Who wants to know? Called with finished facts; must neither block nor raise."""

    def decided(self, decision: Decision) -> None:
        """An exchange was admitted, refused or abandoned. Once per inference request."""
        ...

    def settled(self, settled: Settled) -> None:
        """An access-log record told how an exchange ended. At most once per inference request."""
        ...
