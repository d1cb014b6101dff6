"""Where a request goes for which there is no room: in the policy's order, once each, and told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.dialects.rewriting import LARGEST_CHANGED_BYTES
from extproc.domain.media import MediaKind, MediaRule
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import (
    Fallback,
    Lane,
    Model,
    ModelFallback,
    Policy,
    PoolFallback,
    Posture,
    RegionFallback,
)
from extproc.domain.prompt import AtLeast, CountFailed
from extproc.domain.reservation import Balance, Denied, Scope, Unavailable
from extproc.exchange.events import (
    BodyMode,
    CountTokens,
    DrainBegan,
    Echo,
    Effect,
    Event,
    Faulted,
    Observe,
    Phase,
    Refuse,
    Release,
    Reserve,
    ResponseHeaders,
    Route,
    StreamEnded,
    Withdraw,
)
from extproc.exchange.law import State
from extproc.exchange.machine import Exchange
from tests.builders import a_lane, a_limits, a_model, a_policy, a_pool, a_quota, a_tenant, a_tier
from tests.exchange.rig import CHAT, a_body, a_count, a_grant, a_head, an_exchange, answers, play

FULL = Denied(scope=Scope.REPLICA_TOKENS, wait_ms=1500, balance=Balance())
TO_SPARE = PoolFallback(pool="spare")
TO_SMALL = ModelFallback(model="small")
TO_EUROPE = RegionFallback(origin="https://eu.example")
HEAD = a_head(
    headers={"x-tenant": "acme", "x-request-id": "req-1", "content-length": str(len(CHAT))},
    path="/v1/chat/completions?api-version=1",
)
SMALL_CHAT = CHAT.replace(b'"tiny"', b'"small"')


def a_world(*fallbacks: Fallback, small: dict[str, Any] | None = None, **changes: Any) -> Policy:
    """The model tiny in the pool chat, with these fallbacks; the model small in its own; a spare pool."""
    lanes = dict.fromkeys((Lane.INTERACTIVE, Lane.BULK), "small")
    models: tuple[Model, ...] = (
        a_model(fallbacks=fallbacks),
        a_model(name="small", lanes=lanes, cost_factor_permille=500, **(small or {})),
    )
    pools = tuple(a_pool(name=name, cluster=name) for name in ("chat", "spare", "small"))
    return a_policy(models=models, pools=pools, **changes)


def at_the_ledger(policy: Policy, **changes: Any) -> Exchange:
    """An exchange whose reservation in the pool chat is asked."""
    exchange = an_exchange(policy, **changes)
    play(exchange, HEAD, a_body(), a_count())
    assert exchange.state is State.RESERVING
    return exchange


def the_route(effects: list[Effect]) -> Route:
    """The one route among the effects."""
    (route,) = (answer for answer in answers(effects) if isinstance(answer, Route))
    return route


def the_refusal(effects: list[Effect]) -> Refuse:
    """The one refusal among the effects."""
    (refusal,) = (answer for answer in answers(effects) if isinstance(answer, Refuse))
    return refusal


def test_a_full_pool_leads_to_another_one() -> None:
    """The same model and lane, reserved anew there, without a wait; engine, log and client can be told."""
    lanes = {Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, residence_ms=5_000)}
    exchange = at_the_ledger(a_world(TO_SPARE, lanes=lanes))

    (asked,) = play(exchange, Denied(scope=Scope.RESIDENCE, wait_ms=10, balance=Balance(), waited_ms=5_000))
    assert isinstance(asked, Reserve)
    assert asked.reservation.pool.name == "spare"
    assert (asked.reservation.lease_id, asked.reservation.hold_ms) == ("lease-1", 0)

    effects = play(exchange, a_grant(waited_ms=0))
    route = the_route(effects)
    headers = dict(route.set_headers)
    assert headers["x-admission-pool"] == "spare"
    assert headers["x-admission-fallback"] == "pool:spare"
    assert "content-length" not in headers
    assert route.body is None
    assert (route.decision.fallback, route.decision.pool, route.decision.model) == (
        "pool:spare",
        "spare",
        "tiny",
    )
    assert route.decision.waited_ms == 5_000
    assert effects[-1] == Observe(decision=route.decision)
    assert play(exchange, StreamEnded()) == [Release(lease_id="lease-1")]


def test_a_request_that_fits_is_not_said_to_have_fallen_back() -> None:
    """No header, no field."""
    route = the_route(play(at_the_ledger(a_world(TO_SPARE, TO_SMALL, TO_EUROPE)), a_grant()))
    assert "x-admission-fallback" not in dict(route.set_headers)
    assert route.decision.fallback is None
    assert route.body is None


def test_a_full_pool_leads_to_a_smaller_model() -> None:
    """Counted anew with its tokenizer, charged by its factor, and named in the body with the right length."""
    exchange = at_the_ledger(a_world(TO_SMALL))

    (counting,) = play(exchange, FULL)
    assert isinstance(counting, CountTokens)
    assert counting.model == "small"
    assert exchange.state is State.COUNTING

    (asked,) = play(exchange, a_count(20))
    assert isinstance(asked, Reserve)
    assert asked.reservation.pool.name == "small"
    assert (asked.reservation.total_tokens, asked.reservation.work_units) == (120, 60)

    route = the_route(play(exchange, a_grant()))
    headers = dict(route.set_headers)
    assert route.phase is Phase.REQUEST_BODY
    assert route.body == SMALL_CHAT
    assert headers["content-length"] == str(len(SMALL_CHAT))
    assert headers["x-admission-fallback"] == "model:small"
    assert headers["x-admission-input-tokens"] == "20"
    assert (route.decision.model, route.decision.fallback) == ("small", "model:small")


def test_no_length_is_invented_for_a_body_that_had_none() -> None:
    """A chunked request stays chunked."""
    exchange = an_exchange(a_world(TO_SMALL))
    route = the_route(play(exchange, a_head(), a_body(), a_count(), FULL, a_count(), a_grant()))
    assert route.body == SMALL_CHAT
    assert "content-length" not in dict(route.set_headers)


def test_a_full_duplex_body_goes_back_rewritten() -> None:
    """Where Envoy does not keep the body, the pieces that go back are the new one's."""
    exchange = an_exchange(a_world(TO_SMALL))
    head = a_head(headers=HEAD.headers, body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    sent = answers(
        play(
            exchange,
            head,
            a_body(CHAT[:20], end_of_stream=False),
            a_body(CHAT[20:]),
            a_count(),
            FULL,
            a_count(),
            a_grant(),
        )
    )
    route, echo = sent
    assert isinstance(route, Route)
    assert route.phase is Phase.REQUEST_HEADERS
    assert route.body is None
    assert dict(route.set_headers)["content-length"] == str(len(SMALL_CHAT))
    assert echo == Echo(phase=Phase.REQUEST_BODY, data=SMALL_CHAT, end_of_stream=True)


@pytest.mark.parametrize(
    ("head", "bodies"),
    [
        (a_head(headers={**HEAD.headers, "content-encoding": "gzip"}), [a_body()]),
        (a_head(body_mode=BodyMode.STREAMED, body_unasked=True), [a_body()]),
        (a_head(body_mode=BodyMode.STREAMED), [a_body(CHAT[:9], end_of_stream=False), a_body(CHAT[9:])]),
        (a_head(), [a_body(CHAT.replace(b'"model"', b'"model": {}, "model"'))]),
    ],
    ids=["compressed", "unasked", "in pieces", "odd"],
)
def test_a_body_that_cannot_be_changed_skips_the_other_model(head: Any, bodies: list[Event]) -> None:
    """The next place is tried, and the request arrives there as it was sent."""
    exchange = an_exchange(a_world(TO_SMALL, TO_SPARE))
    play(exchange, head, *bodies, a_count())
    (asked,) = play(exchange, FULL)
    assert isinstance(asked, Reserve)
    assert asked.reservation.pool.name == "spare"
    route = the_route(play(exchange, a_grant()))
    assert route.body is None
    assert route.decision.fallback == "pool:spare"


def test_a_model_that_the_path_names_is_not_exchanged() -> None:
    """Changing a body changes nothing where the URL says which model it is."""
    exchange = an_exchange(a_world(TO_SMALL))
    body = json.dumps({"text_input": "Hello", "parameters": {"max_tokens": 5}, "model": "tiny"}).encode()
    play(exchange, a_head("/v2/models/tiny/generate"), a_body(body), a_count())
    assert exchange.state is State.RESERVING
    assert the_refusal(play(exchange, FULL)).status == 429


def test_a_full_fleet_leads_to_another_region() -> None:
    """307 with the same path and query there; the reason stays, and nobody is told to wait."""
    exchange = at_the_ledger(a_world(TO_EUROPE))
    effects = play(exchange, FULL)
    refusal = the_refusal(effects)
    headers = dict(refusal.headers)
    assert refusal.status == 307
    assert headers["location"] == "https://eu.example/v1/chat/completions?api-version=1"
    assert headers["x-admission-fallback"] == "region:https://eu.example"
    assert headers["x-admission-reason"] == "token_budget_exhausted"
    assert not {"retry-after", "retry-after-ms", "x-should-retry"} & headers.keys()
    assert refusal.body["error"]["code"] == "token_budget_exhausted"
    assert refusal.decision.fallback == "region:https://eu.example"
    assert play(exchange, StreamEnded()) == []


def test_places_are_tried_in_order_and_once() -> None:
    """Model, pool, region: each after the other has refused; the pool is the first model's again."""
    exchange = at_the_ledger(a_world(TO_SMALL, TO_SPARE, TO_EUROPE))
    (counting,) = play(exchange, FULL)
    assert isinstance(counting, CountTokens)
    (small,) = play(exchange, a_count(20))
    assert isinstance(small, Reserve)
    (spare,) = play(exchange, FULL)
    assert isinstance(spare, Reserve)
    assert (spare.reservation.pool.name, spare.reservation.input_tokens) == ("spare", 10)
    refusal = the_refusal(play(exchange, FULL))
    assert refusal.status == 307
    assert refusal.decision.model == "tiny"


def test_a_name_that_did_not_help_is_not_left_in_the_body() -> None:
    """The pool after the other model gets the request as it was sent."""
    exchange = at_the_ledger(a_world(TO_SMALL, TO_SPARE))
    route = the_route(play(exchange, FULL, a_count(20), FULL, a_grant()))
    assert route.decision.fallback == "pool:spare"
    assert route.body is None
    assert "content-length" not in dict(route.set_headers)


def test_where_none_helps_the_first_refusal_is_told() -> None:
    """As if there were no fallbacks: its reason, its numbers, its model and pool."""
    first = Denied(scope=Scope.QUEUE, wait_ms=3_000, balance=Balance(), ahead_requests=7)
    alone = the_refusal(play(at_the_ledger(a_world()), first))
    exchange = at_the_ledger(a_world(TO_SPARE, TO_SMALL))
    play(exchange, first, FULL, a_count(99))
    last = Denied(scope=Scope.TENANT_TOKEN_RATE, wait_ms=9_000, balance=Balance())
    refusal = the_refusal(play(exchange, last))
    assert (refusal.status, refusal.body) == (alone.status, alone.body)
    assert refusal.decision.reason is Reason.QUEUE_FULL
    assert (refusal.decision.model, refusal.decision.pool) == ("tiny", "chat")
    assert refusal.decision.fallback is None
    assert "x-admission-fallback" not in dict(refusal.headers)


@pytest.mark.parametrize(
    "scope",
    [
        Scope.TENANT_TOKEN_RATE,
        Scope.TENANT_REQUEST_RATE,
        Scope.TENANT_INFLIGHT_TOKENS,
        Scope.TENANT_INFLIGHT_REQUESTS,
    ],
)
def test_a_tenants_own_limit_is_no_want_of_room(scope: Scope) -> None:
    """It is the same everywhere: nothing else is tried."""
    exchange = at_the_ledger(a_world(TO_SPARE, TO_SMALL, TO_EUROPE))
    refusal = the_refusal(play(exchange, Denied(scope=scope, wait_ms=10, balance=Balance())))
    assert refusal.status == 429
    assert refusal.decision.fallback is None


def test_what_is_too_large_is_not_sent_on() -> None:
    """413 stays 413, although the spare pool could hold it."""
    small_lane = {Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, share_permille=1)}
    exchange = an_exchange(a_world(TO_SPARE, TO_EUROPE, lanes=small_lane))
    assert the_refusal(play(exchange, HEAD, a_body(), a_count())).status == 413


