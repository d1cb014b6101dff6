"""What goes into a script and what comes out, as msgpack. The shapes are told in the Lua files' headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.domain.budget import Debt, remaining, reset_ms
from extproc.domain.holdings import Held, ReplicaBook, TenantBook
from extproc.domain.lease import Claim, Holder
from extproc.domain.policy import Lane, Pool, Quota
from extproc.domain.reservation import Balance, Denied, Granted, Queued, Reservation, Scope

Op = tuple[Any, ...]

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode

SCOPES: Sequence[Scope] = (
    Scope.DEADLINE,
    Scope.TENANT_TOKEN_RATE,
    Scope.TENANT_REQUEST_RATE,
    Scope.TENANT_INFLIGHT_TOKENS,
    Scope.TENANT_INFLIGHT_REQUESTS,
    Scope.LANE_SHARE,
    Scope.REPLICA_TOKENS,
    Scope.PREFILL_WINDOW,
    Scope.REQUEST_CAP,
    Scope.LANE_PREFILL,
    Scope.QUEUE,
    Scope.RESIDENCE,
    Scope.WITHDRAWN,
)
"""By the numbers that fitting.lua gives them."""

NO_BALANCE = Balance()


def pool_entry(pool: Pool, policy_version: str) -> Op:
    """A pool as fitting.lua reads it."""
    replicas = (part for one in pool.replicas for part in (one.name, pool.usable_tokens(one)))
    return (
        pool.name,
        policy_version,
        pool.request_cap,
        pool.prefill_tokens_per_s,
        pool.prefill_tokens_per_s * pool.prefill_window_ms // 1000,
        pool.prefill_window_ms,
        *replicas,
    )


def reserve_op(asked: Reservation, pool_position: int) -> Op:
    """A reservation in the pool at `pool_position` of its batch."""
    quota, terms = asked.quota, asked.lane_terms
    return (
        "q",
        asked.lease_id,
        asked.tenant,
        _or_false(quota.tokens_per_minute),
        _or_false(quota.burst_tokens),
        _or_false(quota.requests_per_minute),
        _or_false(quota.inflight_tokens),
        _or_false(quota.inflight_requests),
        asked.lane,
        asked.lane_limit_tokens,
        pool_position,
        asked.input_tokens,
        asked.input_tokens + asked.output_tokens,
        asked.work_units,
        asked.deadline_in_ms,
        asked.residence_ms,
        asked.hold_ms,
        asked.weight,
        terms.queue_requests,
        terms.queue_tokens,
        terms.floor_permille,
        terms.prefill_share_permille,
        terms.spare_replicas,
    )


def withdraw_op(lease_id: str) -> Op:
    """A caller that waits has gone."""
    return "w", lease_id


def news_op() -> Op:
    """What has this holder to be told?"""
    return ("t",)


def wake_op() -> Op:
    """Time may let somebody go."""
    return ("k",)


def capacity_op(pool_position: int, lane_limits_tokens: Mapping[Lane, int]) -> Op:
    """The pool at `pool_position` of its batch is another one now, and so is what its lanes may hold of it."""
    return "c", pool_position, lane_limits_tokens


def release_op(lease_id: str) -> Op:
    """The end of a stream."""
    return "e", lease_id


def book_op(lease_id: str, work_units: int | None) -> Op:
    """An access-log record."""
    return "b", lease_id, _or_false(work_units)


def renew_op(lease_ids: Sequence[str]) -> Op:
    """A holder's word for some of its leases."""
    return "n", lease_ids


def alive_op(ttl_ms: int) -> Op:
    """A holder's sign of life; 0 when it leaves."""
    return "h", ttl_ms


def orphan_op(lease_id: str) -> Op:
    """A lease that its holder leaves behind."""
    return "o", lease_id


def sweep_op(cursor: str) -> Op:
    """A look for what is idle."""
    return "s", cursor


def view_op(fields: Sequence[str]) -> Op:
    """A look at some scopes."""
    return "v", fields


