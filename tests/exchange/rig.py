"""An exchange with answers at hand: the smallest world in which the machine can be driven step by step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from extproc.dialects.body import Body, BodyRead, BodyRefused, refused, understood
from extproc.dialects.reading import BadRequest
from extproc.domain.load import LoadBook
from extproc.domain.outcome import Reason
from extproc.domain.policy import Limits, Policy
from extproc.domain.prompt import Counted
from extproc.domain.reservation import Balance, Granted
from extproc.domain.retries import RetryBook
from extproc.exchange.events import Answer, Effect, Event, RequestBody, RequestHeaders, Send
from extproc.exchange.machine import Exchange, ReadJson
from tests.builders import a_policy

CHAT = json.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}
).encode()


def plain_json(raw: bytes, headers: Mapping[str, str], limits: Limits) -> Mapping[str, Any]:
    """A body reader without bounds: the real one is an adapter with tests of its own."""
    del headers, limits
    try:
        body = json.loads(raw)
    except ValueError:
        raise BadRequest("The body is not JSON.", reason=Reason.MALFORMED_REQUEST) from None
    assert isinstance(body, dict)
    return body


def long_json(raw: bytes, headers: Mapping[str, str], limits: Limits) -> None:
    """Every body is too long to be read at once."""
    del raw, headers, limits


def read_elsewhere(body: Body) -> BodyRead | BodyRefused:
    """What a reader answers about a body that was too long to be read at once."""
    try:
        return understood(body, plain_json(body.raw, body.headers, body.policy.limits))
    except BadRequest as bad:
        return refused(bad)


def an_exchange(
    policy: Policy | None = None,
    *,
    draining: bool = False,
    retries: RetryBook | None = None,
    load: LoadBook | None = None,
    read_json: ReadJson = plain_json,
) -> Exchange:
    """A new exchange whose lease would be called lease-1."""
    return Exchange(
        policy=policy or a_policy(),
        lease_id="lease-1",
        read_json=read_json,
        draining=draining,
        retries=retries,
        load=load,
    )


def a_head(path: str = "/v1/chat/completions", **changes: Any) -> RequestHeaders:
    """The head of acme's chat request, with a body to come."""
    fields: dict[str, Any] = {
        "method": "POST",
        "path": path,
        "headers": {"x-tenant": "acme", "x-request-id": "req-1", "content-type": "application/json"},
        "end_of_stream": False,
    }
    return RequestHeaders(**(fields | changes))


def a_body(data: bytes = CHAT, *, end_of_stream: bool = True) -> RequestBody:
    """A whole body, by default a short chat."""
    return RequestBody(data=data, end_of_stream=end_of_stream)


def a_grant(**changes: Any) -> Granted:
    """A grant of lease-1 on the replica r0."""
    fields: dict[str, Any] = {"lease_id": "lease-1", "replica": "r0", "ttft_ms": 5, "balance": Balance()}
    return Granted(**(fields | changes))


def a_count(*tokens: int) -> Counted:
    """A count; ten tokens unless told."""
    return Counted(per_sequence_tokens=tokens or (10,))


def play(exchange: Exchange, *events: Event) -> list[Effect]:
    """Feed the events in order; all effects, in order."""
    effects: list[Effect] = []
    for at_us, event in enumerate(events):
        effects.extend(exchange.receive(event, at_us * 1000))
    return effects


def answers(effects: list[Effect]) -> list[Answer]:
    """What would be sent to Envoy."""
    return [effect.answer for effect in effects if isinstance(effect, Send)]