def test_a_quota_is_looked_at_again_for_the_other_model() -> None:
    """A fallback that the tenant's bucket can never pay for is none."""
    tenant = a_tenant(tier=a_tier(quota=a_quota(tokens_per_minute=200, burst_tokens=200)))
    exchange = at_the_ledger(a_world(TO_SMALL, tenants=(tenant,)))
    play(exchange, FULL)
    refusal = the_refusal(play(exchange, a_count(900)))
    assert refusal.decision.reason is Reason.TOKEN_BUDGET_EXHAUSTED


def test_a_pool_too_slow_for_the_deadline_leads_to_a_faster_one() -> None:
    """The screen that needs no ledger is a want of room as well."""
    slow = a_pool(name="chat", cluster="chat", prefill_tokens_per_s=100)
    fast = a_pool(name="spare", cluster="spare")
    policy = a_policy(models=(a_model(fallbacks=(TO_SPARE,)),), pools=(slow, fast))
    exchange = an_exchange(policy)
    effects = play(exchange, HEAD, a_body(), a_count(4_000))
    (asked,) = (effect for effect in effects if isinstance(effect, Reserve))
    assert asked.reservation.pool.name == "spare"


@pytest.mark.parametrize(
    "answer",
    [
        AtLeast(input_tokens=99_999),
        CountFailed(reason=Reason.TOKENIZER_OVERLOADED, detail="busy"),
        a_count(32_768),
    ],
)
def test_a_model_that_cannot_take_it_is_passed_over(answer: Event) -> None:
    """Too small a window, or no count: the next place is tried, or the first refusal stands."""
    exchange = at_the_ledger(a_world(TO_SMALL, TO_SPARE))
    play(exchange, FULL)
    (asked,) = play(exchange, answer)
    assert isinstance(asked, Reserve)
    exchange = at_the_ledger(a_world(TO_SMALL))
    play(exchange, FULL)
    assert the_refusal(play(exchange, answer)).status == 429


