"""Random walks through the machine: whatever happens in whatever order, the books of an exchange balance."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.dialects.body import BodyRead, BodyRefused
from extproc.domain.contract import Refusal
from extproc.domain.outcome import Reason
from extproc.domain.policy import Fallback, Lane, ModelFallback, PoolFallback, RegionFallback
from extproc.domain.prompt import AtLeast, Counted, CountFailed
from extproc.domain.reservation import Balance, Denied, Granted, Scope, Unavailable
from extproc.exchange.events import (
    BodyMode,
    Continue,
    CountTokens,
    DrainBegan,
    Echo,
    Event,
    Faulted,
    Observe,
    Phase,
    ReadBody,
    Refuse,
    Release,
    RequestBody,
    RequestHeaders,
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
from extproc.exchange.law import ProtocolViolation, State
from tests.builders import a_model, a_policy, a_pool
from tests.exchange.rig import (
    CHAT,
    a_body,
    a_count,
    a_grant,
    a_head,
    an_exchange,
    long_json,
    plain_json,
    read_elsewhere,
)

LEDGER_ANSWERS: list[Event] = [
    a_grant(),
    Denied(scope=Scope.LANE_SHARE, wait_ms=10, balance=Balance()),
    Denied(scope=Scope.WITHDRAWN, wait_ms=0, balance=Balance()),
    Unavailable(wait_ms=10),
]
COUNT_ANSWERS: list[Event] = [
    a_count(),
    a_count(32_768),
    AtLeast(input_tokens=99_999),
    CountFailed(reason=Reason.TOKENIZER_OVERLOADED, detail="busy"),
]
READ = BodyRefused(
    refusal=Refusal(reason=Reason.MALFORMED_REQUEST, message="stands for what the reader answers")
)
HEADS = [
    a_head(path, method=method, body_mode=mode, body_unasked=unasked, end_of_stream=ended)
    for path in ("/v1/chat/completions", "/v1/models")
    for method in ("POST", "GET")
    for mode in BodyMode
    for unasked in ((False, True) if mode is BodyMode.STREAMED else (False,))
    for ended in (False, True)
]
ANY_EVENT = st.one_of(
    st.sampled_from(HEADS),
    st.sampled_from(
        [
            a_body(),
            a_body(CHAT[:7], end_of_stream=False),
            a_body(CHAT[7:]),
            RequestTrailers(),
            ResponseHeaders(),
            ResponseBody(data=b"x", end_of_stream=False),
            ResponseTrailers(),
            StreamEnded(),
            DrainBegan(),
            Faulted(detail="KeyError"),
        ]
    ),
    st.sampled_from(LEDGER_ANSWERS),
    st.sampled_from(COUNT_ANSWERS),
    st.just(READ),
)
FALLBACKS: st.SearchStrategy[list[Fallback]] = st.lists(
    st.sampled_from(
        [
            PoolFallback(pool="chat"),
            PoolFallback(pool="spare"),
            ModelFallback(model="small"),
            RegionFallback(origin="https://eu.example"),
        ]
    ),
    max_size=4,
)
PHASE_OF = {
    RequestHeaders: Phase.REQUEST_HEADERS,
    RequestBody: Phase.REQUEST_BODY,
    RequestTrailers: Phase.REQUEST_TRAILERS,
    ResponseHeaders: Phase.RESPONSE_HEADERS,
    ResponseBody: Phase.RESPONSE_BODY,
    ResponseTrailers: Phase.RESPONSE_TRAILERS,
}


@settings(max_examples=1500, deadline=None)
@given(
    st.sampled_from(HEADS),
    st.lists(ANY_EVENT, max_size=12),
    st.sampled_from(LEDGER_ANSWERS),
    FALLBACKS,
    st.booleans(),
)
def test_every_grant_is_released_exactly_once_and_no_message_is_answered_twice(
    head: RequestHeaders, walk: list[Event], last_answer: Event, fallbacks: list[Fallback], long: bool
) -> None:
    """Grants and releases balance; answers never outnumber messages; after a refusal or the end: silence."""
    exchange = an_exchange(
        a_policy(
            models=(
                a_model(fallbacks=tuple(fallbacks)),
                a_model(name="small", lanes={Lane.INTERACTIVE: "spare"}),
            ),
            pools=(a_pool(), a_pool(name="spare", cluster="spare")),
        ),
        read_json=long_json if long else plain_json,
    )
    to_read: list[ReadBody] = []
    counts_owed = ledger_owed = 0
    granted = released = abandoned_by_drain = 0
    received: Counter[Phase] = Counter()
    answered: Counter[Phase] = Counter()
    silent = False
    asked = 0
    decided = withdrawn = 0
    tail: list[Event] = [StreamEnded(), READ, a_count(), last_answer, StreamEnded()]
    for step, event in enumerate([head, *walk, *tail]):
        is_count = isinstance(event, Counted | AtLeast | CountFailed)
        is_ledger = isinstance(event, Granted | Denied | Unavailable)
        # Ports answer when they were asked, and only once: other answers are not part of any history.
        if event is READ:
            if not to_read:
                continue
            event = read_elsewhere(to_read.pop().body)  # noqa: PLW2901
        elif isinstance(event, CountFailed) and to_read:
            to_read.clear()  # what there is no time to read
            counts_owed += 1
        elif (is_count and not counts_owed) or (is_ledger and not ledger_owed):
            continue
        before = exchange.state
        try:
            effects = exchange.receive(event, step)
        except ProtocolViolation:
            assert not is_count
            assert not is_ledger
            assert not isinstance(event, BodyRead | BodyRefused)
            continue
        counts_owed -= is_count
        ledger_owed -= is_ledger
        if isinstance(event, Granted):
            granted += 1
        if type(event) in PHASE_OF:
            received[PHASE_OF[type(event)]] += 1
        if isinstance(event, DrainBegan) and before is State.FORWARDED:
            abandoned_by_drain += 1
        for effect in effects:
            if isinstance(effect, ReadBody):
                to_read.append(effect)
                assert counts_owed + ledger_owed == 0, "asked two questions at once"
                assert long
            if isinstance(effect, CountTokens):
                counts_owed += 1
                assert counts_owed + ledger_owed + len(to_read) == 1, "asked two questions at once"
            if isinstance(effect, Reserve):
                ledger_owed += 1
                asked += 1
                assert counts_owed + ledger_owed + len(to_read) == 1, "asked two questions at once"
            if isinstance(effect, Release):
                released += 1
            if isinstance(effect, Withdraw):
                withdrawn += 1
                assert ledger_owed, "withdrew from a line in which it does not stand"
            if isinstance(effect, Observe):
                decided += 1
            if isinstance(effect, Send):
                assert not silent, f"sent {effect.answer} after the last word"
                if isinstance(effect.answer, Refuse):
                    silent = True
                elif isinstance(effect.answer, Continue | Route):
                    answered[effect.answer.phase] += 1
                elif isinstance(effect.answer, Echo):
                    assert head.body_mode is BodyMode.FULL_DUPLEX_STREAMED
        silent = silent or isinstance(event, StreamEnded)
        assert all(answered[phase] <= received[phase] for phase in Phase)

    assert exchange.state is State.CLOSED
    assert counts_owed == ledger_owed == len(to_read) == 0
    # What a drain handed over is released by the access log; an unavailable ledger is told to forget.
    assert released >= granted - abandoned_by_drain
    assert released <= granted + isinstance(last_answer, Unavailable) + sum(
        isinstance(event, Unavailable) for event in walk
    )
    assert decided <= 1
    assert asked <= 1 + len(fallbacks)
    assert withdrawn <= 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, len(CHAT) - 1), max_size=6), st.booleans())
def test_a_body_counts_the_same_however_it_is_cut(cuts: list[int], full_duplex: bool) -> None:
    """Chunk borders mean nothing: the counter is asked the same question."""
    edges = [0, *sorted(set(cuts)), len(CHAT)]
    mode = BodyMode.FULL_DUPLEX_STREAMED if full_duplex else BodyMode.STREAMED
    exchange = an_exchange()
    effects = exchange.receive(a_head(body_mode=mode), 0)
    for start, end in itertools.pairwise(edges):
        effects = exchange.receive(a_body(CHAT[start:end], end_of_stream=end == len(CHAT)), 1)
    whole = an_exchange()
    whole.receive(a_head(), 0)
    assert effects == whole.receive(a_body(), 1)
