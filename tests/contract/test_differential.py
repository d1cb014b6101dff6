"""The books in Lua give the same answers as the model, and come to the same balances, for any history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.adapters.redis_ledger import wire
from extproc.domain.books import Books
from extproc.domain.holdings import Held
from extproc.domain.lease import LeaseState
from extproc.domain.policy import Pool
from extproc.domain.queue import LaneLine
from extproc.domain.reservation import Reservation
from tests.support.ledger_histories import (
    HOLDERS,
    Book,
    Capacity,
    Move,
    News,
    Orphan,
    Pass,
    Reassert,
    Reclaim,
    Release,
    Renew,
    Reserve,
    Wake,
    Withdraw,
    histories,
    waiting_histories,
)
from tests.support.lua_books import LuaBooks
from tests.support.reservations import ROOMY, quota, reservation
from tests.support.reservations import pool as a_pool
from tests.support.valkey import ValkeyServer, server_programs

START_MS = 1_700_000_000_000

lua_settings = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=server_programs(), ids=lambda program: Path(program).name)
def lua(request: pytest.FixtureRequest) -> Iterator[LuaBooks]:
    """Each server that is to be supported."""
    with ValkeyServer(program=request.param) as server, server.client() as client:
        yield LuaBooks(client)


@dataclass(slots=True)
class Twins:
    """One history in two books."""

    lua: LuaBooks
    books: Books = field(default_factory=Books)
    now_ms: int = START_MS
    quotas: dict[str, Reservation] = field(default_factory=dict)

    def play(self, moves: Sequence[Move]) -> tuple[list[Any], list[Any]]:
        """The answers of both to moves that happen at one moment, in one call. All are one holder's."""
        holder = next(
            (move.holder for move in moves if isinstance(move, Reserve | Renew | Reassert | News)), HOLDERS[0]
        )
        pools: list[Pool] = []
        ops: list[wire.Op] = []
        expected: list[Any] = []
        for move in moves:
            match move:
                case Reserve(reservation=asked):
                    pools.append(asked.pool)
                    ops.append(wire.reserve_op(asked, len(pools) - 1))
                    expected.append(self.books.reserve(asked, self.now_ms, holder))
                case Release(lease_id=lease_id):
                    ops.append(wire.release_op(lease_id))
                    expected.append(int(self.books.release(lease_id, self.now_ms)))
                case Book(lease_id=lease_id, work_units=units):
                    ops.append(wire.book_op(lease_id, units))
                    expected.append(int(self.books.book(lease_id, units, self.now_ms)))
                case Renew(lease_ids=ids):
                    ops.append(wire.renew_op(ids))
                    expected.append(list(self.books.renew(holder, ids, self.now_ms)))
                case Reassert(claim=claim):
                    ops.append(wire.reassert_op(claim))
                    expected.append(int(self.books.reassert(claim, self.now_ms, holder)))
                case Orphan(lease_id=lease_id):
                    ops.append(wire.orphan_op(lease_id))
                    expected.append(int(self.books.orphan(lease_id, self.now_ms)))
                case Withdraw(lease_id=lease_id):
                    ops.append(wire.withdraw_op(lease_id))
                    expected.append(int(self.books.withdraw(lease_id, self.now_ms)))
                case News():
                    ops.append(wire.news_op())
                    expected.append(self.books.take_news(holder, self.now_ms))
                case Wake():
                    ops.append(wire.wake_op())
                    self.books.wake(self.now_ms)
                    expected.append(self.books.wake_at_ms() or 0)
                case Capacity(pool=pool, lane_limits_tokens=limits):
                    pools.append(pool)
                    ops.append(wire.capacity_op(len(pools) - 1, limits))
                    self.books.change_capacity(pool, limits, self.now_ms)
                    expected.append(1)
        replies, _ = self.lua.play(ops, holder=holder, at_ms=self.now_ms, pools=pools)
        asked_for = iter(move.reservation for move in moves if isinstance(move, Reserve))
        answers: list[Any] = []
        for op, reply in zip(ops, replies, strict=True):
            match op[0]:
                case "q":
                    asked = next(asked_for)
                    self.quotas[asked.lease_id] = asked
                    answers.append(wire.answer_of(reply, asked))
                case "t":
                    answers.append([(name, wire.final_of(told, self.quotas[name])) for name, told in reply])
                case "n":
                    answers.append(reply or [])
                case _:
                    answers.append(reply or 0)
        return expected, answers

    def reclaim(self, most: int) -> tuple[Any, Any]:
        """What both reclaimed."""
        done = self.books.reclaim(self.now_ms, most=most)
        _, counts = self.lua.play([], holder=HOLDERS[0], at_ms=self.now_ms, reclaim_most=most)
        return [done.orphaned, done.freed, done.forgotten, done.taken_back], list(counts)

    def sweep(self) -> None:
        """Both forget what is idle."""
        self.books.sweep(self.now_ms, most=1_000)
        cursor = "0"
        while True:
            [cursor], _ = self.lua.play([wire.sweep_op(cursor)], holder=HOLDERS[0], at_ms=self.now_ms)
            if cursor == "0":
                return

    def assert_equal(self) -> None:
        """Both hold, owe and remember the same, and the server keeps nothing for ever."""
        assert self.lua.balances() == model_balances(self.books)
        assert self.lua.owed(self.now_ms) == model_debts(self.books, self.now_ms)
        stored = self.lua.leases()
        assert {lease_id: lease[13] for lease_id, lease in stored.items()} == {
            lease_id: int(lease.state) for lease_id, lease in self.books.leases.items()
        }
        assert self.lua.dues() == {lease_id: lease.due_at_ms for lease_id, lease in self.books.leases.items()}
        counts = self.lua.scopes().get(wire.LEASE_COUNTS_FIELD, [0, 0, 0, 0])
        assert counts == [
            sum(lease.state is state for lease in self.books.leases.values())
            for state in (LeaseState.HELD, LeaseState.ORPHANED, LeaseState.RELEASED, LeaseState.PROMISED)
        ]
        assert stored_waits(self.lua) == model_waits(self.books)
        [[_, _, waits]], _ = self.lua.play([wire.view_op([])], holder=HOLDERS[0], at_ms=self.now_ms)
        assert {(pool, lane): numbers for pool, lane, *numbers in waits} == {
            (pool, str(lane)): [state.requests, state.input_tokens, state.oldest_ms]
            for pool, line in self.books.waiting.lines.items()
            for lane in line.lanes
            for state in [self.books.waiting.state_of(pool, lane, self.now_ms)]
        }
        assert self.lua.expiries() == {
            lease_id: ticket.expires_at_ms for lease_id, ticket in self.books.waiting.tickets.items()
        }
        assert not self.lua.keys_without_expiry()


