"""What waits to be sent, in the order in which it must be run, and how it becomes one call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from extproc.adapters.redis_ledger import wire
from extproc.domain.lease import Claim, Holder
from extproc.domain.policy import Policy, Pool
from extproc.domain.reservation import Answer, Reservation

OPS_PER_CALL = 128
"""A call of this many operations keeps the server busy for about a millisecond."""

RECLAIMED_PER_CALL = 16

SETTLES_KEPT = 100_000
"""Releases and records that are kept for a store that is away. Beyond it the oldest are left to the TTL."""

SETTLES_REPEATED_S = 10.0
"""Releases and records this young are sent again over a new connection: a failover may have lost them."""

SETTLES_REPEATED = 5_000
POOL_ENTRIES_KEPT = 64

REPEATABLE = frozenset({"q", "e", "b", "o", "w", "c"})
"""Verbs that may be sent again when it is unknown whether they were run. The others are told anew in time."""


@dataclass(slots=True)
class Op:
    """One operation on its way. A reservation's `deliver` is `None` once it has been answered.

    Those that are about a pool have no `wire` until they are sent: it says where their call describes the pool.

    `leaving` says that its caller does not want to wait.
    `alone` is set when it must not share a call, because one of those it shared a call with was at fault.
    """

    verb: str
    wire: wire.Op | None
    sequence: int
    asked: Reservation | None = None
    deliver: Callable[[Answer], None] | None = None
    on_reply: Callable[[Any], None] | None = None
    due_s: float = 0.0
    sent: bool = False
    alone: bool = False
    leaving: bool = False
    resized: tuple[Pool, Policy] | None = None


class Outbox:
    """Operations in order. What a new connection must hear first goes before what is pending.

    `claim_of` makes the claim of a lease that is to be reasserted, at the moment it is sent; `None` when it is
    not held any more. `reasserted` is called with its id and whether it was unknown.
    """

    def __init__(
        self, *, claim_of: Callable[[str], Claim | None], reasserted: Callable[[str, int], None]
    ) -> None:
        self.dropped_total = 0
        self._claim_of = claim_of
        self._reasserted = reasserted
        self._pending: deque[Op] = deque()
        self._repeats: deque[wire.Op] = deque()
        self._reasserts: deque[str] = deque()
        self._recent: deque[tuple[float, wire.Op]] = deque(maxlen=SETTLES_REPEATED)
        self._sequence = 0
        self._pool_entries: dict[int, tuple[Pool, wire.Op]] = {}

    def __len__(self) -> int:
        """How many operations wait."""
        return len(self._pending) + len(self._repeats) + len(self._reasserts)

    def reserve(self, asked: Reservation, deliver: Callable[[Answer], None], due_s: float) -> Op:
        """A reservation that is to be answered until `due_s`."""
        self._sequence += 1
        op = Op("q", None, self._sequence, asked, deliver, None, due_s)
        self._pending.append(op)
        return op

    def add(self, op: wire.Op, on_reply: Callable[[Any], None] | None = None) -> None:
        """Anything else, behind everything that was added before."""
        self._sequence += 1
        self._pending.append(Op(op[0], op, self._sequence, None, None, on_reply))

    def resize(self, pool: Pool, policy: Policy) -> None:
        """A pool is what `policy` says it is."""
        self._sequence += 1
        self._pending.append(Op("c", None, self._sequence, resized=(pool, policy)))

    def settle(self, op: wire.Op, now_s: float) -> None:
        """A release or a record: remembered for a while, because a failover may lose it."""
        self._recent.append((now_s, op))
        if len(self._pending) >= SETTLES_KEPT:
            self._pending.popleft()
            self.dropped_total += 1
        self.add(op)

    def reassert(self, lease_ids: Iterable[str]) -> None:
        """Claim these before anything that is pending."""
        self._reasserts.extend(lease_ids)

    def begin_anew(self, lease_ids: Iterable[str], now_s: float) -> None:
        """A new connection: tell the ends of the last moments again, and claim these leases."""
        self._repeats.extend(op for at_s, op in self._recent if at_s >= now_s - SETTLES_REPEATED_S)
        self._reasserts = deque(lease_ids)

    def take(self) -> list[Op]:
        """The operations of the next call."""
        ops: list[Op] = []
        while self._repeats and len(ops) < OPS_PER_CALL:
            repeated = self._repeats.popleft()
            ops.append(Op(repeated[0], repeated, 0))
        while self._reasserts and len(ops) < OPS_PER_CALL:
            lease_id = self._reasserts.popleft()
            claim = self._claim_of(lease_id)
            if claim is not None:
                told = partial(self._reasserted, lease_id)
                ops.append(Op("a", wire.reassert_op(claim), 0, None, None, told))
        pending = self._pending
        while pending and len(ops) < OPS_PER_CALL:
            if pending[0].alone and ops:
                break
            op = pending.popleft()
            if op.verb == "q" and op.deliver is None:
                continue  # it has been answered otherwise meanwhile
            ops.append(op)
            if op.alone:
                break
        return ops

    def requeue(self, ops: Sequence[Op]) -> None:
        """Send again what may be sent again; the rest is made anew when its time comes."""
        self._reasserts.extend(op.wire[1] for op in ops if op.verb == "a" and op.wire is not None)
        again = [op for op in ops if op.verb in REPEATABLE and (op.verb != "q" or op.deliver is not None)]
        if again:
            self._pending = deque(sorted((*again, *self._pending), key=_by_sequence))

    def argument(self, ops: Sequence[Op], *, holder: Holder, keep_ms: int) -> bytes:
        """The call's argument. Each pool that it is about is described once."""
        wires: list[wire.Op] = []
        entries: list[wire.Op] = []
        positions: dict[int, int] = {}

        def position_of(pool: Pool, policy_version: str) -> int:
            position = positions.get(id(pool))
            if position is None:
                position = positions[id(pool)] = len(entries)
                entries.append(self._pool_entry(pool, policy_version))
            return position

        for op in ops:
            op.sent = True
            asked = op.asked
            if op.wire is not None:
                wires.append(op.wire)
            elif asked is not None:
                wires.append(wire.reserve_op(asked, position_of(asked.pool, asked.policy_version)))
            else:
                assert op.resized is not None, "nothing else is about a pool"
                pool, policy = op.resized
                position = position_of(pool, policy.version)
                wires.append(wire.capacity_op(position, policy.lane_limits_tokens(pool)))
        return wire.batch(
            wires, holder=holder, keep_ms=keep_ms, reclaim_most=RECLAIMED_PER_CALL, pools=entries
        )

    def _pool_entry(self, pool: Pool, policy_version: str) -> wire.Op:
        found = self._pool_entries.get(id(pool))
        if found is None:
            if len(self._pool_entries) >= POOL_ENTRIES_KEPT:
                self._pool_entries.clear()
            # The pool is kept with its entry, so that its id names nothing else.
            found = pool, wire.pool_entry(pool, policy_version)
            self._pool_entries[id(pool)] = found
        return found[1]


def _by_sequence(op: Op) -> int:
    return op.sequence