def test_the_pool_where_it_was_is_not_asked_again() -> None:
    """A fallback for other lanes of the model is none for the lane that leads there."""
    exchange = at_the_ledger(a_world(PoolFallback(pool="chat")))
    assert the_refusal(play(exchange, FULL)).status == 429


def test_a_ledger_that_fails_meanwhile_is_not_asked_again() -> None:
    """What may be held there is given back, and only another region is left."""
    exchange = at_the_ledger(a_world(TO_SPARE, TO_SMALL, TO_EUROPE))
    play(exchange, FULL)
    release, sent, _ = play(exchange, Unavailable(wait_ms=10))
    assert release == Release(lease_id="lease-1", unused=True)
    assert the_refusal([sent]).status == 307
    exchange = at_the_ledger(a_world(TO_SPARE, TO_SMALL))
    play(exchange, FULL)
    assert (
        the_refusal(play(exchange, Unavailable(wait_ms=10))).decision.reason is Reason.TOKEN_BUDGET_EXHAUSTED
    )


def test_an_open_lane_goes_to_the_fallback_without_a_lease() -> None:
    """The posture is the lane's wherever the request goes."""
    lanes = {Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, posture=Posture.OPEN)}
    exchange = at_the_ledger(a_world(TO_SPARE, lanes=lanes))
    play(exchange, FULL)
    assert the_route(play(exchange, Unavailable(wait_ms=10))).decision.fallback == "pool:spare"


