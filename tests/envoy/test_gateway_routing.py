"""What a generated gateway does with requests, seen from outside, on the real Envoy."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.adapters.envoy_names import ADMITTED_HEADERS, LOG_BATCH_MS
from extproc.dialects.registry import DIALECTS
from extproc.domain.decision import Decision
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import HeaderIdentity, RequestHeaderNames
from extproc.exchange.events import Answer, Refuse, RequestHeaders
from tests.envoy.conftest import StartEngine, StartGateway
from tests.envoy.policies import policy, pool
from tests.envoy.stubs import StubEngine, admitted_to

CHAT = "/v1/chat/completions"


async def _plain(_request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


async def _admit(_head: RequestHeaders, _body: bytes) -> Answer:
    return admitted_to("main")


@pytest.fixture
async def engines(start_engine: StartEngine) -> list[StubEngine]:
    """Two engines that answer anything."""
    return [await start_engine(_plain), await start_engine(_plain)]


def _addresses(engines: list[StubEngine]) -> tuple[str, ...]:
    return tuple(engine.address for engine in engines)


def _served(engines: list[StubEngine]) -> list[int]:
    return [len(engine.served) for engine in engines]


async def _is_refused(answer: aiohttp.ClientResponse, *, status: int, code: str) -> dict[str, Any]:
    """`answer` is an error of the client contract that SDKs of both API families can read; its body."""
    assert answer.status == status
    assert answer.content_type == "application/json"
    assert answer.headers["x-admission-reason"] == code
    body: dict[str, Any] = await answer.json()
    assert body["type"] == "error"
    assert body["error"]["code"] == code
    assert body["error"]["param"] is None
    assert body["request_id"] == answer.headers["x-request-id"]
    return body


async def test_the_reserved_replica_serves(engines: list[StubEngine], start_gateway: StartGateway) -> None:
    """A request goes to exactly the replica that its reservation is held on."""
    addresses = _addresses(engines)

    async def decide(_head: RequestHeaders, body: bytes) -> Answer:
        return admitted_to("main", addresses[int(body)])

    gateway = await start_gateway(policy(pool(addresses=addresses)), decide)
    for choice in (0, 0, 0, 0, 1, 1, 1, 0, 1, 0):
        async with gateway.client.post(CHAT, data=str(choice)) as answer:
            assert answer.status == 200
        record = await gateway.service.record()
        upstream = record.common_properties.upstream_remote_address.socket_address
        assert f"{upstream.address}:{upstream.port_value}" == addresses[choice]
    assert _served(engines) == [6, 4]


async def test_a_dead_replica_is_replaced(engines: list[StubEngine], start_gateway: StartGateway) -> None:
    """If the reserved replica cannot be reached, another one of the pool serves, once."""
    dead, alive = engines

    async def decide(_head: RequestHeaders, _body: bytes) -> Answer:
        return admitted_to("main", dead_address)

    dead_address = dead.address
    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), decide)
    await dead.stop()
    for _ in range(24):
        async with gateway.client.post(CHAT, data="{}") as answer:
            assert answer.status == 200
    assert len(alive.served) == 24


async def test_pools_with_names_for_addresses_are_balanced(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """Replicas that are known by DNS names share a pool's requests, and the reservation's address is ignored."""
    names = tuple(f"localhost:{address.rpartition(':')[2]}" for address in _addresses(engines))

    async def decide(_head: RequestHeaders, _body: bytes) -> Answer:
        return admitted_to("main", names[0])

    gateway = await start_gateway(policy(pool(addresses=names)), decide)
    for _ in range(24):
        async with gateway.client.post(CHAT, data="{}") as answer:
            assert answer.status == 200
    assert all(count > 0 for count in _served(engines))


async def test_a_client_cannot_route_itself(engines: list[StubEngine], start_gateway: StartGateway) -> None:
    """Admission headers that a client sends reach neither the service nor an engine, service up or down."""

    async def refuse(_head: RequestHeaders, _body: bytes) -> Answer:
        return _refusal(Reason.NO_CAPACITY, 503)

    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), refuse)
    forged = {**dict.fromkeys(ADMITTED_HEADERS, "forged"), "x-admission-pool": "main"}
    async with gateway.client.post(CHAT, data="{}", headers=forged) as answer:
        assert answer.status == 503
    (head,) = gateway.service.heads
    assert set(forged).isdisjoint(head.headers)
    await gateway.service.stop()
    for headers in (forged, {"X-Admission-Pool": "main"}):
        async with gateway.client.post(CHAT, data="{}", headers=headers) as answer:
            assert answer.status == 503
    assert _served(engines) == [0, 0]


async def test_a_client_cannot_name_itself(engines: list[StubEngine], start_gateway: StartGateway) -> None:
    """A tenant header from a client never reaches the service; from a listener's trusted proxy it does."""
    for trusted in (False, True):
        gateway = await start_gateway(
            policy(pool(addresses=_addresses(engines)), identity=HeaderIdentity(header="x-tenant")),
            _admit,
            trust_identity_header=trusted,
        )
        async with gateway.client.post(CHAT, data="{}", headers={"X-Tenant": "acme"}) as answer:
            assert answer.status == 200
        (head,) = gateway.service.heads
        assert head.headers.get("x-tenant") == ("acme" if trusted else None)
        await gateway.service.stop()