def reassert_op(claim: Claim) -> Op:
    """A living holder's claim."""
    return (
        "a",
        claim.lease_id,
        claim.tenant,
        claim.lane,
        claim.pool,
        claim.replica,
        claim.tokens,
        claim.charge_units,
        _or_false(claim.rate_per_minute),
        claim.residence_ms,
        claim.age_ms,
        claim.policy_version,
    )


def batch(
    ops: Sequence[Op],
    *,
    holder: Holder,
    keep_ms: int,
    reclaim_most: int,
    pools: Sequence[Op] = (),
    at_ms: int | None = None,
) -> bytes:
    """The argument of one call of the batch script."""
    return encode(
        (
            _or_false(at_ms),
            holder.id,
            holder.lease_ttl_ms,
            holder.orphan_grace_ms,
            keep_ms,
            reclaim_most,
            pools,
            ops,
            holder.reply_ms,
        )
    )


def answer_of(reply: Sequence[Any], asked: Reservation) -> Granted | Denied | Queued:
    """What reserve.lua answered."""
    if reply[0] is False:
        _, position, wait_ms, expires_in_ms = reply
        return Queued(
            lease_id=asked.lease_id, position=position, wait_ms=wait_ms, expires_in_ms=expires_in_ms
        )
    return final_of(reply, asked)


def final_of(reply: Sequence[Any], asked: Reservation) -> Granted | Denied:
    """What is told last: to one that asks, or as news to one that has waited."""
    what, number, token_parts, request_parts, *waited = reply
    balance = balance_of(asked.quota, token_parts, request_parts)
    if isinstance(what, str):
        return Granted(
            lease_id=asked.lease_id, replica=what, ttft_ms=number, balance=balance, waited_ms=waited[0]
        )
    if not waited:
        return Denied(scope=SCOPES[what], wait_ms=number, balance=balance)
    waited_ms, behind, ahead_requests = waited
    return Denied(
        scope=SCOPES[what],
        wait_ms=number,
        balance=balance,
        waited_ms=waited_ms,
        behind=None if behind is False else SCOPES[behind],
        ahead_requests=ahead_requests,
    )


def balance_of(quota: Quota, token_parts: int, request_parts: int) -> Balance:
    """The tenant's buckets, from what it owes."""
    rate, burst, per_minute = quota.tokens_per_minute, quota.burst_tokens, quota.requests_per_minute
    if per_minute is None:
        if rate is None or burst is None:
            return NO_BALANCE
        return Balance(
            tokens_remaining=remaining(token_parts, burst), tokens_reset_ms=reset_ms(token_parts, rate)
        )
    requests_remaining = remaining(request_parts, per_minute)
    requests_reset_ms = reset_ms(request_parts, per_minute)
    if rate is None or burst is None:
        return Balance(requests_remaining=requests_remaining, requests_reset_ms=requests_reset_ms)
    return Balance(
        tokens_remaining=remaining(token_parts, burst),
        tokens_reset_ms=reset_ms(token_parts, rate),
        requests_remaining=requests_remaining,
        requests_reset_ms=requests_reset_ms,
    )


def tenant_field(tenant: str) -> str:
    """Where a tenant's balances are stored."""
    return f"T{tenant}"


def lane_field(pool: str, lane: str) -> str:
    """Where a lane's balances in a pool are stored."""
    return f"L{pool}\0{lane}"


def replica_field(pool: str, replica: str) -> str:
    """Where a replica's balances are stored."""
    return f"R{pool}\0{replica}"


LEASE_COUNTS_FIELD = "C"


def held_of(stored: Sequence[int]) -> Held:
    """A lane's balances, from the scope's numbers."""
    return Held(*stored[:4])


def replica_book_of(stored: Sequence[int]) -> ReplicaBook:
    """A replica's balances, from the scope's numbers."""
    return ReplicaBook(held=Held(*stored[:4]), backlog=Debt(*stored[4:8]))


def tenant_book_of(stored: Sequence[int]) -> TenantBook:
    """A tenant's balances, from the scope's numbers."""
    return TenantBook(held=Held(*stored[:4]), token_debt=Debt(*stored[4:8]), request_debt=Debt(*stored[8:12]))


def _or_false(number: int | None) -> int | bool:
    """Lua's tables have no holes: what is absent is false."""
    return False if number is None else number
