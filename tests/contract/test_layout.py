"""What is stored has a number, which changes with it: releases that differ must not read each other's books."""

from __future__ import annotations

import hashlib

from extproc.adapters.redis_ledger.scripts import LAYOUT, keys_of
from extproc.domain.policy import Lane
from extproc.domain.reservation import Denied, Granted, LaneTerms, Queued
from tests.support.lua_books import LuaBooks
from tests.support.reservations import pool, quota, reservation
from tests.support.valkey import ValkeyServer
from tests.support.waiting_worlds import WORKER, StoreLedger

STORED = {2: "f1f9d52a"}
"""A digest of the books below in each layout. New fields in old books? A new number, and its digest."""


def stored(lua: LuaBooks) -> str:
    """Everything in the books of a small world: a lease of every state, lines with tickets, balances and debts."""
    ledger = StoreLedger(lua)
    small = pool(1_000, 1_000)
    limits = quota(tokens_per_minute=60_000, inflight_requests=9)
    line = LaneTerms(queue_requests=5, queue_tokens=10_000, floor_permille=100, prefill_share_permille=500)

    def asked(name: str, lane: Lane, now_ms: int) -> Granted | Denied | Queued:
        wanted = reservation(
            name,
            total_tokens=600,
            input_tokens=200,
            pool=small,
            quota=limits,
            lane=lane,
            lane_terms=line,
            hold_ms=5_000,
        )
        return ledger.reserve(wanted, WORKER, now_ms)

    answers = [
        asked("first", Lane.INTERACTIVE, 1_000),
        asked("second", Lane.BULK, 1_001),
        asked("third", Lane.INTERACTIVE, 1_002),
        asked("fourth", Lane.BULK, 1_003),
    ]
    assert [type(answer) for answer in answers] == [Granted, Granted, Queued, Queued]
    ledger.release("first", 1_010)
    books = (lua.scopes(), lua.leases(), lua.dues(), lua.waits(), lua.expiries())
    assert all(books)
    return hashlib.sha256(repr([sorted(book.items()) for book in books]).encode()).hexdigest()[:8]


def test_what_is_stored_has_its_number() -> None:
    """Whoever changes what is stored is told to count up."""
    with ValkeyServer() as server, server.client() as client:
        assert stored(LuaBooks(client)) == STORED[LAYOUT]


def test_another_layout_has_other_books() -> None:
    """The number is in every key, and inside the rights that `deploy/ledger.md` gives."""
    keys = keys_of("here")
    assert all(key.startswith(b"extproc:{here}:%d:" % LAYOUT) for key in keys)
    assert len(set(keys)) == len(keys)
