"""Transcripts of one exchange: the events that happen, the effects that must follow."""

from __future__ import annotations

import json

import pytest

from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane, Posture
from extproc.domain.prompt import AtLeast, CountFailed
from extproc.domain.reservation import Balance, Denied, Scope, Unavailable
from extproc.domain.retries import RetryBook
from extproc.exchange.events import (
    BodyMode,
    CloseStream,
    Continue,
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
    RequestBody,
    RequestTrailers,
    Reserve,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Route,
    Send,
    StreamEnded,
    Withdraw,
)
from extproc.exchange.law import TRANSITIONS, ProtocolViolation, State
from tests.builders import a_lane, a_limits, a_policy
from tests.exchange.rig import CHAT, a_body, a_count, a_grant, a_head, an_exchange, answers, play

DENIED = Denied(scope=Scope.REPLICA_TOKENS, wait_ms=1500, balance=Balance())


def refusal_of(exchange_effects: list[Effect]) -> Refuse:
    """The one refusal among effects."""
    refusals = [answer for answer in answers(exchange_effects) if isinstance(answer, Refuse)]
    assert len(refusals) == 1
    return refusals[0]


def test_an_admitted_chat_is_routed_and_released_when_its_stream_ends() -> None:
    """Head, body, count, grant: the answer to the body routes; the end of the stream releases, once."""
    exchange = an_exchange()

    asked = play(exchange, a_head())
    assert answers(asked) == [Continue(phase=Phase.REQUEST_HEADERS, ask_body=True)]

    counting = play(exchange, a_body())
    assert [type(effect) for effect in counting] == [CountTokens]

    reserving = play(exchange, a_count())
    assert isinstance(reserving[0], Reserve)
    assert reserving[0].reservation.total_tokens == 10 + 100

    route, observed = play(exchange, a_grant())
    assert isinstance(observed, Observe)
    assert observed.decision.outcome is Outcome.ADMITTED
    (answer,) = answers([route])
    assert isinstance(answer, Route)
    assert answer.phase is Phase.REQUEST_BODY
    assert dict(answer.set_headers) == {
        "x-admission-lane": "interactive",
        "x-admission-pool": "chat",
        "x-admission-replica": "r0",
        "x-admission-input-tokens": "10",
        "x-admission-reserved-tokens": "110",
        "x-admission-deadline-ms": "30000",
    }

    assert play(exchange, StreamEnded()) == [Release(lease_id="lease-1")]
    assert play(exchange, StreamEnded()) == []
    assert exchange.state is State.CLOSED


def test_the_clients_own_admission_headers_are_removed() -> None:
    """Whatever a client calls x-admission-… never reaches the engine, in any spelling Envoy lets through."""
    head = a_head(
        headers={"x-tenant": "acme", "x-admission-lane": "vip", "x-admission-secret": "1", "x-other": "1"}
    )
    (route,) = answers(play(an_exchange(), head, a_body(), a_count(), a_grant())[-2:])

    assert isinstance(route, Route)
    assert route.remove_headers == ("x-admission-secret",)
    assert dict(route.set_headers)["x-admission-lane"] == "interactive"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("HEAD", "/v1/chat/completions"), ("OPTIONS", "/v1/completions"), ("POST", "/x")],
)
@pytest.mark.parametrize("end_of_stream", [True, False])
def test_other_routes_pass_untouched(method: str, path: str, end_of_stream: bool) -> None:
    """What is not an inference request gets one CONTINUE per message and no reservation."""
    exchange = an_exchange()
    effects = play(
        exchange,
        a_head(path, method=method, end_of_stream=end_of_stream),
        RequestBody(data=b"x", end_of_stream=True),
        RequestTrailers(),
        ResponseHeaders(),
        ResponseBody(data=b"y", end_of_stream=False),
        ResponseTrailers(),
        StreamEnded(),
    )
    assert answers(effects) == [Continue(phase=phase) for phase in Phase]
    assert len(effects) == len(Phase)