@pytest.mark.parametrize("counting", [False, True])
def test_a_client_that_leaves_meanwhile_owes_nothing(counting: bool) -> None:
    """Hang-up while a fallback is counted or asked: what is granted late is given back, and it is told once."""
    exchange = at_the_ledger(a_world(TO_SMALL if counting else TO_SPARE))
    play(exchange, FULL)
    effects = play(exchange, StreamEnded())
    (observed,) = (effect for effect in effects if isinstance(effect, Observe))
    assert observed.decision.outcome is Outcome.ABANDONED
    assert observed.decision.fallback is None
    if counting:
        assert play(exchange, a_count()) == []
    else:
        assert Withdraw(lease_id="lease-1") in effects
        assert play(exchange, a_grant()) == [Release(lease_id="lease-1", unused=True)]
    assert exchange.state is State.CLOSED


@pytest.mark.parametrize("event", [DrainBegan(), Faulted(detail="KeyError"), ResponseHeaders()])
def test_whatever_ends_the_wait_ends_the_fallback(event: Event) -> None:
    """Drain, fault, local reply: the question to the ledger is withdrawn, its grant given back."""
    exchange = at_the_ledger(a_world(TO_SPARE, TO_EUROPE))
    play(exchange, FULL)
    assert Withdraw(lease_id="lease-1") in play(exchange, event)
    assert play(exchange, a_grant()) == [Release(lease_id="lease-1", unused=True)]


