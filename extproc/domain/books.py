"""The books: who holds what, and the one place where a reservation is granted or refused.

`Books` is the model of the ledger. The in-memory ledger runs it as it is; the Lua scripts of the shared
ledger must give the same answers for the same history. It is pure: time comes in with every call, and
nothing here is shared or locked.

A reservation takes every scope or none. It checks, in this order: whether the deadline can be met, the
tenant's two rates, the tenant's two in-flight limits, the lane's share of the pool, and the replica: its
token ceiling less the guard band, its prefill window and its request cap. Of the replicas that can take it,
the one with the most room does. A denial names the first scope that refuses and the longest of the waits of
all that do, so that whoever waits that long is not refused again by the next one.

A lease leaves the books in two independent steps, in either order: its stream ends (`release`: tokens and
slots are free), and its access-log record arrives (`book`: the unused part of the rate charge is refunded).
A record that arrives first ends the stream too: Envoy writes it when the HTTP stream is gone. What happens to
leases whose holder has gone is told in `lease`; `reclaim` makes it happen, in steps as small as the caller
likes.

A reservation that may wait and does not fit lines up (see `queue`), unless waiting could not help: it would be
too late, its tenant's rate needs longer than that, or its lane's line is full. Whatever makes room (a release, a
record, a lease that is over, a ticket that leaves, a new capacity, and time: see `wake_at_ms`) lets those go who
fit, in the line's order, and what became of them is news for their holders (see `waiting`). Somebody who will not
wait takes only what those ahead of it would leave.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from extproc.domain.budget import Debt
from extproc.domain.fitting import (
    RATES,
    WHOLE_PERMILLE,
    Fit,
    Refused,
    balance_of,
    drain_ms,
    fit_of,
    lane_prefill_per_minute,
    lane_refusals,
    leaves_room,
    pool_state,
    rank,
    tenant_refusals,
)
from extproc.domain.holdings import LONGEST_RESIDENCE_MS, Held, ReplicaBook, TenantBook
from extproc.domain.lease import RECORD_WAIT_MS, UNDYING, Claim, Holder, Lease, LeaseState
from extproc.domain.policy import Lane, Policy, Pool, Quota, Replica
from extproc.domain.queue import Line, Outlook, Ticket, Tried
from extproc.domain.reservation import Denied, Granted, Queued, Reservation, Scope
from extproc.domain.snapshot import LaneState, ReplicaState, Snapshot, TenantState
from extproc.domain.waiting import Waiting

STALE_DUES_MOST = 64
"""The queue of due moments is rebuilt when more than this, and more than half of it, is out of date."""


PROMOTED_AT_ONCE = 32
"""Steps that one call may spend on letting waiting requests go; what is left is due at once (`wake_at_ms`)."""

EXPIRED_AT_ONCE = 8
"""Tickets that one call may end because their time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed:
    """How many leases took a step because their moment had come; some were orphaned and freed in one."""

    orphaned: int = 0
    freed: int = 0
    forgotten: int = 0
    taken_back: int = 0


# What is not in the books, to be looked at and never written to.
_UNUSED_TENANT = TenantBook()
_UNUSED_REPLICA = ReplicaBook()
_NOTHING_HELD = Held()
_NOTHING_OWED = Debt()
_NOTHING_RECLAIMED = Reclaimed()


@dataclass(frozen=True, slots=True)
class _Checked:
    """What stands in a reservation's way, in the order of the scopes, and where it would go."""

    tenant: tuple[Refused, ...]
    lane: tuple[Refused, ...]
    best: Fit
    window_ms: int | None  # when time alone may open a replica's prefill window
    in_time: bool  # whether the deadline can be met on any replica

    @property
    def refused(self) -> tuple[Refused, ...]:
        scope, wait_ms = self.best.scope, self.best.wait_ms
        if scope is None:
            return self.tenant + self.lane
        if scope is Scope.DEADLINE:
            return ((scope, wait_ms), *self.tenant, *self.lane)
        return (*self.tenant, *self.lane, (scope, wait_ms))


