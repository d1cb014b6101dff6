"""Transcripts of exchanges whose body is too long to be read at once: somebody else reads it, and answers once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.dialects.body import MOST_PROMPTS, BodyRead, BodyRefused
from extproc.domain.contract import Refusal
from extproc.domain.media import MediaKind, MediaRule
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane, ModelFallback, Policy
from extproc.domain.prompt import CountFailed
from extproc.domain.reservation import Balance, Denied, Scope
from extproc.domain.retries import RetryBook
from extproc.exchange.events import (
    BodyMode,
    Continue,
    CountTokens,
    DrainBegan,
    Effect,
    Event,
    Faulted,
    Observe,
    Phase,
    ReadBody,
    Refuse,
    RequestTrailers,
    Reserve,
    ResponseBody,
    ResponseHeaders,
    Route,
    StreamEnded,
)
from extproc.exchange.law import State
from extproc.exchange.machine import Exchange
from tests.builders import a_lane, a_model, a_policy, a_pool
from tests.exchange.rig import (
    CHAT,
    a_body,
    a_count,
    a_grant,
    a_head,
    an_exchange,
    answers,
    long_json,
    play,
    read_elsewhere,
)

BUSY = CountFailed(reason=Reason.TOKENIZER_OVERLOADED, detail="busy")
REFUSED = BodyRefused(refusal=Refusal(reason=Reason.MALFORMED_REQUEST, message="no JSON"))


def reading(policy: Policy | None = None, raw: bytes = CHAT, **changes: Any) -> tuple[Exchange, ReadBody]:
    """An exchange whose body is being read, and what it asked for that."""
    exchange = an_exchange(policy, read_json=long_json, **changes)
    (asked,) = play(exchange, a_head(), a_body(raw))[1:]
    assert isinstance(asked, ReadBody)
    assert exchange.state is State.PARSING
    return exchange, asked


def the_refusal(effects: list[Effect]) -> Refuse:
    """The one refusal among the effects; nothing is reserved beside it."""
    assert not any(isinstance(effect, Reserve) for effect in effects)
    (refusal,) = (answer for answer in answers(effects) if isinstance(answer, Refuse))
    return refusal


def test_a_long_body_is_read_elsewhere_and_then_counted() -> None:
    """One question to the reader, with all that it takes; its answer leads on as if it had been read at once."""
    exchange, asked = reading()
    assert (asked.body.raw, asked.body.path, asked.tenant) == (CHAT, "/v1/chat/completions", "acme")
    (counting,) = play(exchange, read_elsewhere(asked.body))
    assert isinstance(counting, CountTokens)
    assert exchange._raw is None, "megabytes are kept for a fallback that there is not"
    (reserving,) = play(exchange, a_count())
    assert isinstance(reserving, Reserve)
    (route,) = answers(play(exchange, a_grant()))
    assert isinstance(route, Route)
    assert (route.phase, route.decision.outcome) == (Phase.REQUEST_BODY, Outcome.ADMITTED)


FULL = Denied(scope=Scope.REPLICA_TOKENS, wait_ms=1500, balance=Balance())
IMAGES = {
    "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}
    ]
}


def a_world() -> Policy:
    """A model that takes images, and a smaller one for when there is no room, which takes fewer."""
    rules = {MediaKind.IMAGE: MediaRule(max_tokens=1_000)}
    small = dict.fromkeys((Lane.INTERACTIVE, Lane.BULK), "small")
    return a_policy(
        models=(
            a_model(fallbacks=(ModelFallback(model="small"),), media=rules),
            a_model(name="small", lanes=small, media={MediaKind.IMAGE: MediaRule(max_tokens=10)}),
        ),
        pools=(a_pool(), a_pool(name="small", cluster="small")),
    )


@pytest.mark.parametrize(
    "raw",
    [
        CHAT,
        b"{",
        CHAT.replace(b"tiny", b"nobody's"),
        CHAT.replace(b'"tiny"', b"1"),
        CHAT.replace(b'"messages"', b'"massages"'),
        json.dumps(IMAGES | {"model": "tiny"}).encode(),
        json.dumps(IMAGES | {"model": "small"}).encode(),
    ],
)
@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_where_a_body_is_read_makes_no_difference(raw: bytes, mode: BodyMode, coding: str) -> None:
    """The same effects, through a fallback with another model to the end, wherever the body was read."""
    policy = a_world()
    head = a_head(body_mode=mode, headers={"x-tenant": "acme", "content-encoding": coding})
    here, there = an_exchange(policy), an_exchange(policy, read_json=long_json)
    at_once = [here.receive(head, 0), here.receive(a_body(raw), 1)]
    later = [there.receive(head, 0)]
    (asked,) = there.receive(a_body(raw), 1)
    assert isinstance(asked, ReadBody)
    later.append(there.receive(read_elsewhere(asked.body), 1))
    rest: list[Event] = [a_count(), FULL, a_count(), a_grant(replica="r0"), StreamEnded()]
    for event in rest:
        if here.state is State.REFUSED and not isinstance(event, StreamEnded):
            continue
        at_once.append(here.receive(event, 2))
        later.append(there.receive(event, 2))
    assert later == at_once
    assert here.state is there.state is State.CLOSED


@pytest.mark.parametrize(
    ("answer", "status", "reason", "waits"),
    [(REFUSED, 400, Reason.MALFORMED_REQUEST, False), (BUSY, 503, Reason.TOKENIZER_OVERLOADED, True)],
)
def test_what_cannot_be_read_is_refused(answer: Event, status: int, reason: Reason, waits: bool) -> None:
    """With the reader's reason, and when to come back where that helps; the retry book has nothing open."""
    retries = RetryBook(b"secret")
    exchange, _ = reading(retries=retries)
    refusal = the_refusal(play(exchange, answer))
    assert (refusal.status, refusal.decision.reason) == (status, reason)
    assert ("retry-after" in dict(refusal.headers)) is waits
    assert play(exchange, StreamEnded()) == []
    assert exchange.state is State.CLOSED
    assert not retries._open