def stored_waits(lua: LuaBooks) -> dict[str, Any]:
    """Who waits in the store, and what is to be told, by the names of the stored fields."""
    found: dict[str, Any] = {}
    for name, stored in lua.waits().items():
        match name[0]:
            case "P":
                _, wake_at_ms, lanes = stored
                # Lua writes an empty table as an array.
                found[name] = (
                    wake_at_ms,
                    {lane: (*one[:9], one[9] or {}, one[10] or {}, *one[11:]) for lane, one in lanes.items()},
                )
            case "B":
                found[name] = [
                    (deadline_at_ms, lease_id, at_ms) for deadline_at_ms, _, lease_id, at_ms in stored
                ]
            case "Q":
                found[name] = [stored[1], stored[2][0], *stored[4:]]
            case "N":
                found[name] = [lease_id for lease_id, _ in stored]
    return found


def model_waits(books: Books) -> dict[str, Any]:
    """The same of the model."""
    found: dict[str, Any] = {}
    for pool, line in books.waiting.lines.items():
        wake_at_ms = False if line.wake_at_ms is None else line.wake_at_ms
        found[f"P{pool}"] = wake_at_ms, {lane: _numbers(one) for lane, one in line.lanes.items()}
        for lane, one in line.lanes.items():
            for tenant, part in one.tenants.items():
                found[f"B{pool}\0{lane}\0{tenant}"] = [
                    (ticket.deadline_at_ms, ticket.reservation.lease_id, ticket.enqueued_at_ms)
                    for ticket in part.tickets
                ]
    for lease_id, ticket in books.waiting.tickets.items():
        found[f"Q{lease_id}"] = [
            ticket.tokens,
            ticket.holder.id,
            ticket.enqueued_at_ms,
            ticket.expires_at_ms,
            ticket.deadline_at_ms,
            ticket.passed_tokens,
            False if ticket.behind is None else wire.SCOPES.index(ticket.behind),
        ]
    for holder, told in books.waiting.news.items():
        found[f"N{holder}"] = [lease_id for lease_id, _ in told]
    return found


