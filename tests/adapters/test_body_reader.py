"""Long bodies are read in the threads that count: not on the event loop, once, and within the same bounds."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import orjson
import pytest
import pytest_asyncio

from extproc.adapters import json_body, json_pieces
from extproc.adapters.body_reader import Answer, ThreadedBodyReader, read_here
from extproc.adapters.json_body import SHORT_BYTES, SHORT_CONTAINERS, SHORT_VALUES
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.dialects import openai_chat
from extproc.dialects.body import Body, BodyRead, BodyRefused
from extproc.dialects.reading import BadRequest, InferenceRequest
from extproc.domain.outcome import Reason
from extproc.domain.policy import Limits
from extproc.domain.prompt import ChatPrompt, CountFailed
from tests.builders import a_limits, a_policy

CANARY = "canary-7f3a"
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": f"turn, {n} {CANARY}"} for n in range(5_000)],
}


def a_body(raw: bytes, headers: Mapping[str, str] | None = None, **changes: Any) -> Body:
    """A chat request's body."""
    return Body(
        raw=raw,
        headers=headers or {},
        path="/v1/chat/completions",
        dialect=replace(openai_chat.DIALECT, **changes),
        policy=a_policy(limits=a_limits(body_bytes=1 << 23)),
        renamable=False,
    )