async def test_hints_of_clients_reach_the_service(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """A policy may let clients declare intent and deadline in headers of any name."""
    names = RequestHeaderNames(intent="x-admission-lane", deadline_ms="x-admission-deadline-ms")
    asked = dataclasses.replace(policy(pool(addresses=_addresses(engines))), request_headers=names)
    gateway = await start_gateway(asked, _admit)
    hints = {"x-admission-lane": "bulk", "x-admission-deadline-ms": "800"}
    async with gateway.client.post(CHAT, data="{}", headers=hints) as answer:
        assert answer.status == 200
    (head,) = gateway.service.heads
    assert hints.items() <= head.headers.items()


async def test_without_the_service_nothing_is_admitted(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """While the service is down every request is a 503 with a Retry-After; when it is back, requests pass."""
    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), _admit)
    await gateway.service.stop()
    async with gateway.client.post(CHAT, data="{}") as answer:
        body = await _is_refused(answer, status=503, code="no_capacity")
        assert body["error"]["type"] == "service_unavailable_error"
        assert answer.headers["retry-after"] == "2"
    await gateway.service.start()
    for _ in range(100):
        async with gateway.client.post(CHAT, data="{}") as answer:
            if answer.status == 200:
                break
        await asyncio.sleep(0.1)
    assert answer.status == 200


async def test_a_streaming_answer_outlives_the_service(
    start_engine: StartEngine, start_gateway: StartGateway
) -> None:
    """An answer that has begun is delivered to its end although the service dies meanwhile."""
    dead = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        await dead.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    engine = await start_engine(respond)
    gateway = await start_gateway(policy(pool(addresses=(engine.address,))), _admit)
    async with gateway.client.post(CHAT, data="{}") as answer:
        assert await answer.content.readline() == b"data: first\n"
        await gateway.service.stop()
        dead.set()
        assert await answer.content.read() == b"\ndata: [DONE]\n\n"


async def test_a_stream_lives_as_long_as_its_request(
    start_engine: StartEngine, start_gateway: StartGateway
) -> None:
    """The exchange's stream stays open while the engine answers, and ends with the request: here, by hang-up."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        await asyncio.sleep(3600)
        return response

    engine = await start_engine(respond)
    gateway = await start_gateway(policy(pool(addresses=(engine.address,))), _admit)
    async with gateway.client.post(CHAT, data="{}") as answer:
        await answer.content.readline()
        assert gateway.service.ended == 0
        answer.close()
    await gateway.service.record()
    for _ in range(100):
        if gateway.service.ended:
            break
        await asyncio.sleep(0.05)
    assert gateway.service.ended == 1


async def test_a_body_over_the_limit_is_413(engines: list[StubEngine], start_gateway: StartGateway) -> None:
    """Envoy takes a body up to the policy's limit, far over its own default, and not a body over it."""
    limit = 3 << 20
    gateway = await start_gateway(policy(pool(addresses=_addresses(engines)), body_bytes=limit), _admit)
    async with gateway.client.post(CHAT, data=io.BytesIO(b"x" * limit)) as answer:
        assert answer.status == 200
    async with gateway.client.post(CHAT, data=io.BytesIO(b"x" * (2 * limit))) as answer:
        body = await _is_refused(answer, status=413, code="body_too_large")
        assert body["error"]["type"] == "invalid_request_error"
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
    assert sum(_served(engines)) == 1


