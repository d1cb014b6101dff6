"""A world in which requests wait for a ledger, and what has become of each: the same for every ledger.

A ledger takes part by a `WaitingLedger` of a few lines. The world keeps its own account of what was granted and
who waits, from the answers alone, so that the laws are checked against what callers were told and not against
the ledger's own books.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from extproc.adapters.redis_ledger import wire
from extproc.domain.books import Books
from extproc.domain.lease import Holder
from extproc.domain.policy import Lane, Pool
from extproc.domain.reservation import Denied, Granted, Queued, Reservation
from tests.support.lua_books import LuaBooks

START_MS = 1_000_000
WORKER = Holder(id="w1", lease_ttl_ms=1_000_000_000, orphan_grace_ms=0)
MORTAL = Holder(id="w2", lease_ttl_ms=5_000, orphan_grace_ms=1_000, reply_ms=500)


class WaitingLedger(Protocol):
    """What can be asked of a ledger at a given time."""

    def reserve(self, reservation: Reservation, holder: Holder, now_ms: int) -> Granted | Denied | Queued:
        """Ask."""
        ...

    def release(self, lease_id: str, now_ms: int) -> None:
        """A stream has ended."""
        ...

    def withdraw(self, lease_id: str, now_ms: int) -> bool:
        """A caller that waits has gone."""
        ...

    def take_news(self, holder: Holder, now_ms: int) -> list[tuple[str, Granted | Denied]]:
        """What a holder is to be told."""
        ...

    def renew(self, holder: Holder, lease_ids: tuple[str, ...], now_ms: int) -> None:
        """A holder says what it holds."""
        ...

    def next_moment_ms(self) -> int | None:
        """When something is due by time alone."""
        ...

    def tidy(self, now_ms: int) -> None:
        """Do what is due."""
        ...


@dataclass(slots=True)
class BooksLedger:
    """The model itself."""

    books: Books = field(default_factory=Books)

    def reserve(self, reservation: Reservation, holder: Holder, now_ms: int) -> Granted | Denied | Queued:
        """See `WaitingLedger`."""
        return self.books.reserve(reservation, now_ms, holder)

    def release(self, lease_id: str, now_ms: int) -> None:
        """See `WaitingLedger`."""
        self.books.release(lease_id, now_ms)

    def withdraw(self, lease_id: str, now_ms: int) -> bool:
        """See `WaitingLedger`."""
        return self.books.withdraw(lease_id, now_ms)

    def take_news(self, holder: Holder, now_ms: int) -> list[tuple[str, Granted | Denied]]:
        """See `WaitingLedger`."""
        return self.books.take_news(holder, now_ms)

    def renew(self, holder: Holder, lease_ids: tuple[str, ...], now_ms: int) -> None:
        """See `WaitingLedger`."""
        assert not self.books.renew(holder, lease_ids, now_ms)

    def next_moment_ms(self) -> int | None:
        """See `WaitingLedger`."""
        wake_at_ms = self.books.wake_at_ms()
        dues = [lease.due_at_ms for lease in self.books.leases.values()]
        return min([*dues, *([] if wake_at_ms is None else [wake_at_ms])], default=None)

    def tidy(self, now_ms: int) -> None:
        """See `WaitingLedger`."""
        self.books.wake(now_ms)
        self.books.reclaim(now_ms, most=8)


@dataclass(slots=True)
class StoreLedger:
    """The scripts of the shared ledger, in an empty store, used as a worker uses them.

    It looks again when a call has said that time may let somebody go, and when a ticket's time is over; if the
    calls told too little of that, somebody would wait for too long. When leases are due is read from the store:
    a worker would come by often enough. What a worker's own call decides comes back with it as news; another
    one is asked for its news when there has been any call since it was.
    """

    lua: LuaBooks
    asked: dict[str, Reservation] = field(default_factory=dict)
    moments_ms: set[int] = field(default_factory=set)
    news: list[tuple[str, Granted | Denied]] = field(default_factory=list)
    calls: int = 0
    heard: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lua.wipe()

    def reserve(self, reservation: Reservation, holder: Holder, now_ms: int) -> Granted | Denied | Queued:
        """See `WaitingLedger`."""
        self.asked[reservation.lease_id] = reservation
        reply = self._play(wire.reserve_op(reservation, 0), holder, now_ms, reservation.pool)
        answer = wire.answer_of(reply, reservation)
        if isinstance(answer, Queued):
            self.moments_ms.add(now_ms + answer.expires_in_ms)
        return answer

    def release(self, lease_id: str, now_ms: int) -> None:
        """See `WaitingLedger`."""
        self._play(wire.release_op(lease_id), WORKER, now_ms)

    def withdraw(self, lease_id: str, now_ms: int) -> bool:
        """See `WaitingLedger`."""
        return bool(self._play(wire.withdraw_op(lease_id), WORKER, now_ms))

    def take_news(self, holder: Holder, now_ms: int) -> list[tuple[str, Granted | Denied]]:
        """See `WaitingLedger`."""
        if self.heard.get(holder.id) != (self.calls, now_ms):
            self._run([], holder, now_ms)
        news, self.news = self.news, []
        return news

    def renew(self, holder: Holder, lease_ids: tuple[str, ...], now_ms: int) -> None:
        """See `WaitingLedger`."""
        assert not self._play(wire.renew_op(lease_ids), holder, now_ms)

    def next_moment_ms(self) -> int | None:
        """See `WaitingLedger`."""
        due: Any = self.lua.client.zrange(self.lua.keys[2], 0, 0, withscores=True)
        return min([*self.moments_ms, *(int(at_ms) for _, at_ms in due)], default=None)

    def tidy(self, now_ms: int) -> None:
        """See `WaitingLedger`."""
        self.moments_ms = {at_ms for at_ms in self.moments_ms if at_ms > now_ms}
        wake_at_ms = self._play(wire.wake_op(), WORKER, now_ms, reclaim_most=8)
        if wake_at_ms is not False:
            self.moments_ms.add(wake_at_ms)

    def _play(self, op: wire.Op, holder: Holder, now_ms: int, *pools: Pool, reclaim_most: int = 0) -> Any:
        self.calls += 1
        [reply] = self._run([op], holder, now_ms, *pools, reclaim_most=reclaim_most)
        return reply

    def _run(
        self, ops: list[wire.Op], holder: Holder, now_ms: int, *pools: Pool, reclaim_most: int = 0
    ) -> Sequence[Any]:
        """One call, with all that a worker would note of it."""
        self.heard[holder.id] = self.calls, now_ms
        (*replies, news), _ = self.lua.play(
            [*ops, wire.news_op()], holder=holder, at_ms=now_ms, pools=pools, reclaim_most=reclaim_most
        )
        self.news += [(lease_id, wire.final_of(told, self.asked[lease_id])) for lease_id, told in news]
        if self.lua.wake_at_ms is not None:
            self.moments_ms.add(self.lua.wake_at_ms)
        return replies


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request got, when, and how many were answered before it."""

    at_ms: int
    answer: Granted | Denied


