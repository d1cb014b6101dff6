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
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from extproc.domain import budget
from extproc.domain.holdings import LONGEST_RESIDENCE_MS, Held, ReplicaBook, TenantBook
from extproc.domain.lease import RECORD_WAIT_MS, UNDYING, Claim, Holder, Lease, LeaseState
from extproc.domain.policy import Lane, Policy, Pool, Quota, Replica
from extproc.domain.reservation import Balance, Denied, Granted, Reservation, Scope
from extproc.domain.snapshot import LaneState, ReplicaState, Snapshot, TenantState

STALE_DUES_MOST = 64
"""The queue of due moments is rebuilt when more than this, and more than half of it, is out of date."""


def headroom_tokens(
    *, ceiling_tokens: int, active_tokens: int, queued_tokens: int, guard_band_permille: int
) -> int:
    """Tokens that a replica can still take: ceiling less active, less queued ahead, less the guard band.

    >>> headroom_tokens(
    ...     ceiling_tokens=96_000, active_tokens=58_000, queued_tokens=8_000, guard_band_permille=100
    ... )
    20400
    """
    return ceiling_tokens - active_tokens - queued_tokens - ceiling_tokens * guard_band_permille // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed:
    """How many leases took a step because their moment had come; some were orphaned and freed in one."""

    orphaned: int = 0
    freed: int = 0
    forgotten: int = 0


@dataclass(frozen=True, slots=True)
class _Fit:
    """One replica's answer to a reservation: `scope` is `None` and the wait 0 when it can take it."""

    replica: Replica
    ttft_ms: int
    room_tokens: int
    backlog_tokens: int
    scope: Scope | None
    wait_ms: int