def _numbers(lane: LaneLine) -> tuple[Any, ...]:
    tenants = {
        name: [
            tenant.weight,
            tenant.start,
            tenant.tokens,
            tenant.input_tokens,
            len(tenant.tickets),
            False if tenant.parked_until_ms is None else tenant.parked_until_ms,
            min(ticket.enqueued_at_ms for ticket in tenant.tickets),
        ]
        for name, tenant in lane.tenants.items()
    }
    return (
        lane.terms.queue_requests,
        lane.terms.queue_tokens,
        lane.terms.floor_permille,
        lane.requests,
        lane.tokens,
        lane.input_tokens,
        lane.weight,
        lane.virtual,
        lane.owed_permille,
        tenants,
        lane.ahead_of_time,
        lane.limit_tokens,
    )


def model_balances(books: Books) -> dict[object, Held]:
    """What every scope of the model holds; nothing for what holds nothing."""
    every: dict[object, Held] = {
        **{("tenant", key): book.held for key, book in books.tenants.items()},
        **{("replica", *key): book.held for key, book in books.replicas.items()},
        **{("lane", pool, str(lane)): held for (pool, lane), held in books.lanes.items()},
    }
    return {key: held for key, held in every.items() if held != Held()}


def model_debts(books: Books, now_ms: int) -> dict[str, tuple[int, int]]:
    """What every tenant of the model owes; nothing for who owes nothing."""
    debts = {
        tenant: (
            book.token_debt.parts_at(book.token_debt.rate_per_minute, now_ms),
            book.request_debt.parts_at(book.request_debt.rate_per_minute, now_ms),
        )
        for tenant, book in books.tenants.items()
    }
    return {tenant: parts for tenant, parts in debts.items() if any(parts)}


@lua_settings
@given(history=histories)
def test_one_operation_at_a_time(lua: LuaBooks, history: list[Move]) -> None:
    """Every answer of every operation is the model's, and so is everything that is stored afterwards."""
    lua.wipe()
    twins = Twins(lua)
    for move in history:
        match move:
            case Pass(ms=ms):
                twins.now_ms += ms
            case Reclaim(most=most):
                expected, got = twins.reclaim(most)
                assert got == expected
                twins.sweep()
            case _:
                expected, got = twins.play([move])
                assert got == expected
    twins.assert_equal()


@lua_settings
@given(history=waiting_histories())
def test_those_who_wait_one_operation_at_a_time(lua: LuaBooks, history: list[Move]) -> None:
    """Who waits, who goes when, and what everybody is told is what the model says."""
    lua.wipe()
    twins = Twins(lua)
    for move in history:
        match move:
            case Pass(ms=ms):
                twins.now_ms += ms
            case Reclaim(most=most):
                expected, got = twins.reclaim(most)
                assert got == expected
                twins.sweep()
            case _:
                expected, got = twins.play([move])
                assert got == expected
                assert stored_waits(lua) == model_waits(twins.books)
    twins.assert_equal()