@dataclass(slots=True)
class World:
    """Callers, their holders, and a ledger. Time moves only in `pass_ms`, through every moment that is due.

    Living holders renew their leases and ask for their news at least every 400 ms.
    """

    ledger: WaitingLedger = field(default_factory=BooksLedger)
    now_ms: int = START_MS
    asked: dict[str, Reservation] = field(default_factory=dict)
    asked_at_ms: dict[str, int] = field(default_factory=dict)
    holder_of: dict[str, Holder] = field(default_factory=dict)
    waiting: dict[str, Queued] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    held: dict[str, Granted] = field(default_factory=dict)
    withdrawn: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    granted_tokens: Counter[tuple[Lane, str]] = field(default_factory=Counter)
    watch: Callable[[World], None] | None = None

    def ask(self, reservation: Reservation, holder: Holder = WORKER) -> Granted | Denied | Queued:
        """A caller asks."""
        lease_id = reservation.lease_id
        assert lease_id not in self.asked, "every request of a world has its own id"
        self.asked[lease_id] = reservation
        self.asked_at_ms[lease_id] = self.now_ms
        self.holder_of[lease_id] = holder
        answer = self.ledger.reserve(reservation, holder, self.now_ms)
        if isinstance(answer, Queued):
            self.waiting[lease_id] = answer
        else:
            self._tell(lease_id, answer)
        self._settle()
        return answer

    def end(self, lease_id: str) -> None:
        """An answer has ended."""
        self.held.pop(lease_id, None)
        self.ledger.release(lease_id, self.now_ms)
        self._settle()

    def hang_up(self, lease_id: str) -> None:
        """A caller that waits leaves."""
        if lease_id in self.waiting and self.ledger.withdraw(lease_id, self.now_ms):
            del self.waiting[lease_id]
            self.withdrawn.add(lease_id)
        self._settle()

    def kill(self, holder: Holder) -> None:
        """A holder dies: nobody renews its leases, and nobody asks for its news."""
        self.dead.add(holder.id)
        for lease_id in [*self.waiting, *self.held]:
            if self.holder_of[lease_id].id == holder.id:
                self.waiting.pop(lease_id, None)
                self.held.pop(lease_id, None)

    def pass_ms(self, ms: int) -> None:
        """Time passes."""
        end_ms = self.now_ms + ms
        for _ in range(10_000):
            moment_ms = self.ledger.next_moment_ms()
            step_ms = min(end_ms, self.now_ms + 400)
            if moment_ms is not None and moment_ms <= step_ms:
                self.now_ms = max(self.now_ms, moment_ms)
                self.ledger.tidy(self.now_ms)
            else:
                self.now_ms = step_ms
            if MORTAL.id not in self.dead:
                mine = tuple(lease_id for lease_id in self.held if self.holder_of[lease_id] is MORTAL)
                self.ledger.renew(MORTAL, mine, self.now_ms)
            self._settle()
            if self.now_ms == end_ms and (moment_ms is None or moment_ms > end_ms):
                return
        raise AssertionError("something is due again and again")

    def _settle(self) -> None:
        """Do what is due now, and hear the news, until there are none."""
        while True:
            moment_ms = self.ledger.next_moment_ms()
            due = moment_ms is not None and moment_ms <= self.now_ms
            if due:
                self.ledger.tidy(self.now_ms)
            news = [
                told
                for holder in (WORKER, MORTAL)
                if holder.id not in self.dead
                for told in self.ledger.take_news(holder, self.now_ms)
            ]
            for lease_id, answer in news:
                if lease_id in self.withdrawn:
                    raise AssertionError(f"{lease_id} was told something after it had left")
                del self.waiting[lease_id]
                self._tell(lease_id, answer)
            if not due and not news:
                break
        if self.watch is not None:
            self.watch(self)

    def _tell(self, lease_id: str, answer: Granted | Denied) -> None:
        assert lease_id not in self.outcomes, f"{lease_id} was answered twice"
        self.outcomes[lease_id] = Outcome(self.now_ms, answer)
        if isinstance(answer, Granted):
            reservation = self.asked[lease_id]
            self.held[lease_id] = answer
            self.granted_tokens[reservation.lane, reservation.tenant] += reservation.total_tokens