@dataclass(slots=True)
class Books:
    """All balances of one ledger domain."""

    tenants: OrderedDict[str, TenantBook] = field(default_factory=OrderedDict)
    replicas: OrderedDict[tuple[str, str], ReplicaBook] = field(default_factory=OrderedDict)
    lanes: dict[tuple[str, Lane], Held] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    lane_prefill: OrderedDict[tuple[str, Lane], Debt] = field(default_factory=OrderedDict)
    waiting: Waiting = field(default_factory=Waiting)
    _dues: list[tuple[int, str]] = field(default_factory=list)

    # Taking.

    def reserve(
        self, reservation: Reservation, now_ms: int, holder: Holder = UNDYING
    ) -> Granted | Denied | Queued:
        """Grant every scope of the reservation, or none; or let it wait, if its lane has room for that.

        A lease that is already held is granted again, and a request that already waits goes on waiting.
        """
        waiting = self.waiting
        waiting.hear(holder, now_ms)
        existing = self.leases.get(reservation.lease_id)
        if existing is not None and existing.state is not LeaseState.RELEASED:
            if existing.state is LeaseState.PROMISED:
                self._claim(existing, holder, now_ms)
                waiting.drop_news(holder.id, existing.lease_id)
            tenant = self.tenants.get(reservation.tenant) or TenantBook()
            book = self.replicas[existing.pool, existing.replica]
            return Granted(
                lease_id=existing.lease_id,
                replica=existing.replica,
                ttft_ms=reservation.pool.prefill_ms(book.backlog_tokens(reservation.pool, now_ms)),
                balance=balance_of(tenant, reservation.quota, now_ms),
            )
        ticket = waiting.tickets.get(reservation.lease_id)
        if ticket is not None:
            return self._queued(ticket, now_ms)

        if waiting.tickets:
            self._expire(now_ms)
        if reservation.pool.name not in waiting.lines:
            checked = self._check(reservation, reservation.pool, reservation.deadline_in_ms, now_ms)
            if not checked.refused:
                return self._grant(
                    reservation, now_ms, pool=reservation.pool, fit=checked.best, holder=holder
                )
            if not reservation.hold_ms:
                return self._denied(reservation, checked.refused, now_ms)
        return self._line_up(reservation, holder, now_ms)

    def _grant(
        self,
        reservation: Reservation,
        now_ms: int,
        *,
        pool: Pool,
        fit: Fit,
        holder: Holder,
        ticket: Ticket | None = None,
    ) -> Granted:
        """Take every scope. What is granted to a `ticket` whose caller is not asking is only promised yet."""
        quota = reservation.quota
        tenant = self.tenants.get(reservation.tenant) or TenantBook()
        level_parts = 0
        if quota.tokens_per_minute is not None:
            tenant.token_debt.decay(quota.tokens_per_minute, now_ms)
            level_parts = tenant.token_debt.charge(reservation.work_units, now_ms)
        if quota.requests_per_minute is not None:
            tenant.request_debt.decay(quota.requests_per_minute, now_ms)
            tenant.request_debt.charge(1, now_ms)
        self.tenants[reservation.tenant] = tenant
        promised = ticket is not None and not ticket.fresh
        lease = Lease(
            lease_id=reservation.lease_id,
            holder=holder.id,
            tenant=reservation.tenant,
            lane=reservation.lane,
            pool=reservation.pool.name,
            replica=fit.replica.name,
            tokens=reservation.total_tokens,
            work_units=reservation.work_units,
            rate_per_minute=quota.tokens_per_minute,
            level_parts=level_parts,
            residence_ms=min(reservation.residence_ms, LONGEST_RESIDENCE_MS),
            granted_at_ms=now_ms,
            charged_at_ms=now_ms,
            orphan_grace_ms=holder.orphan_grace_ms,
            policy_version=reservation.policy_version,
            state=LeaseState.PROMISED if promised else LeaseState.HELD,
            due_at_ms=now_ms + (holder.reply_ms if promised else holder.lease_ttl_ms),
        )
        self._hold(lease)
        self.replicas[lease.pool, lease.replica].add_prefill(reservation.input_tokens, pool, now_ms)
        share_permille = reservation.lane_terms.prefill_share_permille
        if share_permille < WHOLE_PERMILLE:
            debt = self.lane_prefill.get((lease.pool, lease.lane))
            if debt is None:
                debt = self.lane_prefill[lease.pool, lease.lane] = Debt()
            debt.decay(lane_prefill_per_minute(pool, share_permille), now_ms)
            debt.charge(reservation.input_tokens, now_ms)
        return Granted(
            lease_id=lease.lease_id,
            replica=lease.replica,
            ttft_ms=fit.ttft_ms,
            balance=balance_of(tenant, quota, now_ms),
            waited_ms=max(0, now_ms - ticket.enqueued_at_ms) if ticket is not None else 0,
        )

    # Waiting.

    def withdraw(self, lease_id: str, now_ms: int) -> bool:
        """A caller that waits has gone: give up its place. False when it does not wait (any more)."""
        ticket = self.waiting.withdrawn(lease_id)
        if ticket is None:
            return False
        self._promote(ticket.reservation.pool.name, now_ms)
        return True

    def take_news(self, holder: Holder, now_ms: int) -> list[tuple[str, Granted | Denied]]:
        """The answers that have fallen for this holder's waiting callers: lease id and answer, each once.

        What was granted is held from now on; whoever takes the news must release what nobody wants.
        """
        self.waiting.hear(holder, now_ms)
        news = self.waiting.take_news(holder)
        for lease_id, answer in news:
            lease = self.leases.get(lease_id)
            if isinstance(answer, Granted) and lease is not None and lease.state is LeaseState.PROMISED:
                self._claim(lease, holder, now_ms)
        return news

    def wake_at_ms(self) -> int | None:
        """When time alone next changes something for those who wait (see `wake`); `None` if nobody waits."""
        moments = [line.wake_at_ms for line in self.waiting.lines.values() if line.wake_at_ms is not None]
        expiry_at_ms = self.waiting.next_expiry_at_ms()
        if expiry_at_ms is not None:
            moments.append(expiry_at_ms)
        return min(moments, default=None)

    def wake(self, now_ms: int) -> None:
        """Let time have its effect on those who wait: some are over, some may go."""
        self._expire(now_ms)
        for name in sorted(self.waiting.lines):
            line = self.waiting.lines.get(name)
            if line is not None and line.wake_at_ms is not None and line.wake_at_ms <= now_ms:
                self._promote(name, now_ms)

    def change_capacity(self, pool: Pool, lane_limits_tokens: Mapping[Lane, int], now_ms: int) -> None:
        """The pool's replicas or limits are others now: whoever waits for it is measured by them.

        So are what its lanes may hold of it, by their names; a lane that is not named keeps its limit.
        """
        line = self.waiting.lines.get(pool.name)
        if line is not None:
            line.resize(pool, lane_limits_tokens)
            self._promote(pool.name, now_ms)

    def _line_up(self, reservation: Reservation, holder: Holder, now_ms: int) -> Granted | Denied | Queued:
        """Take a place in line; then go at once if it is its turn, or wait if that makes sense."""
        waiting = self.waiting
        ticket = waiting.enter(reservation, holder, now_ms)
        name = reservation.pool.name
        self._promote(name, now_ms)
        if ticket.answer is not None:
            return ticket.answer
        line = waiting.lines[name]
        refusal = self._no_use_waiting(ticket, line, now_ms)
        pushed = line.pushed_out_by(ticket) if refusal is None else ()
        if refusal is None and pushed is None:
            refusal = self._sorry(ticket, Scope.QUEUE, now_ms)
        if refusal is not None:
            waiting.leave(ticket)
            return refusal
        for other in pushed or ():
            waiting.answer(other, self._sorry(other, Scope.QUEUE, now_ms))
            line.remove(other)
        waiting.stay(ticket)
        return self._queued(ticket, now_ms)

    def _no_use_waiting(self, ticket: Ticket, line: Line, now_ms: int) -> Denied | None:
        """Why a newcomer that cannot go now should be refused now rather than later, if it should."""
        reservation = ticket.reservation
        checked = self._check(reservation, line.pool, reservation.deadline_in_ms, now_ms)
        ahead = line.ahead_of(ticket)
        state = pool_state(line.pool, self.replicas, now_ms)
        predicted_ms = drain_ms(reservation, line.pool, state, ahead)
        if not ticket.patient:
            refused = checked.refused or ((Scope.REPLICA_TOKENS, predicted_ms),)
            return self._denied(reservation, (*refused, (refused[0][0], predicted_ms)), now_ms)
        late_ms = predicted_ms + line.pool.prefill_ms(reservation.input_tokens) - reservation.deadline_in_ms
        if late_ms > 0 or not checked.in_time:
            return self._sorry(ticket, Scope.DEADLINE, now_ms, wait_ms=max(1, late_ms))
        for scope, exact_ms in checked.tenant:
            if scope in RATES and now_ms + exact_ms >= ticket.expires_at_ms:
                return self._denied(reservation, ((scope, exact_ms), *checked.refused), now_ms)
        return None

    def _expire(self, now_ms: int) -> None:
        """End what is over, and let go whoever it has kept."""
        lines: list[str] = []
        for _ in range(EXPIRED_AT_ONCE):
            ticket = self.waiting.overdue(now_ms)
            if ticket is None:
                break
            lines.append(ticket.reservation.pool.name)
            self.waiting.answer(ticket, self._over(ticket, now_ms))
            self.waiting.leave(ticket)
        for name in sorted(set(lines)):
            self._promote(name, now_ms)

    def _promote(self, name: str, now_ms: int) -> None:
        """Let go who can, of those who wait for this pool."""
        line = self.waiting.lines.get(name)
        if line is None:
            return
        if line.promote(now_ms, lambda ticket: self._attempt(ticket, line, now_ms), most=PROMOTED_AT_ONCE):
            line.wake_at_ms = now_ms
        self.waiting.close_if_empty(name)

    def _promote_after(self, lease: Lease, now_ms: int) -> None:
        """Something of this lease's came free: for its pool, and for its tenant wherever it waits."""
        if not self.waiting.lines:
            return
        for name in sorted(self.waiting.lines):
            let_in = self.waiting.lines[name].unpark(lease.tenant)
            if let_in or name == lease.pool:
                self._promote(name, now_ms)

    def _attempt(self, ticket: Ticket, line: Line, now_ms: int) -> Tried:
        """Grant a ticket's reservation if everything fits; else say what is in the way."""
        reservation, waiting = ticket.reservation, self.waiting
        if not ticket.fresh and ticket.expires_at_ms <= now_ms:
            waiting.answer(ticket, self._over(ticket, now_ms))
            return Tried(Outlook.GONE)
        if waiting.is_silent(ticket.holder, now_ms):
            waiting.answer(ticket, self._sorry(ticket, Scope.WITHDRAWN, now_ms))
            return Tried(Outlook.GONE)
        lane_limit_tokens = line.lanes[reservation.lane].limit_tokens
        if reservation.lane_limit_tokens != lane_limit_tokens:
            reservation = ticket.reservation = replace(reservation, lane_limit_tokens=lane_limit_tokens)
        checked = self._check(reservation, line.pool, ticket.deadline_at_ms - now_ms, now_ms)
        held_back = not ticket.patient and not self._leaves_room(ticket, line, now_ms)
        if not checked.refused and not held_back:
            granted = self._grant(
                reservation,
                now_ms,
                pool=line.pool,
                fit=checked.best,
                holder=ticket.holder,
                ticket=ticket,
            )
            waiting.answer(ticket, granted)
            return Tried(Outlook.GRANTED)
        if ticket.fresh and ticket.expires_at_ms <= now_ms:
            # Its first chance was its last.
            waiting.answer(ticket, self._last_word(ticket, line, checked, now_ms))
            return Tried(Outlook.GONE)
        if not checked.in_time:
            # The backlog shrinks as fast as the time that is left: it will not get better.
            waiting.answer(ticket, self._sorry(ticket, Scope.DEADLINE, now_ms))
            return Tried(Outlook.GONE)
        lane = checked.lane
        if checked.best.scope is not None and reservation.lane_limit_tokens >= line.pool.usable_total_tokens:
            # The lane may have all of the pool: then it is the pool that is full, and small ones may pass.
            lane = tuple(refused for refused in lane if refused[0] is not Scope.LANE_SHARE)
        blocking = checked.tenant or lane
        ticket.behind = blocking[0][0] if blocking else checked.best.scope
        if checked.tenant:
            # A rate is over at a known time; what is in flight ends when it ends.
            timed = all(scope in RATES for scope, _ in checked.tenant)
            wait_ms = max(wait_ms for _, wait_ms in checked.tenant)
            return Tried(Outlook.TENANT, now_ms + wait_ms if timed else None)
        if lane:
            timed = all(scope is Scope.LANE_PREFILL for scope, _ in lane)
            return Tried(Outlook.LANE, now_ms + lane[0][1] if timed else None)
        window_ms = checked.window_ms
        return Tried(Outlook.POOL, now_ms + window_ms if window_ms is not None else None)

    def _leaves_room(self, ticket: Ticket, line: Line, now_ms: int) -> bool:
        state = pool_state(line.pool, self.replicas, now_ms)
        return leaves_room(ticket.reservation, line.pool, state, line.ahead_of(ticket))

    def _last_word(self, ticket: Ticket, line: Line, checked: _Checked, now_ms: int) -> Denied:
        """What a newcomer is told that cannot wait: because of its lane, or because of its deadline."""
        if not ticket.patient or checked.tenant:
            return self._no_use_waiting(ticket, line, now_ms) or self._denied(
                ticket.reservation, checked.refused, now_ms
            )
        return self._sorry(ticket, Scope.DEADLINE, now_ms)

    def _over(self, ticket: Ticket, now_ms: int) -> Denied:
        """What a ticket is told whose time is over: it has waited as long as its lane, or its deadline, lets it."""
        by_lane = ticket.expires_at_ms - ticket.enqueued_at_ms >= ticket.reservation.hold_ms
        return self._sorry(ticket, Scope.RESIDENCE if by_lane else Scope.DEADLINE, now_ms)

    def _sorry(self, ticket: Ticket, scope: Scope, now_ms: int, *, wait_ms: int | None = None) -> Denied:
        """A denial of a ticket that is in its line; the wait is what it would be for another that came now."""
        reservation = ticket.reservation
        line = self.waiting.lines[reservation.pool.name]
        ahead = line.ahead_of(ticket)
        tenant = self.tenants.get(reservation.tenant) or TenantBook()
        if wait_ms is None:
            state = pool_state(line.pool, self.replicas, now_ms)
            waits = [wait for _, wait in tenant_refusals(reservation, tenant, now_ms)]
            wait_ms = max(1, drain_ms(reservation, line.pool, state, ahead), *waits)
        return Denied(
            scope=scope,
            wait_ms=wait_ms,
            balance=balance_of(tenant, reservation.quota, now_ms),
            waited_ms=max(0, now_ms - ticket.enqueued_at_ms),
            behind=ticket.behind,
            ahead_requests=ahead.requests,
        )

    def _queued(self, ticket: Ticket, now_ms: int) -> Queued:
        line = self.waiting.lines[ticket.reservation.pool.name]
        ahead = line.ahead_of(ticket)
        state = pool_state(line.pool, self.replicas, now_ms)
        return Queued(
            lease_id=ticket.reservation.lease_id,
            position=ahead.requests + 1,
            wait_ms=drain_ms(ticket.reservation, line.pool, state, ahead),
            expires_in_ms=max(0, ticket.expires_at_ms - now_ms),
        )

    def _denied(self, reservation: Reservation, refused: tuple[Refused, ...], now_ms: int) -> Denied:
        tenant = self.tenants.get(reservation.tenant) or TenantBook()
        return Denied(
            scope=refused[0][0],
            wait_ms=max(wait_ms for _, wait_ms in refused),
            balance=balance_of(tenant, reservation.quota, now_ms),
        )

    # Keeping.

    def renew(self, holder: Holder, lease_ids: Iterable[str], now_ms: int) -> tuple[str, ...]:
        """Keep the holder's leases for another TTL. Returns those that are unknown: reassert them.

        A lease that was reclaimed while its holder was out of touch is held again: its stream is open.
        """
        unknown: list[str] = []
        for lease_id in lease_ids:
            lease = self.leases.get(lease_id)
            if lease is None:
                unknown.append(lease_id)
                continue
            if lease.state is LeaseState.RELEASED:
                self._hold(lease)
            self._claim(lease, holder, now_ms)
        return tuple(unknown)

    def reassert(self, claim: Claim, now_ms: int, holder: Holder) -> bool:
        """Hold what a living holder says it holds, whatever the limits are: the engine is at work on it.

        False when the lease is known after all; it is then renewed.
        """
        self.withdraw(claim.lease_id, now_ms)  # it has been granted elsewhere
        if not self.renew(holder, (claim.lease_id,), now_ms):
            return False
        level_parts = 0
        if claim.charge_units > 0 and claim.rate_per_minute is not None:
            tenant = self.tenants.setdefault(claim.tenant, TenantBook())
            tenant.token_debt.decay(claim.rate_per_minute, now_ms)
            level_parts = tenant.token_debt.charge(claim.charge_units, now_ms)
        self._hold(
            Lease(
                lease_id=claim.lease_id,
                holder=holder.id,
                tenant=claim.tenant,
                lane=claim.lane,
                pool=claim.pool,
                replica=claim.replica,
                tokens=claim.tokens,
                work_units=claim.charge_units,
                rate_per_minute=claim.rate_per_minute if claim.charge_units > 0 else None,
                level_parts=level_parts,
                residence_ms=min(claim.residence_ms, LONGEST_RESIDENCE_MS),
                granted_at_ms=now_ms - claim.age_ms,
                charged_at_ms=now_ms,
                orphan_grace_ms=holder.orphan_grace_ms,
                policy_version=claim.policy_version,
                state=LeaseState.HELD,
                due_at_ms=now_ms + holder.lease_ttl_ms,
            )
        )
        return True

    # Giving back.

    def release(self, lease_id: str, now_ms: int) -> bool:
        """End the lease's stream: its tokens and slots are free. False when it already was, or is unknown.

        A request of this id that waits gives up its place.
        """
        self.withdraw(lease_id, now_ms)
        lease = self.leases.get(lease_id)
        if lease is None or lease.state is LeaseState.RELEASED:
            return False
        self._free(lease, now_ms)
        self._due(lease, now_ms + RECORD_WAIT_MS)
        self._promote_after(lease, now_ms)
        return True

    def book(self, lease_id: str, work_units: int | None, now_ms: int) -> bool:
        """Book what was really used, once: refund the rest of the charge to the tenant's rate.

        `None` means that the usage is not known: the reserved amount stands. Usage above the reservation is
        charged too. False when the lease is unknown or was booked before.
        """
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        if lease.state is not LeaseState.RELEASED:
            self._free(lease, now_ms)
        self._refund(lease, work_units, now_ms)
        self._promote_after(lease, now_ms)
        return True

    def _refund(self, lease: Lease, work_units: int | None, now_ms: int) -> None:
        if work_units is None or lease.rate_per_minute is None or work_units == lease.work_units:
            return
        tenant = self.tenants.get(lease.tenant) or TenantBook()
        debt = tenant.token_debt
        # Who owes nothing may have been forgotten, with the rate; the lease remembers it.
        debt.decay(debt.rate_per_minute if debt.parts else lease.rate_per_minute, now_ms)
        if work_units > lease.work_units:
            debt.charge(work_units - lease.work_units, now_ms)
        else:
            debt.refund(
                lease.work_units - work_units,
                charged=lease.work_units,
                level_parts=lease.level_parts,
                charged_at_ms=lease.charged_at_ms,
            )
        self.tenants[lease.tenant] = tenant
        if tenant.is_idle(now_ms):
            del self.tenants[lease.tenant]

    def orphan(self, lease_id: str, now_ms: int) -> bool:
        """The holder is leaving and the answer goes on: keep the lease for its grace. False if not held."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.HELD:
            return False
        lease.state = LeaseState.ORPHANED
        self._due(lease, lease.orphaned_until_ms(now_ms))
        return True

    def reclaim(self, now_ms: int, *, most: int) -> Reclaimed:
        """Let at most `most` leases take the step whose moment has come, the longest overdue first."""
        if not self._dues or self._dues[0][0] > now_ms:
            return _NOTHING_RECLAIMED
        due: dict[str, Lease] = {}  # the same moment may be noted twice
        while self._dues and len(due) < most:
            due_at_ms, lease_id = self._dues[0]
            lease = self.leases.get(lease_id)
            if lease is not None and lease.due_at_ms == due_at_ms:
                if due_at_ms > now_ms:
                    break
                due[lease_id] = lease
            heappop(self._dues)  # taken, or out of date: the lease has another moment by now
        orphaned = freed = forgotten = taken_back = 0
        for lease in due.values():
            if self.leases.get(lease.lease_id) is not lease:
                continue  # what came free a moment ago let another one of this id go
            if lease.state is LeaseState.PROMISED:
                self.waiting.drop_news(lease.holder, lease.lease_id)
                self.book(lease.lease_id, 0, now_ms)  # no engine has seen it
                taken_back += 1
                continue
            if lease.state is LeaseState.RELEASED:
                del self.leases[lease.lease_id]
                forgotten += 1
                continue
            until_ms = lease.due_at_ms
            if lease.state is LeaseState.HELD:
                until_ms = lease.orphaned_until_ms(lease.due_at_ms)
                lease.state = LeaseState.ORPHANED
                self._due(lease, until_ms)
                orphaned += 1
            if until_ms <= now_ms:
                self._free(lease, now_ms)
                self._due(lease, now_ms + RECORD_WAIT_MS)
                self._promote_after(lease, now_ms)
                freed += 1
        return Reclaimed(orphaned=orphaned, freed=freed, forgotten=forgotten, taken_back=taken_back)

    def sweep(self, now_ms: int, *, most: int) -> None:
        """Forget up to `most` tenants and replicas that hold and owe nothing; each call looks at others."""
        for _ in range(min(most, len(self.tenants))):
            tenant_id, tenant = self.tenants.popitem(last=False)
            if not tenant.is_idle(now_ms):
                self.tenants[tenant_id] = tenant
        for _ in range(min(most, len(self.replicas))):
            key, book = self.replicas.popitem(last=False)
            if not book.is_idle(now_ms):
                self.replicas[key] = book
        for _ in range(min(most, len(self.lane_prefill))):
            lane_key, debt = self.lane_prefill.popitem(last=False)
            if debt.is_owed(now_ms):
                self.lane_prefill[lane_key] = debt
        self.waiting.sweep(now_ms)

    # Looking.

    def live_leases(self) -> Iterator[Lease]:
        """Leases that hold tokens: their streams are open, or may be."""
        return (lease for lease in self.leases.values() if lease.state is not LeaseState.RELEASED)

    def snapshot(self, policy: Policy, now_ms: int) -> Snapshot:
        """Every balance beside its limit in `policy`. Changes nothing."""
        states = Counter(lease.state for lease in self.leases.values())
        return Snapshot(
            at_ms=now_ms,
            replicas=tuple(
                replica_state(pool, replica, self.replicas.get((pool.name, replica.name)), now_ms)
                for pool in policy.pools.values()
                for replica in pool.replicas
            ),
            lanes=tuple(
                LaneState(
                    pool=pool.name,
                    lane=lane,
                    limit_tokens=pool.lane_limit_tokens(lane_policy.share_permille),
                    reserved_tokens=held.tokens,
                    requests=held.requests,
                    queued_requests=waits.requests,
                    queued_input_tokens=waits.input_tokens,
                    oldest_queued_ms=waits.oldest_ms,
                )
                for pool in policy.pools.values()
                for lane, lane_policy in policy.lanes.items()
                for held in [self.lanes.get((pool.name, lane)) or Held()]
                for waits in [self.waiting.state_of(pool.name, lane, now_ms)]
            ),
            tenants=tuple(
                tenant_state(
                    tenant.id, tenant.tier.name, tenant.tier.quota, self.tenants.get(tenant.id), now_ms
                )
                for tenant in policy.tenants.values()
            ),
            leases=len(self.leases) - states[LeaseState.RELEASED],
            orphans=states[LeaseState.ORPHANED],
            unbooked=states[LeaseState.RELEASED],
        )

    # The books themselves.

    def _hold(self, lease: Lease) -> None:
        self.leases[lease.lease_id] = lease
        for held in self._scopes_of(lease):
            held.add(lease.tokens, lease.residence_ms)
        self._due(lease, lease.due_at_ms)

    def _free(self, lease: Lease, now_ms: int) -> None:
        lease.state = LeaseState.RELEASED
        for held in self._scopes_of(lease):
            held.remove(lease.tokens, lease.residence_ms)
        if not self.lanes[lease.pool, lease.lane].requests:
            del self.lanes[lease.pool, lease.lane]
        if self.replicas[lease.pool, lease.replica].is_idle(now_ms):
            del self.replicas[lease.pool, lease.replica]
        if self.tenants[lease.tenant].is_idle(now_ms):
            del self.tenants[lease.tenant]

    def _scopes_of(self, lease: Lease) -> tuple[Held, Held, Held]:
        tenant = self.tenants.get(lease.tenant)
        if tenant is None:
            tenant = self.tenants[lease.tenant] = TenantBook()
        book = self.replicas.get((lease.pool, lease.replica))
        if book is None:
            book = self.replicas[lease.pool, lease.replica] = ReplicaBook()
        lane_held = self.lanes.get((lease.pool, lease.lane))
        if lane_held is None:
            lane_held = self.lanes[lease.pool, lease.lane] = Held()
        return tenant.held, lane_held, book.held

    def _due(self, lease: Lease, due_at_ms: int) -> None:
        lease.due_at_ms = due_at_ms
        heappush(self._dues, (due_at_ms, lease.lease_id))
        if len(self._dues) > STALE_DUES_MOST + 2 * len(self.leases):
            self._dues = [(lease.due_at_ms, lease.lease_id) for lease in self.leases.values()]
            heapify(self._dues)

    def _claim(self, lease: Lease, holder: Holder, now_ms: int) -> None:
        lease.state, lease.holder = LeaseState.HELD, holder.id
        self._due(lease, now_ms + holder.lease_ttl_ms)

    def _check(self, reservation: Reservation, pool: Pool, left_ms: int, now_ms: int) -> _Checked:
        """What stands in the way of a reservation in `pool`, whose first token must be there in `left_ms`.

        Of the replicas that can take it the one with most room is best; if none can, the one that may first.
        Among equals the one with the shorter backlog, then the one that the policy names first.
        """
        best: Fit | None = None
        window_ms: int | None = None
        in_time = False
        backlogs_tokens: list[int] = []
        for replica in pool.replicas:
            book = self.replicas.get((pool.name, replica.name), _UNUSED_REPLICA)
            fit = fit_of(reservation, pool, replica, book, left_ms=left_ms, now_ms=now_ms)
            in_time = in_time or fit.ttft_ms <= left_ms
            backlogs_tokens.append(fit.backlog_tokens)
            if fit.window_ms is not None and (window_ms is None or fit.window_ms < window_ms):
                window_ms = fit.window_ms
            if best is None or rank(fit) < rank(best):
                best = fit
        assert best is not None, "a pool has at least one replica"
        key = (pool.name, reservation.lane)
        tenant = self.tenants.get(reservation.tenant, _UNUSED_TENANT)
        lane_held = self.lanes.get(key, _NOTHING_HELD)
        lane_prefill = self.lane_prefill.get(key, _NOTHING_OWED)
        return _Checked(
            tenant=tuple(tenant_refusals(reservation, tenant, now_ms)),
            lane=tuple(
                lane_refusals(reservation, pool, lane_held, lane_prefill, backlogs_tokens, now_ms=now_ms)
            ),
            best=best,
            window_ms=window_ms,
            in_time=in_time,
        )


def replica_state(pool: Pool, replica: Replica, book: ReplicaBook | None, now_ms: int) -> ReplicaState:
    """One replica's balances beside its limits; `None` is a replica that holds nothing."""
    book = book or ReplicaBook()
    return ReplicaState(
        pool=pool.name,
        replica=replica.name,
        ceiling_tokens=replica.ceiling_tokens,
        guard_band_tokens=pool.guard_band_tokens(replica),
        reserved_tokens=book.held.tokens,
        requests=book.held.requests,
        request_cap=pool.request_cap,
        prefill_backlog_tokens=book.backlog_tokens(pool, now_ms),
    )


def tenant_state(
    tenant_id: str, tier: str, quota: Quota, book: TenantBook | None, now_ms: int
) -> TenantState:
    """One tenant's balances; `None` is a tenant that holds and owes nothing."""
    book = book or TenantBook()
    balance = balance_of(book, quota, now_ms)
    return TenantState(
        tenant=tenant_id,
        tier=tier,
        inflight_tokens=book.held.tokens,
        inflight_requests=book.held.requests,
        tokens_remaining=balance.tokens_remaining,
        requests_remaining=balance.requests_remaining,
    )