@pytest.mark.parametrize(
    ("rules", "input_tokens"), [({MediaKind.IMAGE: MediaRule(max_tokens=70)}, 80), ({}, None)]
)
def test_images_cost_what_they_cost_the_other_model(
    rules: dict[MediaKind, MediaRule], input_tokens: int | None
) -> None:
    """Its rules count them; a model that has none is passed over, and the first model's count is as it was."""
    policy = a_policy(
        models=(
            a_model(media={MediaKind.IMAGE: MediaRule(max_tokens=700)}, fallbacks=(TO_SMALL, TO_SPARE)),
            a_model(name="small", media=rules),
        ),
        pools=(a_pool(), a_pool(name="spare", cluster="spare")),
    )
    exchange = an_exchange(policy)
    image = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
    body = {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": [image]}]}
    play(exchange, HEAD, a_body(json.dumps(body).encode()), a_count(10))
    effects = play(exchange, FULL, a_count(10)) if input_tokens else play(exchange, FULL)
    (asked,) = (effect for effect in effects if isinstance(effect, Reserve))
    assert asked.reservation.input_tokens == (input_tokens or 710)
    assert asked.reservation.pool.name == ("chat" if input_tokens else "spare")
    if input_tokens:
        (spare,) = play(exchange, FULL)
        assert isinstance(spare, Reserve)
        assert spare.reservation.input_tokens == 710


def test_a_body_of_megabytes_is_not_kept_for_another_model() -> None:
    """It would not be changed, so the next fallback is tried at once, and nothing of the body is held meanwhile."""
    raw = CHAT[:-1] + b" " * LARGEST_CHANGED_BYTES + b"}"
    exchange = an_exchange(a_world(TO_SMALL, TO_SPARE, limits=a_limits(body_bytes=1 << 22)))
    play(exchange, HEAD, a_body(raw), a_count())
    assert exchange._raw is None
    (asked,) = play(exchange, FULL)
    assert isinstance(asked, Reserve)
    assert asked.reservation.pool.name == "spare"