@pytest.mark.parametrize("late", [BUSY, REFUSED, None], ids=["busy", "refused", "read"])
@pytest.mark.parametrize("departure", [StreamEnded(), ResponseHeaders()], ids=["hang-up", "local reply"])
def test_who_leaves_meanwhile_reserves_nothing(departure: Event, late: Event | None) -> None:
    """Told once as abandoned; the reader's answer, when it comes, is the end of it."""
    exchange, asked = reading()
    effects = play(exchange, departure)
    outcomes = [effect.decision.outcome for effect in effects if isinstance(effect, Observe)]
    assert outcomes == [Outcome.ABANDONED]
    assert exchange.state.name == "COUNTING_ALONE"
    local_reply = isinstance(departure, ResponseHeaders)
    assert answers(effects) == ([Continue(phase=Phase.RESPONSE_HEADERS)] if local_reply else [])
    if local_reply:
        assert play(exchange, StreamEnded()) == []
    assert play(exchange, late or read_elsewhere(asked.body)) == []
    assert exchange.state is State.CLOSED


def test_a_local_replys_body_may_come_after_the_readers_answer() -> None:
    """Envoy goes on with its own answer, whatever happens here."""
    exchange, asked = reading()
    play(exchange, ResponseHeaders(), read_elsewhere(asked.body))
    assert exchange.state is State.CLOSED
    body = ResponseBody(data=b"x", end_of_stream=True)
    assert answers(play(exchange, body)) == [Continue(phase=Phase.RESPONSE_BODY)]
    assert play(exchange, StreamEnded()) == []


def test_a_drain_meanwhile_lets_the_request_go_on_without_a_wait() -> None:
    """As while counting: it is decided, but keeps nobody waiting any more."""
    lanes = {Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, residence_ms=5_000)}
    exchange, asked = reading(a_policy(lanes=lanes))
    assert play(exchange, DrainBegan()) == []
    (reserving,) = play(exchange, read_elsewhere(asked.body), a_count())[1:]
    assert isinstance(reserving, Reserve)
    assert reserving.reservation.hold_ms == 0


def test_time_spent_reading_counts_against_the_deadline() -> None:
    """What is left for the engine is what was not spent here."""
    exchange, asked = reading()
    exchange.receive(read_elsewhere(asked.body), 1_700_000)
    (reserving,) = exchange.receive(a_count(), 2_000_000)
    assert isinstance(reserving, Reserve)
    assert reserving.reservation.deadline_in_ms == 30_000 - 2_000


@pytest.mark.parametrize("late", [BUSY, REFUSED, None], ids=["busy", "refused", "read"])
def test_a_fault_meanwhile_is_the_answer(late: Event | None) -> None:
    """503 once; what the reader says afterwards changes nothing."""
    exchange, asked = reading()
    assert the_refusal(play(exchange, Faulted(detail="KeyError"))).status == 503
    assert play(exchange, late or read_elsewhere(asked.body)) == []
    assert play(exchange, StreamEnded()) == []
    assert exchange.state is State.CLOSED


def test_trailers_meanwhile_are_owed_an_answer() -> None:
    """They are answered with the decision, like the body."""
    exchange, asked = reading()
    assert play(exchange, RequestTrailers()) == []
    effects = play(exchange, read_elsewhere(asked.body), a_count(), a_grant())
    assert [answer.phase for answer in answers(effects) if isinstance(answer, Route | Continue)] == [
        Phase.REQUEST_BODY,
        Phase.REQUEST_TRAILERS,
    ]


def test_the_reader_is_asked_when_trailers_complete_the_body() -> None:
    """A streamed body ends with its trailers."""
    exchange = an_exchange(read_json=long_json)
    play(exchange, a_head(body_mode=BodyMode.STREAMED), a_body(end_of_stream=False))
    (asked,) = play(exchange, RequestTrailers())
    assert isinstance(asked, ReadBody)
    assert isinstance(read_elsewhere(asked.body), BodyRead)


@pytest.mark.parametrize("one", ["a", [1]], ids=["texts", "token ids"])
def test_a_request_holds_a_bounded_number_of_prompts(one: Any) -> None:
    """Each is a number in what is decided on the event loop; one too many is told before it is counted."""
    for number, refused in ((MOST_PROMPTS, False), (MOST_PROMPTS + 1, True)):
        exchange = an_exchange()
        raw = json.dumps({"model": "tiny", "prompt": [one] * number}).encode()
        effects = play(exchange, a_head("/v1/completions"), a_body(raw))
        if refused:
            assert the_refusal(effects).decision.reason is Reason.INVALID_PARAMETER
        else:
            assert isinstance(effects[-1], CountTokens)
