from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from extproc.dialects.refusals import LONGEST_MESSAGE, anthropic_error, openai_error, tgi_error
from extproc.dialects.registry import DIALECTS
from extproc.domain.contract import Refusal, Retry, refusal_headers
from extproc.domain.outcome import Reason

GOLDEN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("refusals.golden.json").read_text())
"""The bodies that clients see, by family and reason. A change here is a change of the public contract."""

FAMILIES: dict[str, Callable[[Refusal, str], dict[str, Any]]] = {
    "openai": openai_error,
    "anthropic": anthropic_error,
    "tgi": tgi_error,
}


def refusal(reason: Reason) -> Refusal:
    """A refusal with everything that its row of the contract can tell."""
    bare = Refusal(reason=reason, message="say what to change")
    return Refusal(
        reason=reason,
        message="say what to change",
        param="max_tokens" if bare.row.status == 400 else None,
        retry_after_ms=1501 if bare.row.retry is Retry.LATER else None,
        input_tokens=14_000 if bare.row.status in (413, 429) else None,
        output_tokens=4_000 if bare.row.status in (413, 429) else None,
        maximums={"context_tokens": 8192} if bare.row.status == 413 else None,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reason", list(Reason))
def test_bodies_are_the_published_ones(reason: Reason, family: str) -> None:
    """Every reason has, in every family of APIs, exactly the body that is written down."""
    body = FAMILIES[family](refusal(reason), "req-1")
    assert body == GOLDEN[family][reason]
    assert json.loads(json.dumps(body)) == body


def test_the_published_bodies_are_all_in_use() -> None:
    """The golden file has no family and no reason that does not exist."""
    assert set(GOLDEN) == set(FAMILIES)
    assert all(set(bodies) == set(Reason) for bodies in GOLDEN.values())


def test_every_dialect_belongs_to_a_family() -> None:
    """No dialect words refusals in a way of its own."""
    assert {dialect.error_body for dialect in DIALECTS} == set(FAMILIES.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_known_is_not_told(family: str) -> None:
    """A bare refusal has no wait, no maximums and no counts, and its message is cut at the limit."""
    body = FAMILIES[family](Refusal(reason=Reason.BODY_TOO_LARGE, message="x" * 500), "req-1")
    text = json.dumps(body)
    assert "x" * LONGEST_MESSAGE in text
    assert "x" * (LONGEST_MESSAGE + 1) not in text
    assert not [name for name in ("retry_after", "maximums", "counted") if name in text]


@pytest.mark.parametrize(
    ("wait_ms", "seconds", "told_ms"), [(0, 1, 1), (1, 1, 1), (1000, 1, 1000), (1001, 2, 1001)]
)
def test_the_wait_in_the_body_is_the_wait_in_the_headers(wait_ms: int, seconds: int, told_ms: int) -> None:
    """Whole seconds are rounded up and are never zero, in both places."""
    told = Refusal(reason=Reason.QUEUE_FULL, message="m", retry_after_ms=wait_ms)
    error = openai_error(told, "req-1")["error"]
    headers = dict(refusal_headers(told, lane=None, policy_version="p", request_id="req-1"))
    assert (error["retry_after"], error["retry_after_ms"]) == (seconds, told_ms)
    assert (headers["retry-after"], headers["retry-after-ms"]) == (str(seconds), str(told_ms))


def answer(reason: Reason, family: str) -> httpx2.MockTransport:
    told = refusal(reason)
    headers = refusal_headers(told, lane=None, policy_version="p", request_id="req-1")

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(
            told.row.status, json=FAMILIES[family](told, "req-1"), headers=headers, request=request
        )

    return httpx2.MockTransport(respond)


@pytest.mark.parametrize("reason", list(Reason))
def test_the_openai_library_exposes_the_reason(reason: Reason) -> None:
    """The official client raises its own exception, with our code, type, param and request id."""
    with (
        httpx2.Client(transport=answer(reason, "openai")) as transport,
        openai.OpenAI(api_key="k", base_url="http://gate", http_client=transport, max_retries=0) as client,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
    told = refusal(reason)
    assert caught.value.status_code == told.row.status
    assert (caught.value.code, caught.value.type) == (str(reason), told.row.openai_type)
    assert (caught.value.param, caught.value.request_id) == (told.param, "req-1")
    assert isinstance(caught.value, openai.RateLimitError) == (told.row.status == 429)


@pytest.mark.parametrize("reason", list(Reason))
def test_the_anthropic_library_exposes_the_reason(reason: Reason) -> None:
    """The official client raises its own exception, with our type, error code and message."""
    with (
        httpx2.Client(transport=answer(reason, "anthropic")) as transport,
        anthropic.Anthropic(
            api_key="k", base_url="http://gate", http_client=transport, max_retries=0
        ) as client,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    told = refusal(reason)
    assert caught.value.status_code == told.row.status
    assert (caught.value.error_code, caught.value.type) == (str(reason), told.row.anthropic_type)
    assert caught.value.api_message == told.message
    assert isinstance(caught.value, anthropic.RateLimitError) == (told.row.status == 429)