def test_a_post_without_a_body_is_malformed() -> None:
    """No body message will ever come, so the answer must come at the head."""
    refused = refusal_of(play(an_exchange(), a_head(end_of_stream=True)))
    assert (refused.status, dict(refused.headers)["x-admission-reason"]) == (400, "malformed_request")


@pytest.mark.parametrize(
    ("body", "reason", "param"),
    [
        (b"{", Reason.MALFORMED_REQUEST, None),
        (
            b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}',
            Reason.INVALID_PARAMETER,
            "model",
        ),
    ],
)
def test_a_bad_body_is_refused_in_the_callers_dialect(body: bytes, reason: Reason, param: str | None) -> None:
    """The answer names the reason and the field, and quotes nothing."""
    refused = refusal_of(play(an_exchange(), a_head(), a_body(body)))
    assert refused.status == 400
    assert refused.decision.reason is reason
    assert refused.body["error"]["code"] == reason
    assert refused.body["error"]["param"] == param


def test_a_body_over_the_limit_is_refused_before_its_last_byte() -> None:
    """The running total decides, and a declared length over the limit needs no body at all."""
    policy = a_policy(limits=a_limits(body_bytes=1000))
    streamed = an_exchange(policy)
    play(streamed, a_head(body_mode=BodyMode.STREAMED), a_body(b"x" * 1000, end_of_stream=False))
    refused = refusal_of(play(streamed, a_body(b"y", end_of_stream=False)))
    assert (refused.status, refused.decision.reason) == (413, Reason.BODY_TOO_LARGE)

    declared = an_exchange(policy)
    head = a_head(headers={"x-tenant": "acme", "content-length": "1001"})
    assert refusal_of(play(declared, head)).decision.reason is Reason.BODY_TOO_LARGE
    absurd = a_head(headers={"x-tenant": "acme", "content-length": "9" * 5000})
    assert refusal_of(play(an_exchange(policy), absurd)).decision.reason is Reason.BODY_TOO_LARGE


def test_a_cut_partial_body_is_too_large() -> None:
    """BUFFERED_PARTIAL cuts at Envoy's buffer; the rest would pass unseen."""
    refused = refusal_of(
        play(an_exchange(), a_head(body_mode=BodyMode.BUFFERED_PARTIAL), a_body(end_of_stream=False))
    )
    assert refused.decision.reason is Reason.BODY_TOO_LARGE


def test_a_buffered_body_is_whole_even_when_trailers_follow() -> None:
    """Envoy sends a buffered body without end_of_stream when trailers follow it."""
    exchange = an_exchange()
    effects = play(exchange, a_head(), a_body(end_of_stream=False))
    assert isinstance(effects[-1], CountTokens)
    late = play(exchange, a_count(), a_grant(), RequestTrailers())
    assert answers(late)[-1] == Continue(phase=Phase.REQUEST_TRAILERS)


def test_a_streamed_body_is_held_and_answered_after_the_decision() -> None:
    """Three pieces, three answers, none before the grant; the route rides on the first."""
    exchange = an_exchange()
    pieces = [a_body(CHAT[:5], end_of_stream=False), a_body(CHAT[5:9], end_of_stream=False), a_body(CHAT[9:])]
    effects = play(exchange, a_head(body_mode=BodyMode.STREAMED), *pieces)
    assert answers(effects) == [Continue(phase=Phase.REQUEST_HEADERS, ask_body=True)]
    sent = answers(play(exchange, a_count(), a_grant()))
    assert isinstance(sent[0], Route)
    assert sent[1:] == [Continue(phase=Phase.REQUEST_BODY)] * 2


def test_a_streamed_body_that_comes_unasked_holds_the_head_back() -> None:
    """Where bodies follow without the head's answer, the head can still be routed when it is decided."""
    exchange = an_exchange()
    head = a_head(body_mode=BodyMode.STREAMED, body_unasked=True)
    assert play(exchange, head, a_body(CHAT[:5], end_of_stream=False), a_body(CHAT[5:]))[:-1] == []
    sent = answers(play(exchange, a_count(), a_grant()))
    assert isinstance(sent[0], Route)
    assert sent[0].phase is Phase.REQUEST_HEADERS
    assert sent[1:] == [Continue(phase=Phase.REQUEST_BODY)] * 2


