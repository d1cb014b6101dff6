"""What an exchange does about engines that are gone or have too much to do."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.domain.load import LoadBook
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import (
    BreakerPolicy,
    Lane,
    ModelFallback,
    OverloadPolicy,
    Policy,
    PoolFallback,
    RegionFallback,
    Replica,
)
from extproc.domain.signals import EngineSignal, ProbeResult
from extproc.exchange.events import Effect, Observe, Refuse, Release, Reserve, Route, StreamEnded
from extproc.exchange.law import State
from extproc.exchange.machine import Exchange
from tests.builders import a_model, a_policy, a_pool
from tests.exchange.rig import a_body, a_count, a_grant, a_head, an_exchange, answers, play

POOL = a_pool(
    replicas=(Replica(name="r0", ceiling_tokens=96_000), Replica(name="r1", ceiling_tokens=96_000)),
    breaker=BreakerPolicy(failures=1, open_ms=4_000),
    overload=OverloadPolicy(waiting_requests=10, enter_ms=0, leave_ms=5_000),
)
BULK = a_head(headers={"x-tenant": "acme", "x-request-id": "req-1", "x-lane-intent": "bulk"})


def a_world(*fallbacks: Any) -> Policy:
    """The model tiny in the pool chat, beside a spare pool."""
    spare = a_pool(name="spare", cluster="spare")
    small = a_model(name="small", lanes=dict.fromkeys((Lane.INTERACTIVE, Lane.BULK), "spare"))
    return a_policy(models=(a_model(fallbacks=fallbacks), small), pools=(POOL, spare))


def broken(policy: Policy, *replicas: str) -> LoadBook:
    """Where these replicas of the pool chat have failed."""
    load = LoadBook(policy)
    for replica in replicas:
        load.ended("chat", replica, failed=True, now_ms=0)
    return load


def overloaded(policy: Policy) -> LoadBook:
    """Where the engines of the pool chat have too much to do."""
    load = LoadBook(policy)
    signal = EngineSignal(waiting_requests=20, running_requests=8, kv_used_permille=None, at_ms=0)
    load.probed("chat", "r0", ProbeResult.OK, signal, 0)
    load.tick(0)
    return load


def reservations(effects: list[Effect]) -> list[tuple[str, str]]:
    """Pool and replicas of what the ledger is asked for."""
    return [
        (effect.reservation.pool.name, "".join(one.name for one in effect.reservation.pool.replicas))
        for effect in effects
        if isinstance(effect, Reserve)
    ]


def refusal(effects: list[Effect]) -> Refuse:
    (refuse,) = [answer for answer in answers(effects) if isinstance(answer, Refuse)]
    return refuse


def test_a_replica_that_failed_is_not_asked_for() -> None:
    """The ledger is asked for the others; the request goes on as ever."""
    policy = a_world()
    exchange = an_exchange(policy, load=broken(policy, "r0"))
    effects = play(exchange, a_head(), a_body(), a_count(), a_grant(replica="r1"))
    assert reservations(effects) == [("chat", "r1")]
    assert isinstance(answers(effects)[-1], Route)
    assert exchange.state is State.FORWARDED


@pytest.mark.parametrize(
    ("head", "load", "reason", "status", "retry_after"),
    [
        (a_head(), lambda policy: broken(policy, "r0", "r1"), Reason.BREAKER_OPEN, 503, 4_000),
        (BULK, overloaded, Reason.LANE_SUSPENDED, 429, 5_000),
    ],
)
def test_trouble_is_an_answer_of_the_contract(
    head: Any, load: Any, reason: Reason, status: int, retry_after: int
) -> None:
    """With its own reason, an honest wait, the pool for those who watch, and nothing asked of the ledger."""
    policy = a_world()
    exchange = an_exchange(policy, load=load(policy))
    effects = play(exchange, head, a_body(), a_count())
    refuse = refusal(effects)
    headers = dict(refuse.headers)
    assert (refuse.status, headers["x-admission-reason"]) == (status, reason)
    assert retry_after - 10 <= int(headers["retry-after-ms"]) <= retry_after * 1.25
    assert "x-should-retry" not in headers
    assert reservations(effects) == []
    decision = refuse.decision
    assert (decision.pool, decision.replica, decision.input_tokens) == ("chat", None, 10)
    assert exchange.state is State.REFUSED


def test_interactive_goes_on_where_bulk_is_suspended() -> None:
    policy = a_world()
    effects = play(an_exchange(policy, load=overloaded(policy)), a_head(), a_body(), a_count())
    assert reservations(effects) == [("chat", "r0r1")]


@pytest.mark.parametrize("trouble", [lambda policy: broken(policy, "r0", "r1"), overloaded])
def test_a_fallback_takes_over(trouble: Any) -> None:
    """Another pool at once; if that has no room, the client is told of the trouble."""
    policy = a_world(PoolFallback(pool="spare"))
    exchange = an_exchange(policy, load=trouble(policy))
    effects = play(exchange, BULK, a_body(), a_count(), a_grant())
    assert reservations(effects) == [("spare", "r0")]
    (decision,) = [effect.decision for effect in effects if isinstance(effect, Observe)]
    assert (decision.outcome, decision.pool, decision.fallback) == (Outcome.ADMITTED, "spare", "pool:spare")


def test_another_model_takes_over() -> None:
    """Counted anew, in its own pool."""
    policy = a_world(ModelFallback(model="small"))
    exchange = an_exchange(policy, load=broken(policy, "r0", "r1"))
    effects = play(exchange, a_head(), a_body(), a_count(), a_count(20), a_grant())
    assert reservations(effects) == [("spare", "r0")]
    assert exchange.state is State.FORWARDED


def test_a_fallback_in_trouble_is_passed_over() -> None:
    """The next place is tried, and here it is another region."""
    policy = a_world(PoolFallback(pool="spare"), RegionFallback(origin="https://eu.example"))
    load = broken(policy, "r0", "r1")
    for _ in range(5):
        load.ended("spare", "r0", failed=True, now_ms=0)
    effects = play(an_exchange(policy, load=load), a_head(), a_body(), a_count())
    refuse = refusal(effects)
    assert refuse.status == 307
    assert dict(refuse.headers)["x-admission-reason"] == Reason.BREAKER_OPEN
    assert reservations(effects) == []


def test_a_replica_that_failed_while_the_request_waited_for_it() -> None:
    """What was granted is given back, unused and once, and the client is told when to come again."""
    policy = a_world()
    load = LoadBook(policy)
    exchange = an_exchange(policy, load=load)
    play(exchange, a_head(), a_body(), a_count())
    load.ended("chat", "r0", failed=True, now_ms=3)
    effects = exchange.receive(a_grant(waited_ms=900), 4_000)
    effects += exchange.receive(StreamEnded(), 5_000)
    refuse = refusal(effects)
    assert (refuse.status, dict(refuse.headers)["x-admission-reason"]) == (503, Reason.BREAKER_OPEN)
    assert [effect for effect in effects if isinstance(effect, Release)] == [
        Release(lease_id="lease-1", unused=True)
    ]
    assert refuse.decision.waited_ms == 900


def test_a_trial_is_counted_when_it_is_granted() -> None:
    """Half open: as many as the policy says, then the replica is left out again."""
    policy = a_world()
    load = broken(policy, "r0", "r1")
    for number in range(7):
        exchange: Exchange = an_exchange(policy, load=load)
        at_us = 4_000_000 + number
        for event in (a_head(), a_body(), a_count()):
            effects = exchange.receive(event, at_us)
        if number == 6:
            assert dict(refusal(effects).headers)["x-admission-reason"] == Reason.BREAKER_OPEN
        else:
            assert reservations(effects) == [("chat", "r0r1" if number < 3 else "r1")]
            exchange.receive(a_grant(replica="r0" if number < 3 else "r1"), at_us)