def _refusal(reason: Reason, status: int) -> Refuse:
    return Refuse(
        status=status,
        headers=(
            ("content-type", "application/json"),
            ("x-admission-reason", str(reason)),
            ("retry-after", "7"),
        ),
        body={"theirs": str(reason)},
        decision=Decision(outcome=Outcome.REFUSED, lease_id="lease-1", reason=reason),
    )


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.BODY_TOO_LARGE, 413),
        (Reason.TENANT_RATE, 429),
        (Reason.NO_CAPACITY, 503),
        (Reason.INTERNAL_ERROR, 503),
    ],
)
async def test_the_services_own_refusals_pass_unchanged(
    start_gateway: StartGateway, reason: Reason, status: int
) -> None:
    """Envoy words its own errors anew but never touches a refusal that the service wrote."""

    async def refuse(_head: RequestHeaders, _body: bytes) -> Answer:
        return _refusal(reason, status)

    gateway = await start_gateway(policy(), refuse)
    async with gateway.client.post(CHAT, data="{}") as answer:
        assert answer.status == status
        assert await answer.json() == {"theirs": str(reason)}
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-request-id"]
        request_id = answer.headers["x-request-id"]
    line = await asyncio.to_thread(gateway.envoy.logged, request_id)
    assert line["status"] == status
    assert line["admission"]["reason"] == str(reason)


async def test_only_what_was_admitted_is_settled(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """A refusal has nothing to settle: its record costs neither Envoy nor the service a message."""

    async def decide(_head: RequestHeaders, body: bytes) -> Answer:
        return _refusal(Reason.TENANT_RATE, 429) if body == b"{}" else admitted_to("main")

    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), decide)
    for body, status in (("{}", 429), ("{}", 429), ("[]", 200)):
        async with gateway.client.post(CHAT, data=body) as answer:
            assert answer.status == status
    async with gateway.client.get("/v1/models") as answer:
        assert answer.status == 200
    record = await gateway.service.record()
    assert record.response.response_code.value == 200
    decision = record.common_properties.metadata.filter_metadata["extproc.admission"]
    assert decision["decision"] == "admitted"
    await asyncio.sleep(5 * LOG_BATCH_MS / 1000)
    assert gateway.service.records.empty()


async def test_an_engines_own_errors_pass_unchanged(
    start_engine: StartEngine, start_gateway: StartGateway
) -> None:
    """What an engine answers is the engine's: a 503 of its own keeps its body and gets no header."""

    async def respond(_request: web.Request) -> web.Response:
        return web.json_response({"theirs": True}, status=503)

    engine = await start_engine(respond)
    gateway = await start_gateway(policy(pool(addresses=(engine.address,))), _admit)
    async with gateway.client.post(CHAT, data="{}") as answer:
        assert answer.status == 503
        assert await answer.json() == {"theirs": True}
        assert "x-admission-reason" not in answer.headers


async def test_unreachable_engines_are_an_honest_503(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """An admitted request that no replica takes is answered in the contract's form."""
    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), _admit)
    for engine in engines:
        await engine.stop()
    async with gateway.client.post(CHAT, data="{}") as answer:
        await _is_refused(answer, status=503, code="no_capacity")


async def test_what_needs_no_admission_passes_without_the_service(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """Liveness and the model list are answered with the service down; other routes of the engines are closed."""
    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), _admit)
    await gateway.service.stop()
    async with gateway.client.get("/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok\n")
    for path in ("/v1/models", "/v1/models/tiny"):
        async with gateway.client.get(path) as answer:
            assert answer.status == 200
            assert await answer.json() == {"ok": True}
    served = sum(_served(engines))
    for method, path in (
        ("GET", "/metrics"),
        ("DELETE", "/v1/models/tiny"),
        ("GET", "/v1/modelsX"),
        ("PUT", CHAT),
    ):
        async with gateway.client.request(method, path, headers={"x-admission-pool": "main"}) as answer:
            assert answer.status == 404
            assert answer.content_type == "application/json"
            assert "error" in await answer.json()
    assert sum(_served(engines)) == served == 2
    assert not gateway.service.heads


PATHS = [
    path.replace("*", "x")
    for dialect in DIALECTS
    for path in (*dialect.paths, *(f"/team{path}" for path in dialect.paths), *dialect.exact_paths)
]


async def test_every_dialects_paths_are_decided(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """Each path that a dialect reads, also behind a prefix and with a query, reaches the service and an engine."""
    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), _admit)
    for path in PATHS:
        async with gateway.client.post(f"{path}?beta=true", data="{}") as answer:
            assert answer.status == 200, path
    assert [head.path for head in gateway.service.heads] == [f"{path}?beta=true" for path in PATHS]
    assert sum(_served(engines)) == len(PATHS)


async def test_a_hold_longer_than_envoys_default_is_no_error(
    engines: list[StubEngine], start_gateway: StartGateway
) -> None:
    """A request may be held for longer than Envoy's 200 ms and is then served."""

    async def decide(_head: RequestHeaders, _body: bytes) -> Answer:
        await asyncio.sleep(0.6)
        return admitted_to("main")

    gateway = await start_gateway(policy(pool(addresses=_addresses(engines))), decide)
    async with gateway.client.post(CHAT, data="{}") as answer:
        assert answer.status == 200