def test_a_full_duplex_body_is_given_back_whole_and_in_order() -> None:
    """The head is routed first, then the body returns in pieces below Envoy's limit, the last one marked."""
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "é" * 90_000}], "max_tokens": 1},
        ensure_ascii=False,
    ).encode()
    exchange = an_exchange()
    head = a_head(body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    assert (
        answers(play(exchange, head, a_body(body[:70_000], end_of_stream=False), a_body(body[70_000:]))) == []
    )
    sent = answers(play(exchange, a_count(), a_grant()))
    assert isinstance(sent[0], Route)
    assert sent[0].phase is Phase.REQUEST_HEADERS
    echoes = [answer for answer in sent[1:] if isinstance(answer, Echo)]
    assert b"".join(echo.data for echo in echoes) == body
    assert [echo.end_of_stream for echo in echoes] == [False] * (len(echoes) - 1) + [True]
    assert max(len(echo.data) for echo in echoes) <= 64 * 1024


def test_full_duplex_trailers_close_the_body() -> None:
    """With trailers the last piece is not the end; the trailers' own answer is."""
    exchange = an_exchange()
    head = a_head(body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    play(exchange, head, a_body(end_of_stream=False), RequestTrailers(), a_count())
    sent = answers(play(exchange, a_grant()))
    assert [type(answer) for answer in sent] == [Route, Echo, Continue]
    assert isinstance(sent[1], Echo)
    assert not sent[1].end_of_stream
    assert sent[2] == Continue(phase=Phase.REQUEST_TRAILERS)


def test_full_duplex_passes_other_routes_through_piece_by_piece() -> None:
    """A pass-through in full duplex echoes both directions and never answers a body with CONTINUE."""
    effects = play(
        an_exchange(),
        a_head(
            "/x",
            body_mode=BodyMode.FULL_DUPLEX_STREAMED,
            response_body_mode=BodyMode.FULL_DUPLEX_STREAMED,
        ),
        a_body(b"abc", end_of_stream=False),
        a_body(b"", end_of_stream=True),
        ResponseHeaders(),
        ResponseBody(data=b"out", end_of_stream=True),
    )
    assert answers(effects) == [
        Continue(phase=Phase.REQUEST_HEADERS),
        Echo(phase=Phase.REQUEST_BODY, data=b"abc", end_of_stream=False),
        Echo(phase=Phase.REQUEST_BODY, data=b"", end_of_stream=True),
        Continue(phase=Phase.RESPONSE_HEADERS),
        Echo(phase=Phase.RESPONSE_BODY, data=b"out", end_of_stream=True),
    ]


def test_observed_traffic_is_never_answered_or_reserved() -> None:
    """In observability mode Envoy ignores answers, so none is sent and nothing is held."""
    effects = play(
        an_exchange(),
        a_head(observe_only=True),
        a_body(),
        ResponseHeaders(),
        ResponseTrailers(),
        StreamEnded(),
    )
    assert effects == []


def test_a_stream_may_begin_with_a_local_reply_or_end_without_a_word() -> None:
    """Envoy refused before we saw anything, or the stream was opened and reset."""
    assert answers(play(an_exchange(), ResponseHeaders())) == [Continue(phase=Phase.RESPONSE_HEADERS)]
    assert play(an_exchange(), StreamEnded()) == []


def test_a_denial_is_told_with_its_limit_and_an_honest_wait() -> None:
    """429 with the reason, whole seconds rounded up, and the same instant in milliseconds."""
    refused = refusal_of(play(an_exchange(), a_head(), a_body(), a_count(), DENIED))
    headers = dict(refused.headers)
    assert refused.status == 429
    assert headers["x-admission-reason"] == "token_budget_exhausted"
    assert headers["x-admission-lane"] == "interactive"
    assert 1500 <= int(headers["retry-after-ms"]) <= 1500 * 1.25
    assert headers["retry-after"] == "2"
    assert "x-should-retry" not in headers


@pytest.mark.parametrize(
    ("count", "status", "reason"),
    [
        (AtLeast(input_tokens=40_000), 413, Reason.CONTEXT_LIMIT),
        (a_count(32_768), 413, Reason.CONTEXT_LIMIT),
        (CountFailed(reason=Reason.TOKENIZER_OVERLOADED, detail="busy"), 503, Reason.TOKENIZER_OVERLOADED),
        (CountFailed(reason=Reason.INVALID_PARAMETER, detail="template"), 400, Reason.INVALID_PARAMETER),
    ],
)
def test_what_cannot_be_counted_or_cannot_fit_is_refused(count: Event, status: int, reason: Reason) -> None:
    """A count that failed or can never fit ends the exchange before the ledger is asked."""
    exchange = an_exchange()
    effects = play(exchange, a_head(), a_body(), count)
    refused = refusal_of(effects)
    assert (refused.status, refused.decision.reason) == (status, reason)
    assert not any(isinstance(effect, Reserve) for effect in effects)
    assert ("retry-after" in dict(refused.headers)) == (status == 503)


def test_a_draining_worker_refuses_newcomers_and_lets_admitted_answers_go_on() -> None:
    """New requests get 503; a stream past admission is ended cleanly and keeps its lease."""
    assert refusal_of(play(an_exchange(draining=True), a_head())).decision.reason is Reason.DRAINING

    exchange = an_exchange()
    play(exchange, a_head(), a_body(), a_count(), a_grant())
    assert play(exchange, DrainBegan()) == [CloseStream()]
    assert play(exchange, StreamEnded()) == []


def test_a_late_grant_after_the_client_left_is_given_back() -> None:
    """The ledger may answer after the stream has ended; the lease must not leak."""
    exchange = an_exchange()
    left = play(exchange, a_head(), a_body(), a_count(), StreamEnded())
    assert isinstance(left[-2], Observe)
    assert left[-2].decision.outcome is Outcome.ABANDONED
    assert play(exchange, a_grant()) == [Release(lease_id="lease-1", unused=True)]
    assert exchange.state is State.CLOSED


def test_a_local_reply_during_the_decision_is_answered_at_once() -> None:
    """Envoy has answered the client itself (a timeout, a 413) and waits for our word before it can say so."""
    exchange = an_exchange()
    effects = play(exchange, a_head(), a_body(), a_count(), ResponseHeaders())
    assert answers(effects)[-1] == Continue(phase=Phase.RESPONSE_HEADERS)
    assert play(exchange, StreamEnded()) == []
    assert play(exchange, a_grant()) == [Release(lease_id="lease-1", unused=True)]


@pytest.mark.parametrize(("posture", "admitted"), [(Posture.CLOSED, False), (Posture.OPEN, True)])
def test_the_lanes_posture_decides_without_a_ledger(posture: Posture, admitted: bool) -> None:
    """Closed answers 503, open admits without a lease; a grant whose answer was lost is given back in both."""
    policy = a_policy(lanes={Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, posture=posture)})
    exchange = an_exchange(policy)
    effects = play(exchange, a_head(), a_body(), a_count(), Unavailable(wait_ms=3000))
    assert Release(lease_id="lease-1", unused=not admitted) in effects
    if admitted:
        assert isinstance(answers(effects)[-1], Route)
    else:
        refused = refusal_of(effects)
        assert (refused.status, dict(refused.headers)["retry-after"]) in {(503, "3"), (503, "4")}
    assert play(exchange, StreamEnded()) == []


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_fault_becomes_this_requests_answer(steps: int) -> None:
    """Whatever fails, wherever: 503 internal_error for this request, and a late grant is still given back."""
    exchange = an_exchange()
    history: list[Event] = [a_head(), a_body(), a_count()]
    play(exchange, *history[:steps])
    assert refusal_of(play(exchange, Faulted(detail="KeyError"))).decision.reason is Reason.INTERNAL_ERROR
    if exchange.state is State.REFUSED and steps == 3:
        assert play(exchange, a_grant()) == [Release(lease_id="lease-1", unused=True)]


def test_a_fault_before_anything_is_known_fails_the_stream() -> None:
    """A clean end would let the request pass unseen."""
    assert play(an_exchange(), Faulted(detail="KeyError")) == [CloseStream(failed=True)]


def test_an_illegal_event_names_event_and_state_and_changes_nothing() -> None:
    """The law is a table; breaking it is a typed error."""
    exchange = an_exchange()
    with pytest.raises(ProtocolViolation, match="Granted is not legal while START"):
        exchange.receive(a_grant(), 0)
    assert exchange.state is State.START


def test_the_table_knows_every_state_and_lets_every_stream_end() -> None:
    """No state is forgotten, and from each one the stream may end and a fault may happen."""
    assert set(TRANSITIONS) == set(State)
    for row in TRANSITIONS.values():
        assert {StreamEnded, Faulted, DrainBegan} <= set(row)


HOLDING = (a_head(), a_body(), a_count())
"""Everything up to the question that the ledger has not answered yet."""


@pytest.mark.parametrize(
    "ends",
    [StreamEnded(), ResponseHeaders(), DrainBegan(), Faulted(detail="KeyError")],
    ids=lambda end: type(end).__name__,
)
def test_whatever_ends_the_need_for_an_answer_gives_up_the_place_in_line(ends: Event) -> None:
    """A hang-up, a local reply, a drain and a fault withdraw a held request, once; its late answer is harmless."""
    exchange = an_exchange()
    play(exchange, *HOLDING)
    assert play(exchange, ends).count(Withdraw(lease_id="lease-1")) == 1
    withdrawn = Denied(scope=Scope.WITHDRAWN, wait_ms=0, balance=Balance())
    assert play(exchange, withdrawn) == []
    assert Withdraw(lease_id="lease-1") not in play(exchange, StreamEnded())


def test_a_held_request_is_refused_when_the_worker_drains() -> None:
    """Nobody is kept waiting by a worker that is about to stop: 503 draining, and come back."""
    exchange = an_exchange()
    play(exchange, *HOLDING)
    refuse = refusal_of(play(exchange, DrainBegan()))
    assert (refuse.status, refuse.decision.reason) == (503, Reason.DRAINING)
    assert dict(refuse.headers)["retry-after"] in {"2", "3"}
    assert play(exchange, a_grant()) == [Release(lease_id="lease-1", unused=True)]


def test_a_draining_worker_holds_nobody() -> None:
    """A request that is counted while the worker drains may still be admitted, but not wait."""
    lanes = {
        Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, residence_ms=2_000, queue_requests=9, queue_tokens=9_000)
    }
    exchange = an_exchange(a_policy(lanes=lanes))
    play(exchange, a_head(), a_body(), DrainBegan())
    (reserve,) = play(exchange, a_count())
    assert isinstance(reserve, Reserve)
    assert reserve.reservation.hold_ms == 0


