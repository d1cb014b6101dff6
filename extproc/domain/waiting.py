"""All who wait in one ledger domain: their lines, when their time is over, and what they are to be told.

Every ticket ends with exactly one answer, at the latest when its time is over. An answer that falls while its
caller is not asking is news for its holder. A holder that waits must be heard from: if it is silent for its
`reply_ms`, its tickets are dropped at the front of the line, and what was granted to them is taken back (see
`LeaseState.PROMISED`). So whoever dies while it waits keeps nobody waiting behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from extproc.domain.lease import Holder
from extproc.domain.policy import Lane
from extproc.domain.queue import Line, Ticket
from extproc.domain.reservation import Denied, Granted, Reservation

STALE_EXPIRIES_MOST = 64
"""The queue of expiries is rebuilt when more than this, and more than half of it, is out of date."""

HEARD_FOR_MS = 600_000
"""A holder that has not been heard from for this long is forgotten, with what it was to be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How much waits, and for how long the oldest has."""

    requests: int = 0
    input_tokens: int = 0
    oldest_ms: int = 0


@dataclass(slots=True)
class Waiting:
    """Lines by pool, tickets by lease id, and news by holder."""

    lines: dict[str, Line] = field(default_factory=dict)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    news: dict[str, list[tuple[str, Granted | Denied]]] = field(default_factory=dict)
    heard: OrderedDict[str, int] = field(default_factory=OrderedDict, compare=False)
    sequence: int = field(default=0, compare=False)
    _expiries: list[tuple[int, str]] = field(default_factory=list)

    def hear(self, holder: Holder, now_ms: int) -> None:
        """The holder is alive."""
        self.heard[holder.id] = now_ms
        self.heard.move_to_end(holder.id)

    def is_silent(self, holder: Holder, now_ms: int) -> bool:
        """Whether nobody is there to be told."""
        heard_at_ms = self.heard.get(holder.id)
        return heard_at_ms is None or now_ms - heard_at_ms > holder.reply_ms

    def enter(self, reservation: Reservation, holder: Holder, now_ms: int) -> Ticket:
        """Put a newcomer into the line of its pool.

        Its time is over when its lane lets nobody wait longer, or when its own prompt could no longer be read
        before its deadline, whichever is first.
        """
        self.sequence += 1
        deadline_at_ms = now_ms + reservation.deadline_in_ms
        own_prefill_ms = reservation.pool.prefill_ms(reservation.input_tokens)
        ticket = Ticket(
            reservation=reservation,
            tokens=max(1, reservation.total_tokens),
            holder=holder,
            sequence=self.sequence,
            enqueued_at_ms=now_ms,
            expires_at_ms=min(now_ms + reservation.hold_ms, deadline_at_ms - own_prefill_ms),
            deadline_at_ms=deadline_at_ms,
        )
        line = self.lines.get(reservation.pool.name)
        if line is None:
            line = self.lines[reservation.pool.name] = Line(pool=reservation.pool)
        line.add(ticket)
        return ticket

    def stay(self, ticket: Ticket) -> None:
        """Let a newcomer wait: from now on its answer is news."""
        ticket.fresh = False
        self.tickets[ticket.reservation.lease_id] = ticket
        heappush(self._expiries, (ticket.expires_at_ms, ticket.reservation.lease_id))
        if len(self._expiries) > STALE_EXPIRIES_MOST + 2 * len(self.tickets):
            self._expiries = [(one.expires_at_ms, lease_id) for lease_id, one in self.tickets.items()]
            heapify(self._expiries)

    def answer(self, ticket: Ticket, answer: Granted | Denied) -> None:
        """End a ticket's wait. The caller takes it out of its line."""
        assert ticket.answer is None, "a ticket has one answer"
        ticket.answer = answer
        if not ticket.fresh:
            lease_id = ticket.reservation.lease_id
            del self.tickets[lease_id]
            self.news.setdefault(ticket.holder.id, []).append((lease_id, answer))

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out of its line; a line in which nobody waits is forgotten."""
        name = ticket.reservation.pool.name
        line = self.lines[name]
        line.remove(ticket)
        self.close_if_empty(name)

    def close_if_empty(self, name: str) -> None:
        """Forget the line of this pool if nobody waits in it."""
        line = self.lines.get(name)
        if line is not None and not line.requests:
            del self.lines[name]

    def withdrawn(self, lease_id: str) -> Ticket | None:
        """Take the ticket of a caller that has gone out of its line, without an answer."""
        ticket = self.tickets.pop(lease_id, None)
        if ticket is not None:
            self.leave(ticket)
        return ticket

    def overdue(self, now_ms: int) -> Ticket | None:
        """A ticket whose time is over, still in its line; the one that is longest overdue."""
        expires_at_ms = self.next_expiry_at_ms()
        if expires_at_ms is None or expires_at_ms > now_ms:
            return None
        return self.tickets[self._expiries[0][1]]

    def next_expiry_at_ms(self) -> int | None:
        """When the next ticket's time is over."""
        while self._expiries:
            expires_at_ms, lease_id = self._expiries[0]
            ticket = self.tickets.get(lease_id)
            if ticket is not None and ticket.expires_at_ms == expires_at_ms:
                return expires_at_ms
            heappop(self._expiries)  # it has been answered
        return None

    def take_news(self, holder: Holder) -> list[tuple[str, Granted | Denied]]:
        """What the holder is to be told, once."""
        return self.news.pop(holder.id, [])

    def drop_news(self, holder_id: str, lease_id: str) -> None:
        """Nobody is to be told of this lease any more."""
        told = [one for one in self.news.get(holder_id, []) if one[0] != lease_id]
        if told:
            self.news[holder_id] = told
        else:
            self.news.pop(holder_id, None)

    def state_of(self, pool: str, lane: Lane, now_ms: int) -> Waits:
        """How much waits in one lane of one pool, and for how long the oldest has."""
        line = self.lines.get(pool)
        part = line.lanes.get(lane) if line is not None else None
        if part is None:
            return Waits()
        since_ms = [one.enqueued_at_ms for tenant in part.tenants.values() for one in tenant.tickets]
        return Waits(
            requests=part.requests,
            input_tokens=part.input_tokens,
            oldest_ms=max(0, now_ms - min(since_ms, default=now_ms)),
        )

    def sweep(self, now_ms: int) -> None:
        """Forget one holder that has been silent for long."""
        for holder_id, heard_at_ms in self.heard.items():
            if now_ms - heard_at_ms > HEARD_FOR_MS:
                del self.heard[holder_id]
                self.news.pop(holder_id, None)
            break