def test_a_clock_that_was_set_back_by_minutes(lua: LuaBooks) -> None:
    """Both begin to refill again at once, and both still refund what was charged before."""
    lua.wipe()
    twins = Twins(lua)
    limits = quota(tokens_per_minute=60, burst_tokens=10_000)

    def reserve(lease_id: str) -> Move:
        return Reserve(holder=HOLDERS[0], reservation=reservation(lease_id, quota=limits, total_tokens=500))

    for step in (
        reserve("before"),
        Pass(ms=-70_000),
        reserve("after"),
        Pass(ms=9_000),
        Book(lease_id="before", work_units=100),
        Book(lease_id="after", work_units=0),
        reserve("last"),
    ):
        if isinstance(step, Pass):
            twins.now_ms += step.ms
        else:
            expected, got = twins.play([step])
            assert got == expected
    assert lua.owed(twins.now_ms)["acme"][0] < 1_000 * 60_000
    twins.assert_equal()


def test_an_idle_replica_is_forgotten_within_a_call(lua: LuaBooks) -> None:
    """What it has long read, at the speed of the pool as it was, is not unread again in a slower pool."""
    lua.wipe()
    twins = Twins(lua)

    def reserve(lease_id: str, per_s: int) -> Move:
        room = a_pool(400, 300, prefill_tokens_per_s=per_s)
        asked = reservation(lease_id, pool=room, total_tokens=200, input_tokens=120)
        return Reserve(holder=HOLDERS[0], reservation=asked)

    expected, got = twins.play([reserve("fast", 100_000)])
    assert got == expected
    twins.now_ms += 20
    expected, got = twins.play([Release(lease_id="fast"), reserve("slow", 1_000)])
    assert got == expected
    twins.assert_equal()


def _call_of(move: Move) -> object:
    """What may go out in one call: time stands still in it, and it is one holder's."""
    match move:
        case Pass() | Reclaim():
            return id(move)
        case Reserve(holder=holder) | Renew(holder=holder) | Reassert(holder=holder) | News(holder=holder):
            return holder.id
        case _:
            return HOLDERS[0].id  # which is also the first of those who wait


@lua_settings
@given(history=histories)
def test_many_operations_in_one_call(lua: LuaBooks, history: list[Move]) -> None:
    """A batch is its operations one after the other, whatever they have to do with each other."""
    lua.wipe()
    twins = Twins(lua)
    for _, group in groupby(history, key=_call_of):
        moves = list(group)
        match moves:
            case [Pass(ms=ms)]:
                twins.now_ms += max(0, ms)  # what a batch forgets at its end, the model forgets at once
            case [Reclaim(most=most)]:
                expected, got = twins.reclaim(most)
                assert got == expected
            case _:
                expected, got = twins.play(moves)
                assert got == expected
    twins.assert_equal()


@lua_settings
@given(history=waiting_histories())
def test_those_who_wait_in_one_call(lua: LuaBooks, history: list[Move]) -> None:
    """What somebody lets go in one call goes on in the same call."""
    lua.wipe()
    twins = Twins(lua)
    for _, group in groupby(history, key=_call_of):
        moves = list(group)
        match moves:
            case [Pass(ms=ms)]:
                twins.now_ms += ms
            case [Reclaim(most=most)]:
                expected, got = twins.reclaim(most)
                assert got == expected
            case _:
                expected, got = twins.play(moves)
                assert got == expected
                assert stored_waits(lua) == model_waits(twins.books)
    twins.assert_equal()


@lua_settings
@given(ids=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5, unique=True))
def test_any_text_is_a_name(lua: LuaBooks, ids: list[str]) -> None:
    """Tenants and leases may be called anything that a policy can say."""
    lua.wipe()
    ops = [wire.reserve_op(reservation(name, tenant=name), 0) for name in ids]
    replies, _ = lua.play(ops, holder=HOLDERS[0], at_ms=START_MS, pools=[ROOMY])
    assert [reply[0] for reply in replies] == ["a"] * len(ids)
    assert set(lua.leases()) == set(ids)
    lua.play([wire.release_op(name) for name in ids], holder=HOLDERS[0], at_ms=START_MS)
    assert not lua.balances()