@pytest.mark.parametrize(
    ("message_timeout_ms", "hold_ms"),
    [(None, 2_000), (60_000, 2_000), (2_250, 1_999), (1_000, 749), (200, 0)],
)
def test_a_hold_ends_before_envoys_patience_does(message_timeout_ms: int | None, hold_ms: int) -> None:
    """Envoy would answer 504 and be retried at once: 1 ms has gone by, and 250 ms are kept for the answer."""
    lanes = {
        Lane.INTERACTIVE: a_lane(Lane.INTERACTIVE, residence_ms=2_000, queue_requests=9, queue_tokens=9_000)
    }
    exchange = an_exchange(a_policy(lanes=lanes))
    exchange.receive(a_head(message_timeout_ms=message_timeout_ms), 0)
    exchange.receive(a_body(), 5_000)
    (reserve,) = exchange.receive(a_count(), 6_000)
    assert isinstance(reserve, Reserve)
    assert reserve.reservation.hold_ms == hold_ms


def test_the_deadline_that_travels_on_is_what_the_hold_has_left_of_it() -> None:
    """30 s to the first token, 1 ms of reading and 2 s of waiting leave the engine 27,998 ms."""
    exchange = an_exchange()
    for at_us, event in ((0, a_head()), (1_000, a_body()), (2_000, a_count())):
        exchange.receive(event, at_us)
    (route, observe) = exchange.receive(a_grant(waited_ms=2_000), 2_002_000)
    assert isinstance(route, Send)
    assert isinstance(route.answer, Route)
    assert dict(route.answer.set_headers)["x-admission-deadline-ms"] == "27998"
    assert isinstance(observe, Observe)
    assert observe.decision.waited_ms == 2_000


