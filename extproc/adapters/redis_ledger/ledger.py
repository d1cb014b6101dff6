"""The shared ledger's client: what is pending goes out as one call, and a store that fails fails nobody else.

Batching. Whatever is asked in one turn of the event loop leaves as one script call, and while two calls are
on their way everything else waits to go with the next one: batches grow with the load by themselves. All
calls share one connection and are answered in order, so a lease's release never overtakes its reservation or
its renewal.

Time. A reservation that is not answered within the budget is answered here: with this worker's share of the
limits where its lane's posture is `local`, else with `Unavailable`. If the store granted it after all, the
late answer gives it back. Failures in a row open the breaker; then nothing is asked except probes.

Memory. This worker knows its own leases. It renews them together, reasserts those that the store says it has
lost, and after a new connection reasserts them all: the server may be another one, or an empty one.

Alone. While the store is away, reservations of `local` lanes are granted from books in this process: every
limit divided by the number of workers that were last seen alive, with all leases that this worker holds
counted in. When the store is back, those grants are reasserted there with their charges, before anything else
is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from extproc.adapters.redis_ledger import wire
from extproc.adapters.redis_ledger.address import Address
from extproc.adapters.redis_ledger.alone import Alone
from extproc.adapters.redis_ledger.bell import Bell
from extproc.adapters.redis_ledger.breaker import Breaker
from extproc.adapters.redis_ledger.connection import Lost, Reply, ReplyError
from extproc.adapters.redis_ledger.health import LedgerHealth, Totals
from extproc.adapters.redis_ledger.link import ELSEWHERE, LATER, Link
from extproc.adapters.redis_ledger.outbox import Op, Outbox
from extproc.adapters.redis_ledger.scripts import BATCH, KEYS, keys_of
from extproc.adapters.redis_ledger.view import fields_of, snapshot_of
from extproc.adapters.redis_ledger.waiters import REPLY_MS, Waiter, Waiters
from extproc.domain.lease import RECORD_WAIT_MS, Claim, Holder
from extproc.domain.policy import Policy, Posture
from extproc.domain.reservation import (
    Answer,
    Balance,
    Booking,
    Denied,
    Granted,
    Queued,
    Reservation,
    Scope,
    Unavailable,
)
from extproc.domain.snapshot import Snapshot
from extproc.ports import Clock, LedgerFault, PolicySource

log = logging.getLogger(__name__)

CALLS_IN_FLIGHT = 2
"""One is run while the next travels; more would only make batches smaller."""

LISTENING_S = 0.001
"""A loop runs what is due before it reads what has come; after this it has read it."""

LEASES_PER_RENEWAL = 128
KEYS_OUTLIVE_MS = 3_600_000
MS_PER_MINUTE = 60_000

WITHDRAWN = Denied(scope=Scope.WITHDRAWN, wait_ms=0, balance=Balance())

BUSY = frozenset({"TRYAGAIN", "BUSY"})
BUSY_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """How this worker uses the store.

    `budget_ms` is how long a reservation may take; a call that is silent for `silence_ms` costs the connection.
    """

    domain: str = "default"
    budget_ms: int = 50
    silence_ms: int = 1_000


@dataclass(slots=True, eq=False)
class _Call:
    """Operations that are on their way together, since `sent_s`."""

    sent_s: float
    ops: Sequence[Op]


@dataclass(slots=True)
class _Own:
    """A lease of this worker. `charge` is set while the store has not seen its charge."""

    asked: Reservation
    replica: str
    granted_at_us: int
    charge: bool = False


class RedisLedger:
    """Answers `Ledger` from a store that many workers share. `start` it before use, and `stop` it."""

    def __init__(
        self,
        address: Address,
        *,
        holder_id: str,
        policy: PolicySource,
        clock: Clock,
        options: LedgerOptions | None = None,
        breaker: Breaker | None = None,
        on_call: Callable[[int], None] | None = None,
    ) -> None:
        """`on_call` is told how many microseconds each answered call took."""
        self._options = options or LedgerOptions()
        self._budget_s = self._options.budget_ms / 1000
        self._keys = keys_of(self._options.domain)
        self._holder_id = holder_id
        self._policy = policy
        self._clock = clock
        self._breaker = breaker or Breaker()
        self._on_call = on_call
        self._link = Link(address, on_up=self._link_up, on_down=self._link_down)
        self._loop: asyncio.AbstractEventLoop
        self._fault = "not connected yet"
        self._ready = False  # the store answers and knows our leases
        self._stopping = False
        self._outbox = Outbox(claim_of=self._claim_of, reasserted=self._reasserted)
        self._waiters = Waiters(look=self._look, overdue=self._overdue)
        channel = self._keys[KEYS.index("waits")] + b":" + holder_id.encode()
        self._bell = Bell(address, channel, on_ring=self._look)
        self._calls: deque[_Call] = deque()
        self._flush_is_due = False
        self._unanswered: deque[Op] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._renewal: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._own: dict[str, _Own] = {}
        self._doubtful: OrderedDict[str, float] = OrderedDict()
        self._alone: Alone | None = None
        self._workers = 1
        self._cursor = "0"
        self._keep: tuple[str, int] = ("", 0)
        self._totals = Totals()
        self._failed_s = 0.0
        self._held_back = False
        self._first_arrival = asyncio.Event()

    # The port.

    def reserve(self, reservation: Reservation, deliver: Callable[[Answer], None]) -> None:
        """See `Ledger.reserve`."""
        if self._breaker.is_open or self._stopping:
            self._deliver(deliver, self._answer_alone(reservation))
            return
        self._ask(reservation, deliver)

    def _ask(self, reservation: Reservation, deliver: Callable[[Answer], None]) -> None:
        op = self._outbox.reserve(reservation, deliver, self._loop.time() + self._budget_s)
        self._unanswered.append(op)
        if self._timer is None:
            self._timer = self._loop.call_at(op.due_s, self._on_timer)
        self._flush_soon()

    def withdraw(self, lease_id: str) -> None:
        """See `Ledger.withdraw`."""
        waiter = self._waiters.leave(lease_id)
        if waiter is not None:
            self._take_back(lease_id)
            self._deliver(waiter.deliver, WITHDRAWN)
            return
        for op in self._unanswered:
            if op.deliver is not None and op.asked is not None and op.asked.lease_id == lease_id:
                op.leaving = True  # it is answered within the budget

    def release(self, lease_id: str) -> None:
        """See `Ledger.release`."""
        own = self._own.pop(lease_id, None)
        if self._alone is not None:
            self._alone.release(lease_id)
            if own is not None and own.charge and lease_id not in self._doubtful:
                return  # the store has never heard of it
        self._settle(wire.release_op(lease_id))

    def book(self, booking: Booking) -> None:
        """See `Ledger.book`."""
        lease_id = booking.lease_id
        own = self._own.get(lease_id)
        if own is not None and not own.charge:
            del self._own[lease_id]  # its HTTP stream is gone, so nobody needs to keep it alive
        known_here = self._alone is not None and self._alone.book(lease_id, booking.work_units)
        if known_here and (own is None or own.charge):
            self._own.pop(lease_id, None)
            return  # the store has never heard of it
        self._settle(wire.book_op(lease_id, booking.work_units))

    async def snapshot(self, policy: Policy) -> Snapshot:
        """See `Ledger.snapshot`."""
        if self._breaker.is_open or not self._link.is_up:
            raise LedgerFault(f"the ledger's store cannot be asked: {self._fault}")
        fields = fields_of(policy)
        replied: asyncio.Future[Any] = self._loop.create_future()
        self._add(wire.view_op(fields), partial(_resolve, replied))
        try:
            async with asyncio.timeout(self._options.silence_ms / 1000):
                now_ms, stored, waits = await replied
        except TimeoutError:
            raise LedgerFault("the ledger's store does not answer") from None
        return snapshot_of(dict(zip(fields, stored, strict=True)), waits, policy, now_ms)

    def policy_changed(self, policy: Policy) -> None:
        """A new policy is in force: whoever waits is measured by its pools, in whichever worker it waits."""
        if self._ready and not self._breaker.is_open:
            for pool in policy.pools.values():
                self._outbox.resize(pool, policy)
            self._flush_soon()
        # Else nobody waits here, or asks again later, and that is noticed.

    # Life.

    async def start(self) -> None:
        """Connect, and go on trying. Returns when the store is there or has had its time."""
        self._loop = asyncio.get_running_loop()
        self._link.start()
        self._renew()
        self._watch()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.silence_ms / 1000):
                await self._first_arrival.wait()
        if not self._ready:
            log.error("ledger store is not there; postures apply", extra={"fault": self._fault})

    async def stop(self) -> None:
        """Leave: what is still held here becomes an orphan, for its answers go on. Then close."""
        self._stopping = True
        self._waiters.stop()
        for waiter in self._waiters.leave_all():
            self._take_back(waiter.asked.lease_id)
            self._deliver(waiter.deliver, WITHDRAWN)
        await self._bell.stop()
        for handle in (self._renewal, self._watching, self._timer):
            if handle is not None:
                handle.cancel()
        for lease_id in self._own:
            self._outbox.add(wire.orphan_op(lease_id))
        self._own.clear()
        self._outbox.add(wire.alive_op(0))
        until_s = self._loop.time() + self._options.silence_ms / 1000
        while (self._outbox or self._calls) and self._link.is_up and self._loop.time() < until_s:
            self._flush()
            await asyncio.sleep(0.002)
        await self._link.stop()

    @property
    def workers(self) -> int:
        """How many were alive when the store was last asked, this one included."""
        return self._workers

    def health(self) -> LedgerHealth:
        """How it is going."""
        totals = self._totals
        return LedgerHealth(
            available=self._ready and not self._breaker.is_open,
            fault=self._fault,
            workers=self._workers,
            leases_held=len(self._own),
            waiting_ops=len(self._outbox),
            calls_total=totals.calls,
            ops_total=totals.ops,
            connections_total=self._link.connections_total,
            breaker_opened_total=self._breaker.opened_total,
            unanswered_total=totals.unanswered,
            late_grants_total=totals.late_grants,
            local_grants_total=totals.local_grants,
            reasserted_total=totals.reasserted,
            orphaned_total=totals.orphaned,
            reclaimed_total=totals.reclaimed,
            unbooked_total=totals.unbooked,
            settles_dropped_total=self._outbox.dropped_total,
            failed_ops_total=totals.failed_ops,
        )

    # Calls.

    def _add(self, op: wire.Op, on_reply: Callable[[Any], None] | None = None) -> None:
        self._outbox.add(op, on_reply)
        self._flush_soon()

    def _settle(self, op: wire.Op) -> None:
        self._outbox.settle(op, self._loop.time())
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        while (
            len(self._calls) < CALLS_IN_FLIGHT
            and self._ready
            and not self._held_back
            and not self._breaker.is_open
            and self._link.is_up
        ):
            ops = self._outbox.take()
            if not ops:
                return
            if self._waiters and not ops[0].alone:
                ops.append(Op("t", wire.news_op(), 0, None, None, self._told))
            self._send(ops)

    def _send(self, ops: Sequence[Op]) -> None:
        argument = self._outbox.argument(ops, holder=self._holder(), keep_ms=self._keep_ms())
        call = _Call(self._loop.time(), ops)
        self._calls.append(call)
        self._totals.calls += 1
        self._totals.ops += len(ops)
        self._link.call(BATCH, self._keys, argument, partial(self._replied, call))

    def _replied(self, call: _Call, reply: Reply) -> None:
        self._calls.remove(call)
        if self._on_call is not None and not isinstance(reply, Lost):
            self._on_call(int((self._loop.time() - call.sent_s) * 1_000_000))
        if isinstance(reply, Lost):
            self._outbox.requeue(call.ops)
        elif isinstance(reply, ReplyError):
            self._refused(call.ops, reply)
        else:
            self._succeeded(call.ops, reply)
        self._flush()

    def _succeeded(self, ops: Sequence[Op], reply: Reply) -> None:
        try:
            now_ms, orphaned, reclaimed, unbooked, replies, _, wake_at_ms = wire.decode(reply)
            answers = list(zip(ops, replies, strict=True))
        except (ValueError, TypeError):
            self._refused(ops, ReplyError("MALFORMED reply"))
            return
        totals = self._totals
        totals.orphaned += orphaned
        totals.reclaimed += reclaimed
        totals.unbooked += unbooked
        if self._breaker.succeeded():
            log.warning("ledger store answers again", extra={"held": len(self._own)})
        if self._alone is not None and self._ready:
            self._restore(everything=False)
        if wake_at_ms is not False:
            self._waiters.look_in(wake_at_ms - now_ms)  # who makes a moment sees to it, whoever waits for it
        now_us = self._clock.now_us()
        for op, answer in answers:
            if op.verb == "q":
                self._answered(op, answer, now_us)
            elif op.verb == "k":
                if answer is not False:
                    self._waiters.look_in(answer - now_ms)
            elif op.on_reply is not None:
                op.on_reply(answer)

    def _answered(self, op: Op, reply: Sequence[Any], now_us: int) -> None:
        asked = op.asked
        assert asked is not None
        answer = wire.answer_of(reply, asked)
        deliver, op.deliver = op.deliver, None
        if isinstance(answer, Queued):
            if deliver is not None:
                self._queued(op, deliver, answer)
            # Else it has been given up, and the release behind it ends its wait.
        elif deliver is not None:
            if isinstance(answer, Granted):
                self._own[asked.lease_id] = _Own(asked, answer.replica, now_us)
            self._deliver(deliver, answer)
        elif isinstance(answer, Granted):
            own = self._own.get(asked.lease_id)
            if own is not None:
                own.charge = False  # granted here meanwhile, and now the store knows it too
            else:
                self._totals.late_grants += 1  # its release is behind it on the same connection

    def _refused(self, ops: Sequence[Op], error: ReplyError) -> None:
        """The server has done nothing of this call."""
        if error.code in LATER or error.code in ELSEWHERE:
            self._outbox.requeue(ops)
            if error.code in BUSY:
                self._held_back = True
                self._loop.call_later(BUSY_PAUSE_S, self._go_on)
            return
        if len(ops) > 1:
            # One of them may be at fault: the others must not suffer for it.
            for op in ops:
                op.alone = True
            self._outbox.requeue(ops)
            return
        self._totals.failed_ops += 1
        if self._fault != error.code:
            log.error("ledger operation failed", extra={"verb": ops[0].verb, "code": error.code})
        self._fault = error.code
        if ops[0].deliver is not None:
            self._give_up(ops[0])
        self._failed()

    def _go_on(self) -> None:
        self._held_back = False
        self._flush()

    def _deliver(self, deliver: Callable[[Answer], None], answer: Answer) -> None:
        try:
            deliver(answer)
        except Exception:  # one caller's fault must not take the answers of the others
            log.exception("delivery of a ledger answer failed")

    # Those who wait.

    def _queued(self, op: Op, deliver: Callable[[Answer], None], answer: Queued) -> None:
        asked = op.asked
        assert asked is not None
        if op.leaving or self._stopping:
            self._take_back(asked.lease_id)
            self._deliver(deliver, WITHDRAWN)
            return
        self._bell.start()
        self._waiters.enter(asked, deliver, answer.expires_in_ms)
        policy = self._policy.current
        if asked.policy_version != policy.version and (pool := policy.pools.get(asked.pool.name)):
            # It began under another policy, and has brought that one's pool.
            self._outbox.resize(pool, policy)
            self._flush_soon()

    def _take_back(self, lease_id: str) -> None:
        """Nobody wants this any more, neither a place in line nor what may have been granted to it."""
        self._settle(wire.withdraw_op(lease_id))
        self._settle(wire.book_op(lease_id, 0))

    def _look(self) -> None:
        """Let time have its effect on those who wait; what has been decided comes back with the same call."""
        if self._ready and not self._breaker.is_open:
            self._add(wire.wake_op())

    def _told(self, news: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """What has become of callers of this worker."""
        for lease_id, reply in news:
            waiter = self._waiters.leave(lease_id)
            if waiter is None:
                if isinstance(reply[0], str) and lease_id not in self._own:
                    self._take_back(lease_id)
                continue
            answer = wire.final_of(reply, waiter.asked)
            if isinstance(answer, Granted):
                self._own[lease_id] = _Own(waiter.asked, answer.replica, self._clock.now_us())
            self._deliver(waiter.deliver, answer)

    def _overdue(self, waiter: Waiter) -> None:
        """The store has not said in time what has become of it."""
        self._totals.unanswered += 1
        self._take_back(waiter.asked.lease_id)
        self._deliver(waiter.deliver, Unavailable(wait_ms=self._breaker.wait_ms(self._now_ms())))

    def _ask_again(self) -> None:
        """Over a new connection: news may have been lost with the old one, and the line with its server."""
        now_s = self._loop.time()
        for waiter in self._waiters.leave_all():
            self._ask(waiter.asks_again(now_s), waiter.deliver)

    def _wait_no_more(self) -> None:
        """The store is away: those who wait there are answered as those who ask now."""
        for waiter in self._waiters.leave_all():
            answer = self._answer_alone(waiter.asked)
            if not isinstance(answer, Granted):
                self._take_back(waiter.asked.lease_id)
            self._deliver(waiter.deliver, answer)

    # Failures.

    def _on_timer(self) -> None:
        """Somebody's time is over, unless this worker was too busy to hear: let the loop read what has come."""
        self._timer = self._loop.call_later(LISTENING_S, self._expire, self._loop.time())

    def _expire(self, now_s: float) -> None:
        """Answer what should have been answered before `now_s`."""
        unanswered = self._unanswered
        late = False
        while unanswered and (unanswered[0].deliver is None or unanswered[0].due_s <= now_s):
            op = unanswered.popleft()
            if op.deliver is not None:
                late = True
                self._give_up(op)
        self._timer = self._loop.call_at(unanswered[0].due_s, self._on_timer) if unanswered else None
        # Requests that wait for the same silence are one failure, not many.
        if late and now_s - self._failed_s >= self._budget_s / 2:
            self._fault = "no answer in time"
            self._failed()

    def _give_up(self, op: Op) -> None:
        deliver, op.deliver = op.deliver, None
        assert deliver is not None
        assert op.asked is not None
        self._totals.unanswered += 1
        answer = self._answer_alone(op.asked)
        if op.sent and not isinstance(answer, Granted):
            # It may have been granted. The release is behind the reservation on the same connection; if that
            # breaks, the renewal repeats the release over the next one.
            self._doubtful[op.asked.lease_id] = self._loop.time()
            self._settle(wire.release_op(op.asked.lease_id))
        self._deliver(deliver, answer)

    def _failed(self) -> None:
        self._failed_s = self._loop.time()
        if self._breaker.failed(self._now_ms()):
            log.error("ledger store does not answer; postures apply", extra={"fault": self._fault})
            for op in self._unanswered:
                if op.deliver is not None:
                    self._give_up(op)
            self._unanswered.clear()
            self._wait_no_more()

    def _link_up(self) -> None:
        self._probe()

    def _link_down(self, fault: str) -> None:
        self._ready = False
        self._fault = fault
        if not self._stopping:
            self._failed()

    def _probe(self) -> None:
        """Ask one small thing; the answer says that the store is there."""
        self._send((Op("h", wire.alive_op(self._holder().lease_ttl_ms), 0, None, None, self._arrived),))

    def _arrived(self, workers: int) -> None:
        """The store has answered over a connection that was not used before, or not for long."""
        self._workers = max(1, workers)
        self._first_arrival.set()
        if not self._ready:
            self._ready = True
            self._restore(everything=True)

    def _restore(self, *, everything: bool) -> None:
        """Tell the store what it may not know, before anything else is asked of it.

        `everything` after a new connection: it may lead to a server that has lost the last moments, or all.
        """
        self._fault = ""
        self._alone = None
        if everything:
            self._outbox.begin_anew(self._own, self._loop.time())
            self._ask_again()
        else:
            self._outbox.reassert(lease_id for lease_id, own in self._own.items() if own.charge)
        self._flush_soon()

    def _watch(self) -> None:
        """A few times a second: give up a silent connection, and probe while the breaker is open."""
        self._watching = self._loop.call_later(self._options.silence_ms / 4000, self._watch)
        if self._calls:
            if self._loop.time() - self._calls[0].sent_s > self._options.silence_ms / 1000:
                self._link.drop()
        elif self._link.is_up and (self._breaker.may_probe(self._now_ms()) or not self._ready):
            self._probe()

    # Keeping what is held.

    def _renew(self) -> None:
        holder = self._holder()
        self._renewal = self._loop.call_later(holder.lease_ttl_ms / 3000, self._renew)
        if not self._ready or self._breaker.is_open:
            return
        self._add(wire.alive_op(holder.lease_ttl_ms), self._arrived)
        ids = list(self._own)
        for first in range(0, len(ids), LEASES_PER_RENEWAL):
            chunk = ids[first : first + LEASES_PER_RENEWAL]
            self._add(wire.renew_op(chunk), self._unknown)
        self._add(wire.sweep_op(self._cursor), self._swept)
        oldest_s = self._loop.time() - holder.lease_ttl_ms / 1000
        for lease_id in islice(self._doubtful, LEASES_PER_RENEWAL):
            self._add(wire.release_op(lease_id))
        while self._doubtful and next(iter(self._doubtful.values())) < oldest_s:
            self._doubtful.popitem(last=False)

    def _unknown(self, lease_ids: Sequence[str]) -> None:
        """The store has lost these leases; those that are still ours are claimed again."""
        self._outbox.reassert(lease_id for lease_id in lease_ids if lease_id in self._own)
        self._flush_soon()

    def _swept(self, cursor: str) -> None:
        self._cursor = cursor

    def _claim_of(self, lease_id: str) -> Claim | None:
        own = self._own.get(lease_id)
        if own is None:
            return None
        asked = own.asked
        return Claim(
            lease_id=lease_id,
            tenant=asked.tenant,
            lane=asked.lane,
            pool=asked.pool.name,
            replica=own.replica,
            tokens=asked.total_tokens,
            charge_units=asked.work_units if own.charge else 0,
            rate_per_minute=asked.quota.tokens_per_minute,
            residence_ms=asked.residence_ms,
            age_ms=max(0, (self._clock.now_us() - own.granted_at_us) // 1000),
            policy_version=asked.policy_version,
        )

    def _reasserted(self, lease_id: str, was_unknown: int) -> None:
        own = self._own.get(lease_id)
        if own is not None:
            own.charge = False
        self._totals.reasserted += was_unknown

    # Alone.

    def _answer_alone(self, asked: Reservation) -> Answer:
        """What this worker says without the store."""
        lane = self._policy.current.lanes.get(asked.lane)
        if not self._stopping and lane is not None and lane.posture is Posture.LOCAL:
            answer = self._reserve_alone(asked)
            if answer is not None:
                return answer
        return Unavailable(wait_ms=self._breaker.wait_ms(self._now_ms()))

    def _reserve_alone(self, asked: Reservation) -> Granted | Denied | None:
        if self._alone is None:
            ids = tuple(self._own)
            claims = (claim for lease_id in ids if (claim := self._claim_of(lease_id)) is not None)
            self._alone = Alone(claims, now_ms=self._now_ms, still_held=self._own.__contains__)
        answer = self._alone.reserve(asked, self._workers)
        if isinstance(answer, Granted):
            self._totals.local_grants += 1
            self._own[asked.lease_id] = _Own(asked, answer.replica, self._clock.now_us(), charge=True)
        return answer

    # Small parts.

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

    def _holder(self) -> Holder:
        limits = self._policy.current.limits
        return Holder(
            id=self._holder_id,
            lease_ttl_ms=limits.lease_ttl_ms,
            orphan_grace_ms=limits.orphan_grace_ms,
            reply_ms=REPLY_MS,
        )

    def _keep_ms(self) -> int:
        """How long keys outlive the last call: longer than any lease, record or bucket needs."""
        policy = self._policy.current
        if self._keep[0] != policy.version:
            resets = [0]
            for tenant in policy.tenants.values():
                quota = tenant.tier.quota
                if quota.tokens_per_minute is not None and quota.burst_tokens is not None:
                    resets.append(2 * quota.burst_tokens * MS_PER_MINUTE // quota.tokens_per_minute)
            limits = policy.limits
            leases_ms = limits.lease_ttl_ms + limits.orphan_grace_ms + RECORD_WAIT_MS
            self._keep = policy.version, max(*resets, leases_ms) + KEYS_OUTLIVE_MS
        return self._keep[1]


def _resolve(replied: asyncio.Future[Any], reply: Any) -> None:
    if not replied.done():
        replied.set_result(reply)
