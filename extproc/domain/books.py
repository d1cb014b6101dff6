"""The books: who holds what, and the one place where a reservation is granted or refused.

`Books` is the model of the ledger. The in-memory ledger runs it as it is; the Lua scripts of the shared
ledger must give the same answers for the same history. It is pure: time comes in with every call, and
nothing here is shared or locked.

A reservation takes every scope or none. It checks, in this order: whether the deadline can be met, the
tenant's two rates, the tenant's two in-flight limits, the lane's share of the pool, and then, on the
replica with the most room, the token ceiling less the guard band, the prefill window and the request cap.

Waiting times are Little's law on what is held: a scope that holds L tokens whose holders stay W ms on
average frees L / W tokens per millisecond, so a shortfall of S tokens is gone after S x W / L ms. Holders
are counted with their whole permitted residence, which makes the estimate conservative.

A lease leaves the books in two independent steps, in either order: its stream ends (`release`: tokens and
slots are free), and its access-log record arrives (`book`: the unused part of the rate charge is refunded).
A record that arrives first ends the stream too: Envoy writes it when the HTTP stream is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from extproc.domain.budget import Debt
from extproc.domain.policy import Lane, Policy, Pool, Quota, Replica
from extproc.domain.reservation import Answer, Balance, Denied, Granted, Reservation, Scope
from extproc.domain.snapshot import LaneState, ReplicaState, Snapshot, TenantState

PARTS_PER_TOKEN = 1000
"""Prefill backlog is kept in thousandths of a token, so that a rate per second is a rate per millisecond."""


@dataclass(slots=True)
class Held:
    """What a scope holds: tokens, requests, and the sum of their holders' residences."""

    tokens: int = 0
    requests: int = 0
    residence_sum_ms: int = 0

    def add(self, tokens: int, residence_ms: int) -> None:
        """Take one more holder in."""
        self.tokens += tokens
        self.requests += 1
        self.residence_sum_ms += residence_ms

    def remove(self, tokens: int, residence_ms: int) -> None:
        """Let one holder go."""
        self.tokens -= tokens
        self.requests -= 1
        self.residence_sum_ms -= residence_ms

    def wait_for_tokens_ms(self, shortfall_tokens: int) -> int:
        """When `shortfall_tokens` will be free, by Little's law (see the module's docstring)."""
        if self.tokens <= 0:
            return 0
        return -(-shortfall_tokens * self.residence_sum_ms // (self.tokens * self.requests))

    def wait_for_request_ms(self) -> int:
        """When the next holder will leave: a mean residence spread over all holders."""
        if self.requests <= 0:
            return 0
        return -(-self.residence_sum_ms // (self.requests * self.requests))


@dataclass(slots=True)
class ReplicaBook:
    """What one replica holds, and its outstanding prefill in thousandths of a token."""

    held: Held = field(default_factory=Held)
    prefill_parts: int = 0
    prefill_at_ms: int = 0

    def backlog_tokens(self, pool: Pool, now_ms: int) -> int:
        """Prompt tokens that the replica has been given and cannot have read yet, rounded up."""
        elapsed_ms = max(0, now_ms - self.prefill_at_ms)
        left_parts = max(0, self.prefill_parts - elapsed_ms * pool.prefill_tokens_per_s)
        return -(-left_parts // PARTS_PER_TOKEN)

    def add_prefill(self, input_tokens: int, pool: Pool, now_ms: int) -> None:
        """Put one more prompt behind the others."""
        elapsed_ms = max(0, now_ms - self.prefill_at_ms)
        left_parts = max(0, self.prefill_parts - elapsed_ms * pool.prefill_tokens_per_s)
        self.prefill_parts = left_parts + input_tokens * PARTS_PER_TOKEN
        self.prefill_at_ms = max(now_ms, self.prefill_at_ms)


@dataclass(slots=True)
class TenantBook:
    """What one tenant holds and owes."""

    held: Held = field(default_factory=Held)
    token_debt: Debt = field(default_factory=Debt)
    request_debt: Debt = field(default_factory=Debt)


@dataclass(slots=True)
class Lease:
    """One granted reservation. It is forgotten when it is both released and booked, or when it expires."""

    lease_id: str
    tenant: str
    quota: Quota
    lane: Lane
    pool: str
    replica: str
    tokens: int
    work_units: int
    residence_ms: int
    granted_at_ms: int
    policy_version: str
    released: bool = False
    booked: bool = False


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


@dataclass(slots=True)
class Books:
    """All balances of one ledger domain."""

    tenants: dict[str, TenantBook] = field(default_factory=dict)
    replicas: dict[tuple[str, str], ReplicaBook] = field(default_factory=dict)
    lanes: dict[tuple[str, Lane], Held] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    unbooked: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def reserve(self, reservation: Reservation, now_ms: int) -> Answer:
        """Grant every scope of the reservation, or none. A lease that is already held is granted again."""
        tenant = self.tenants.get(reservation.tenant)
        if tenant is None:
            tenant = self.tenants[reservation.tenant] = TenantBook()
        existing = self.leases.get(reservation.lease_id)
        if existing is not None:
            balance = self._balance(tenant, reservation.quota, now_ms)
            return Granted(lease_id=existing.lease_id, replica=existing.replica, ttft_ms=0, balance=balance)
        self._decay(tenant, reservation.quota, now_ms)

        replica, book, backlog_tokens, room_tokens = self._roomiest(reservation.pool, now_ms)
        ttft_ms = reservation.pool.prefill_ms(backlog_tokens + reservation.input_tokens)
        lane_key = (reservation.pool.name, reservation.lane)
        lane_held = self.lanes.get(lane_key)
        if lane_held is None:
            lane_held = self.lanes[lane_key] = Held()

        refused = (
            self._deadline(reservation, ttft_ms)
            or self._tenant_scopes(reservation, tenant)
            or self._lane_scope(reservation, lane_held)
            or self._replica_scopes(reservation, book, backlog_tokens, room_tokens)
        )
        if refused is not None:
            scope, wait_ms = refused
            balance = self._balance(tenant, reservation.quota, now_ms)
            return Denied(scope=scope, wait_ms=wait_ms, balance=balance)

        tokens, residence_ms = reservation.total_tokens, reservation.residence_ms
        if reservation.quota.tokens_per_minute is not None:
            tenant.token_debt.charge(reservation.work_units, now_ms)
        if reservation.quota.requests_per_minute is not None:
            tenant.request_debt.charge(1, now_ms)
        tenant.held.add(tokens, residence_ms)
        lane_held.add(tokens, residence_ms)
        book.held.add(tokens, residence_ms)
        book.add_prefill(reservation.input_tokens, reservation.pool, now_ms)
        self.leases[reservation.lease_id] = Lease(
            lease_id=reservation.lease_id,
            tenant=reservation.tenant,
            quota=reservation.quota,
            lane=reservation.lane,
            pool=reservation.pool.name,
            replica=replica.name,
            tokens=tokens,
            work_units=reservation.work_units,
            residence_ms=residence_ms,
            granted_at_ms=now_ms,
            policy_version=reservation.policy_version,
        )
        return Granted(
            lease_id=reservation.lease_id,
            replica=replica.name,
            ttft_ms=ttft_ms,
            balance=self._balance(tenant, reservation.quota, now_ms),
        )

    def release(self, lease_id: str, now_ms: int) -> bool:
        """End the lease's stream: its tokens and slots are free. False when it already was, or is unknown."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.released:
            return False
        self._free(lease)
        if lease.booked:
            del self.leases[lease_id]
        else:
            self.unbooked[lease_id] = now_ms
        return True

    def book(self, lease_id: str, work_units: int | None, now_ms: int) -> bool:
        """Book what was really used, once: refund the rest of the charge to the tenant's rate.

        `None` means that the usage is not known: the reserved amount stands. Usage above the reservation is
        charged too. False when the lease is unknown or was booked before.
        """
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return False
        self.unbooked.pop(lease_id, None)
        if not lease.released:
            self._free(lease)
        rate_per_minute = lease.quota.tokens_per_minute
        tenant = self.tenants.get(lease.tenant)
        if work_units is not None and rate_per_minute is not None and tenant is not None:
            tenant.token_debt.decay(rate_per_minute, now_ms)
            if work_units < lease.work_units:
                tenant.token_debt.refund(lease.work_units - work_units, lease.granted_at_ms)
            elif work_units > lease.work_units:
                tenant.token_debt.charge(work_units - lease.work_units, now_ms)
        return True

    def forget_unbooked(self, released_before_ms: int, *, most: int = 64) -> list[Lease]:
        """Drop released leases whose record never came: they stay booked by the reserved amount.

        Works in bounded steps; returns the leases that were dropped, oldest first.
        """
        dropped: list[Lease] = []
        while self.unbooked and len(dropped) < most:
            lease_id, released_at_ms = next(iter(self.unbooked.items()))
            if released_at_ms >= released_before_ms:
                break
            del self.unbooked[lease_id]
            dropped.append(self.leases.pop(lease_id))
        return dropped

    def live_leases(self) -> Iterator[Lease]:
        """Leases whose streams are open."""
        return (lease for lease in self.leases.values() if not lease.released)

    def snapshot(self, policy: Policy, now_ms: int) -> Snapshot:
        """Every balance beside its limit in `policy`. Changes nothing."""
        replicas: list[ReplicaState] = []
        lanes: list[LaneState] = []
        for pool in policy.pools.values():
            for replica in pool.replicas:
                book = self.replicas.get((pool.name, replica.name)) or ReplicaBook()
                replicas.append(
                    ReplicaState(
                        pool=pool.name,
                        replica=replica.name,
                        ceiling_tokens=replica.ceiling_tokens,
                        guard_band_tokens=pool.guard_band_tokens(replica),
                        reserved_tokens=book.held.tokens,
                        requests=book.held.requests,
                        request_cap=pool.request_cap,
                        prefill_backlog_tokens=book.backlog_tokens(pool, now_ms),
                    )
                )
            for lane, lane_policy in policy.lanes.items():
                held = self.lanes.get((pool.name, lane)) or Held()
                lanes.append(
                    LaneState(
                        pool=pool.name,
                        lane=lane,
                        limit_tokens=pool.lane_limit_tokens(lane_policy.share_permille),
                        reserved_tokens=held.tokens,
                        requests=held.requests,
                    )
                )
        tenants: list[TenantState] = []
        for tenant in policy.tenants.values():
            tenant_book = self.tenants.get(tenant.id) or TenantBook()
            balance = self._balance(tenant_book, tenant.tier.quota, now_ms)
            tenants.append(
                TenantState(
                    tenant=tenant.id,
                    tier=tenant.tier.name,
                    inflight_tokens=tenant_book.held.tokens,
                    inflight_requests=tenant_book.held.requests,
                    tokens_remaining=balance.tokens_remaining,
                    requests_remaining=balance.requests_remaining,
                )
            )
        return Snapshot(
            at_ms=now_ms,
            replicas=tuple(replicas),
            lanes=tuple(lanes),
            tenants=tuple(tenants),
            leases=len(self.leases) - len(self.unbooked),
            unbooked=len(self.unbooked),
        )

    def _free(self, lease: Lease) -> None:
        lease.released = True
        self.tenants[lease.tenant].held.remove(lease.tokens, lease.residence_ms)
        self.lanes[lease.pool, lease.lane].remove(lease.tokens, lease.residence_ms)
        self.replicas[lease.pool, lease.replica].held.remove(lease.tokens, lease.residence_ms)

    def _roomiest(self, pool: Pool, now_ms: int) -> tuple[Replica, ReplicaBook, int, int]:
        """The replica with the most room; among equals the one with the shorter prefill backlog."""
        best: tuple[int, int, Replica, ReplicaBook] | None = None
        for replica in pool.replicas:
            key = (pool.name, replica.name)
            book = self.replicas.get(key)
            if book is None:
                book = self.replicas[key] = ReplicaBook()
            room_tokens = headroom_tokens(
                ceiling_tokens=replica.ceiling_tokens,
                active_tokens=book.held.tokens,
                queued_tokens=0,
                guard_band_permille=pool.guard_band_permille,
            )
            if best is None or room_tokens >= best[0]:
                backlog_tokens = book.backlog_tokens(pool, now_ms)
                if best is None or room_tokens > best[0] or backlog_tokens < best[1]:
                    best = (room_tokens, backlog_tokens, replica, book)
        assert best is not None, "a pool has at least one replica"
        room_tokens, backlog_tokens, replica, book = best
        return replica, book, backlog_tokens, room_tokens

    @staticmethod
    def _deadline(reservation: Reservation, ttft_ms: int) -> tuple[Scope, int] | None:
        if ttft_ms <= reservation.deadline_in_ms:
            return None
        return Scope.DEADLINE, ttft_ms - reservation.deadline_in_ms

    @staticmethod
    def _tenant_scopes(reservation: Reservation, tenant: TenantBook) -> tuple[Scope, int] | None:
        quota, held = reservation.quota, tenant.held
        if quota.tokens_per_minute is not None:
            assert quota.burst_tokens is not None, "a rate has a burst"
            wait_ms = tenant.token_debt.wait_ms(
                reservation.work_units, quota.tokens_per_minute, quota.burst_tokens
            )
            if wait_ms > 0:
                return Scope.TENANT_TOKEN_RATE, wait_ms
        if quota.requests_per_minute is not None:
            wait_ms = tenant.request_debt.wait_ms(1, quota.requests_per_minute, quota.requests_per_minute)
            if wait_ms > 0:
                return Scope.TENANT_REQUEST_RATE, wait_ms
        if quota.inflight_tokens is not None:
            shortfall_tokens = held.tokens + reservation.total_tokens - quota.inflight_tokens
            if shortfall_tokens > 0:
                return Scope.TENANT_INFLIGHT_TOKENS, held.wait_for_tokens_ms(shortfall_tokens)
        if quota.inflight_requests is not None and held.requests >= quota.inflight_requests:
            return Scope.TENANT_INFLIGHT_REQUESTS, held.wait_for_request_ms()
        return None

    @staticmethod
    def _lane_scope(reservation: Reservation, held: Held) -> tuple[Scope, int] | None:
        shortfall_tokens = held.tokens + reservation.total_tokens - reservation.lane_limit_tokens
        if shortfall_tokens <= 0:
            return None
        return Scope.LANE_SHARE, held.wait_for_tokens_ms(shortfall_tokens)

    @staticmethod
    def _replica_scopes(
        reservation: Reservation, book: ReplicaBook, backlog_tokens: int, room_tokens: int
    ) -> tuple[Scope, int] | None:
        pool = reservation.pool
        shortfall_tokens = reservation.total_tokens - room_tokens
        if shortfall_tokens > 0:
            return Scope.REPLICA_TOKENS, book.held.wait_for_tokens_ms(shortfall_tokens)
        # A prompt longer than the window must still be served: it waits for an idle window, not for ever.
        window_tokens = pool.prefill_tokens_per_s * pool.prefill_window_ms // 1000
        if backlog_tokens > 0 and backlog_tokens + reservation.input_tokens > window_tokens:
            excess_tokens = min(backlog_tokens, backlog_tokens + reservation.input_tokens - window_tokens)
            return Scope.PREFILL_WINDOW, pool.prefill_ms(excess_tokens)
        if book.held.requests >= pool.request_cap:
            return Scope.REQUEST_CAP, book.held.wait_for_request_ms()
        return None

    @staticmethod
    def _decay(tenant: TenantBook, quota: Quota, now_ms: int) -> None:
        if quota.tokens_per_minute is not None:
            tenant.token_debt.decay(quota.tokens_per_minute, now_ms)
        if quota.requests_per_minute is not None:
            tenant.request_debt.decay(quota.requests_per_minute, now_ms)

    def _balance(self, tenant: TenantBook, quota: Quota, now_ms: int) -> Balance:
        self._decay(tenant, quota, now_ms)
        tokens_remaining = tokens_reset_ms = requests_remaining = requests_reset_ms = None
        if quota.tokens_per_minute is not None and quota.burst_tokens is not None:
            tokens_remaining = tenant.token_debt.remaining(quota.burst_tokens)
            tokens_reset_ms = tenant.token_debt.reset_ms(quota.tokens_per_minute)
        if quota.requests_per_minute is not None:
            requests_remaining = tenant.request_debt.remaining(quota.requests_per_minute)
            requests_reset_ms = tenant.request_debt.reset_ms(quota.requests_per_minute)
        return Balance(
            tokens_remaining=tokens_remaining,
            tokens_reset_ms=tokens_reset_ms,
            requests_remaining=requests_remaining,
            requests_reset_ms=requests_reset_ms,
        )