def test_a_refusal_after_a_wait_tells_of_it() -> None:
    """How long it waited, what for, and how many would still have gone first; in words and in numbers."""
    exchange = an_exchange()
    play(exchange, *HOLDING)
    denied = Denied(
        scope=Scope.RESIDENCE,
        wait_ms=1_500,
        balance=Balance(),
        waited_ms=2_000,
        behind=Scope.REPLICA_TOKENS,
        ahead_requests=7,
    )
    refuse = refusal_of(play(exchange, denied))
    error = refuse.body["error"]
    assert (error["reason"], error["waited_ms"], error["ahead_requests"]) == ("residence_expired", 2_000, 7)
    assert "waited 2000 ms: No replica" in error["message"]
    assert refuse.decision.waited_ms == 2_000


def test_a_retry_that_comes_too_early_too_often_is_refused_before_its_body_is_read() -> None:
    """Marked retries of one caller count against what it was told; the penalty has its own reason."""
    book = RetryBook(b"secret")
    head = a_head(
        headers={"x-tenant": "acme", "x-stainless-retry-count": "1", "authorization": "Bearer s3cret"}
    )
    reasons: list[Reason | None] = []
    for _ in range(6):
        exchange = an_exchange(retries=book)
        effects = play(exchange, head)
        if exchange.state is State.READING:
            effects = play(exchange, a_body(), a_count(), DENIED)
        refuse = refusal_of(effects)
        reasons.append(refuse.decision.reason)
        assert "s3cret" not in str(refuse)
        play(exchange, StreamEnded())
    assert reasons == [Reason.TOKEN_BUDGET_EXHAUSTED] * 4 + [Reason.RETRY_PENALTY] * 2
    assert (refuse.status, dict(refuse.headers)["retry-after"] >= "10") == (429, True)


def test_a_caller_that_says_nothing_is_known_by_its_body() -> None:
    """The same body again and again, before its time: refused before it is parsed, and every body is let go."""
    book = RetryBook(b"secret")
    reasons: list[Reason | None] = []
    for _ in range(5):
        exchange = an_exchange(retries=book)
        effects = play(exchange, a_head(), a_body())
        if exchange.state is State.COUNTING:
            effects = play(exchange, a_count(), DENIED)
        reasons.append(refusal_of(effects).decision.reason)
        play(exchange, StreamEnded())
    assert reasons == [Reason.TOKEN_BUDGET_EXHAUSTED] * 4 + [Reason.RETRY_PENALTY]
    assert not book._open


def test_other_refusals_are_not_held_against_a_caller() -> None:
    """A request that can never be admitted is told no time to come back, so it cannot come back too early."""
    book = RetryBook(b"secret")
    for _ in range(10):
        exchange = an_exchange(retries=book)
        effects = play(exchange, a_head(), a_body(), a_count(99_999))
        assert refusal_of(effects).decision.reason is Reason.CONTEXT_LIMIT
        play(exchange, StreamEnded())
    assert len(book) == 0