class Reading:
    """A reader with threads of its own, and what it answered."""

    def __init__(self, **settings: Any) -> None:
        self.counter = ExactTokenCounter({}, **{"threads": 2, "budget_ms": 60_000, **settings})
        self.answers: list[Answer] = []
        self.delivered_by: set[int] = set()
        self._reader = ThreadedBodyReader(self.counter)

    def ask(self, body: Body, *, tenant: str = "t") -> None:
        """Ask, and note the answer."""
        self._reader.read(body, tenant=tenant, deliver=self._deliver)

    def _deliver(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.delivered_by.add(threading.get_ident())

    async def wait_for(self, number: int = 1) -> list[Answer]:
        """The answers once there are so many."""
        async with asyncio.timeout(20):
            while len(self.answers) < number:
                await asyncio.sleep(0.001)
        return self.answers


@pytest_asyncio.fixture
async def reading() -> AsyncIterator[Reading]:
    """Closed afterwards."""
    made = Reading()
    yield made
    made.counter.close()


@pytest.mark.parametrize("coding", [None, "gzip"])
async def test_a_long_body_is_read_on_no_event_loops_thread(
    reading: Reading, coding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding, parsing and what the dialect makes of it: all in another thread; the answer is told on the loop's."""
    seen: dict[str, set[int]] = {"decode": set(), "parse": set(), "walk": set()}

    def noted(what: str, call: Any) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            seen[what].add(threading.get_ident())
            return call(*arguments, **named)

        return watched

    class Watched:
        loads = staticmethod(noted("parse", orjson.loads))

    monkeypatch.setattr(json_pieces, "orjson", Watched)
    monkeypatch.setattr(json_body, "orjson", Watched)
    monkeypatch.setattr(zlib, "decompressobj", noted("decode", zlib.decompressobj))
    raw = orjson.dumps(LONG)
    headers = {}
    if coding is not None:
        raw, headers = gzip.compress(raw), {"content-encoding": coding}
    body = a_body(raw, headers, read=noted("walk", openai_chat.read))
    assert read_here(raw, headers, body.policy.limits) is None
    seen["decode"].clear()  # the look whether it is short
    reading.ask(body)
    assert reading.answers == []
    (answer,) = await reading.wait_for()
    assert isinstance(answer, BodyRead)
    assert isinstance(answer.request.prompt, ChatPrompt)
    assert list(answer.request.prompt.messages) == LONG["messages"]
    here = threading.get_ident()
    assert reading.delivered_by == {here}
    assert all(
        threads and here not in threads for what, threads in seen.items() if coding or what != "decode"
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (orjson.dumps(LONG)[:-1], Reason.MALFORMED_REQUEST),
        (orjson.dumps(LONG | {"max_tokens": "many"}), Reason.INVALID_PARAMETER),
        (orjson.dumps(LONG | {"model": "nobody's"}), Reason.INVALID_PARAMETER),
        (b'{"a":"' + b"x" * (1 << 23) + b'"}', Reason.BODY_TOO_LARGE),
    ],
)
async def test_what_is_wrong_with_a_long_body_is_its_answer(
    reading: Reading, raw: bytes, reason: Reason
) -> None:
    """The same refusals as for short ones, with nothing of the body in them."""
    reading.ask(a_body(raw))
    (answer,) = await reading.wait_for()
    assert isinstance(answer, BodyRefused)
    assert answer.refusal.reason is reason
    assert CANARY not in str(answer)


async def test_a_fault_is_the_answer_of_one_request(
    reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that nobody expects is 503 for this request; the next one is read."""

    def failing(value: Mapping[str, Any], path: str) -> InferenceRequest:
        raise KeyError("planted")

    with caplog.at_level(logging.ERROR):
        reading.ask(a_body(orjson.dumps(LONG), read=failing))
        (answer,) = await reading.wait_for()
    assert isinstance(answer, CountFailed)
    assert answer.reason is Reason.INTERNAL_ERROR
    assert "body not read" in caplog.text
    reading.ask(a_body(orjson.dumps(LONG)))
    assert isinstance((await reading.wait_for(2))[1], BodyRead)


async def test_too_many_long_bodies_are_refused_at_once() -> None:
    """The bounds of the threads hold for bodies too, for all and for each tenant; and what waits has a budget."""
    gate = threading.Event()

    def waiting(value: Mapping[str, Any], path: str) -> InferenceRequest:
        assert gate.wait(20)
        return openai_chat.read(value, path)

    reading = Reading(threads=1, jobs_limit=4, jobs_per_tenant_limit=3)
    body = a_body(orjson.dumps(LONG), read=waiting)
    try:
        for _ in range(4):
            reading.ask(body, tenant="a")
        (refused,) = reading.answers
        assert isinstance(refused, CountFailed)
        assert refused.reason is Reason.TOKENIZER_OVERLOADED
        reading.ask(body, tenant="b")
        reading.ask(body, tenant="c")
        assert len(reading.answers) == 2
        gate.set()
        answers = await reading.wait_for(6)
        assert sum(isinstance(answer, BodyRead) for answer in answers) == 4
    finally:
        gate.set()
        reading.counter.close()


LIMITS = a_limits(body_bytes=1 << 23)


def here(body: dict[str, Any] | bytes, *, coding: str | None = None, limits: Limits = LIMITS) -> Any:
    """What is read at once; None if it is not."""
    raw = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    headers = {} if coding is None else {"content-encoding": coding}
    return read_here(gzip.compress(raw) if coding else raw, headers, limits)


@pytest.mark.parametrize("coding", [None, "gzip"])
def test_what_is_short_is_read_at_once_and_nothing_else(coding: str | None) -> None:
    """By its bytes once decoded, by its values and by its lists and objects."""
    for body, longer in (
        ({"a": "x" * (SHORT_BYTES - 8)}, {"a": "x" * (SHORT_BYTES - 7)}),
        ({"a": [1] * (SHORT_VALUES + 1)}, {"a": [1] * (SHORT_VALUES + 2)}),
        ({"a": [[]] * (SHORT_CONTAINERS - 2)}, {"a": [[]] * (SHORT_CONTAINERS - 1)}),
    ):
        assert here(body, coding=coding) == body
        assert here(longer, coding=coding) is None


def test_a_short_bomb_is_not_decoded_at_once() -> None:
    """What is short and decodes to much is for the threads, as soon as that is seen."""
    assert here(b'{"a":"' + b"x" * (1 << 22) + b'"}', coding="gzip") is None


def test_limits_hold_for_what_is_read_at_once() -> None:
    """A policy may allow less than what is short."""
    limits = a_limits(body_bytes=2_000)
    for coding in (None, "gzip"):
        with pytest.raises(BadRequest) as caught:
            here({"a": "x" * 2_000}, coding=coding, limits=limits)
        assert caught.value.reason is Reason.BODY_TOO_LARGE