@dataclass(slots=True)
class Books:
    """All balances of one ledger domain."""

    tenants: OrderedDict[str, TenantBook] = field(default_factory=OrderedDict)
    replicas: OrderedDict[tuple[str, str], ReplicaBook] = field(default_factory=OrderedDict)
    lanes: dict[tuple[str, Lane], Held] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    _dues: list[tuple[int, str]] = field(default_factory=list)

    # Taking.

    def reserve(self, reservation: Reservation, now_ms: int, holder: Holder = UNDYING) -> Granted | Denied:
        """Grant every scope of the reservation, or none. A lease that is already held is granted again."""
        quota = reservation.quota
        tenant = self.tenants.get(reservation.tenant) or TenantBook()
        existing = self.leases.get(reservation.lease_id)
        if existing is not None and existing.state is not LeaseState.RELEASED:
            book = self.replicas[existing.pool, existing.replica]
            return Granted(
                lease_id=existing.lease_id,
                replica=existing.replica,
                ttft_ms=reservation.pool.prefill_ms(book.backlog_tokens(reservation.pool, now_ms)),
                balance=_balance(tenant, quota, now_ms),
            )

        fit = self._best_fit(reservation, now_ms)
        lane_held = self.lanes.get((reservation.pool.name, reservation.lane)) or Held()
        refused: list[tuple[Scope, int]] = []
        if fit.scope is Scope.DEADLINE:
            refused.append((fit.scope, fit.wait_ms))
        refused.extend(_tenant_refusals(reservation, tenant, now_ms))
        shortfall_tokens = lane_held.tokens + reservation.total_tokens - reservation.lane_limit_tokens
        if shortfall_tokens > 0:
            refused.append((Scope.LANE_SHARE, lane_held.wait_for_tokens_ms(shortfall_tokens)))
        if fit.scope is not None and fit.scope is not Scope.DEADLINE:
            refused.append((fit.scope, fit.wait_ms))
        if refused:
            return Denied(
                scope=refused[0][0],
                wait_ms=max(wait_ms for _, wait_ms in refused),
                balance=_balance(tenant, quota, now_ms),
            )

        level_parts = 0
        if quota.tokens_per_minute is not None:
            tenant.token_debt.decay(quota.tokens_per_minute, now_ms)
            level_parts = tenant.token_debt.charge(reservation.work_units, now_ms)
        if quota.requests_per_minute is not None:
            tenant.request_debt.decay(quota.requests_per_minute, now_ms)
            tenant.request_debt.charge(1, now_ms)
        self.tenants[reservation.tenant] = tenant
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
            state=LeaseState.HELD,
            due_at_ms=now_ms + holder.lease_ttl_ms,
        )
        self._hold(lease)
        self.replicas[lease.pool, lease.replica].add_prefill(
            reservation.input_tokens, reservation.pool, now_ms
        )
        return Granted(
            lease_id=lease.lease_id,
            replica=lease.replica,
            ttft_ms=fit.ttft_ms,
            balance=_balance(tenant, quota, now_ms),
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
            lease.state, lease.holder = LeaseState.HELD, holder.id
            self._due(lease, now_ms + holder.lease_ttl_ms)
        return tuple(unknown)

    def reassert(self, claim: Claim, now_ms: int, holder: Holder) -> bool:
        """Hold what a living holder says it holds, whatever the limits are: the engine is at work on it.

        False when the lease is known after all; it is then renewed.
        """
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
        """End the lease's stream: its tokens and slots are free. False when it already was, or is unknown."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.state is LeaseState.RELEASED:
            return False
        self._free(lease, now_ms)
        self._due(lease, now_ms + RECORD_WAIT_MS)
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
        if work_units is None or lease.rate_per_minute is None or work_units == lease.work_units:
            return True
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
        return True

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
        due: dict[str, Lease] = {}  # the same moment may be noted twice
        while self._dues and len(due) < most:
            due_at_ms, lease_id = self._dues[0]
            lease = self.leases.get(lease_id)
            if lease is not None and lease.due_at_ms == due_at_ms:
                if due_at_ms > now_ms:
                    break
                due[lease_id] = lease
            heappop(self._dues)  # taken, or out of date: the lease has another moment by now
        orphaned = freed = forgotten = 0
        for lease in due.values():
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
                freed += 1
        return Reclaimed(orphaned=orphaned, freed=freed, forgotten=forgotten)

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
                )
                for pool in policy.pools.values()
                for lane, lane_policy in policy.lanes.items()
                for held in [self.lanes.get((pool.name, lane)) or Held()]
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

    def _best_fit(self, reservation: Reservation, now_ms: int) -> _Fit:
        """Of the replicas that can take it the one with most room; if none can, the one that may first.

        Among equals the one with the shorter backlog, then the one that the policy names first.
        """
        pool = reservation.pool
        best: _Fit | None = None
        for replica in pool.replicas:
            book = self.replicas.get((pool.name, replica.name)) or ReplicaBook()
            fit = _fit(reservation, replica, book, now_ms)
            if best is None or _rank(fit) < _rank(best):
                best = fit
        assert best is not None, "a pool has at least one replica"
        return best


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
    balance = _balance(book, quota, now_ms)
    return TenantState(
        tenant=tenant_id,
        tier=tier,
        inflight_tokens=book.held.tokens,
        inflight_requests=book.held.requests,
        tokens_remaining=balance.tokens_remaining,
        requests_remaining=balance.requests_remaining,
    )


def _rank(fit: _Fit) -> tuple[int, int, int]:
    return fit.wait_ms, -fit.room_tokens, fit.backlog_tokens


def _fit(reservation: Reservation, replica: Replica, book: ReplicaBook, now_ms: int) -> _Fit:
    pool = reservation.pool
    backlog_tokens = book.backlog_tokens(pool, now_ms)
    ttft_ms = pool.prefill_ms(backlog_tokens + reservation.input_tokens)
    room_tokens = headroom_tokens(
        ceiling_tokens=replica.ceiling_tokens,
        active_tokens=book.held.tokens,
        queued_tokens=0,
        guard_band_permille=pool.guard_band_permille,
    )
    scope: Scope | None = None
    longest_ms = 0
    for refused, wait_ms in _replica_refusals(reservation, book, ttft_ms, backlog_tokens, room_tokens):
        scope = scope or refused
        longest_ms = max(longest_ms, wait_ms)
    return _Fit(replica, ttft_ms, room_tokens, backlog_tokens, scope, longest_ms)


def _replica_refusals(
    reservation: Reservation, book: ReplicaBook, ttft_ms: int, backlog_tokens: int, room_tokens: int
) -> Iterator[tuple[Scope, int]]:
    pool = reservation.pool
    if ttft_ms > reservation.deadline_in_ms:
        yield Scope.DEADLINE, ttft_ms - reservation.deadline_in_ms
    if reservation.total_tokens > room_tokens:
        yield Scope.REPLICA_TOKENS, book.held.wait_for_tokens_ms(reservation.total_tokens - room_tokens)
    # A prompt longer than the window must still be served: it waits for an idle window, not for ever.
    window_tokens = pool.prefill_tokens_per_s * pool.prefill_window_ms // 1000
    if backlog_tokens > 0 and backlog_tokens + reservation.input_tokens > window_tokens:
        excess_tokens = min(backlog_tokens, backlog_tokens + reservation.input_tokens - window_tokens)
        yield Scope.PREFILL_WINDOW, pool.prefill_ms(excess_tokens)
    if book.held.requests >= pool.request_cap:
        yield Scope.REQUEST_CAP, book.held.wait_for_requests_ms(book.held.requests + 1 - pool.request_cap)


def _tenant_refusals(
    reservation: Reservation, tenant: TenantBook, now_ms: int
) -> Iterator[tuple[Scope, int]]:
    quota, held = reservation.quota, tenant.held
    for scope, debt, amount, rate, burst in (
        (
            Scope.TENANT_TOKEN_RATE,
            tenant.token_debt,
            reservation.work_units,
            quota.tokens_per_minute,
            quota.burst_tokens,
        ),
        (
            Scope.TENANT_REQUEST_RATE,
            tenant.request_debt,
            1,
            quota.requests_per_minute,
            quota.requests_per_minute,
        ),
    ):
        if rate is not None and burst is not None:
            parts = debt.parts_at(rate, now_ms)
            wait_ms = budget.wait_ms(parts, amount, rate_per_minute=rate, burst=burst)
            if wait_ms > 0:
                yield scope, wait_ms
    if quota.inflight_tokens is not None:
        shortfall_tokens = held.tokens + reservation.total_tokens - quota.inflight_tokens
        if shortfall_tokens > 0:
            yield Scope.TENANT_INFLIGHT_TOKENS, held.wait_for_tokens_ms(shortfall_tokens)
    if quota.inflight_requests is not None and held.requests >= quota.inflight_requests:
        shortfall_requests = held.requests + 1 - quota.inflight_requests
        yield Scope.TENANT_INFLIGHT_REQUESTS, held.wait_for_requests_ms(shortfall_requests)


def _balance(tenant: TenantBook, quota: Quota, now_ms: int) -> Balance:
    tokens_remaining = tokens_reset_ms = requests_remaining = requests_reset_ms = None
    if quota.tokens_per_minute is not None and quota.burst_tokens is not None:
        parts = tenant.token_debt.parts_at(quota.tokens_per_minute, now_ms)
        tokens_remaining = budget.remaining(parts, quota.burst_tokens)
        tokens_reset_ms = budget.reset_ms(parts, quota.tokens_per_minute)
    if quota.requests_per_minute is not None:
        parts = tenant.request_debt.parts_at(quota.requests_per_minute, now_ms)
        requests_remaining = budget.remaining(parts, quota.requests_per_minute)
        requests_reset_ms = budget.reset_ms(parts, quota.requests_per_minute)
    return Balance(
        tokens_remaining=tokens_remaining,
        tokens_reset_ms=tokens_reset_ms,
        requests_remaining=requests_remaining,
        requests_reset_ms=requests_reset_ms,
    )
