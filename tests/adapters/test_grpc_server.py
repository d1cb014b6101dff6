"""The ext_proc server on a real channel, against a client that is as strict about the protocol as Envoy is."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

from extproc.adapters.grpc_server import ExternalProcessor, server_options
from extproc.adapters.memory_ledger import MemoryLedger
from extproc.dialects.body import Body, BodyRead, BodyRefused
from extproc.domain.decision import Decision, Settled
from extproc.domain.policy import Policy
from extproc.domain.prompt import Count, Counted, CountFailed, Prompt
from extproc.driver import Driver
from extproc.exchange.events import Answer
from extproc.exchange.machine import Exchange
from tests.builders import a_policy, a_pool, a_quota, a_tenant, a_tier
from tests.exchange.rig import CHAT, long_json, plain_json, read_elsewhere

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # missing from the stubs


@dataclass
class SteppedClock:
    """A clock that stands still unless told."""

    us: int = 0

    def now_us(self) -> int:
        return self.us


@dataclass
class TenTokens:
    """Counts every prompt as ten tokens, `delay_s` later; may be told to fail."""

    delay_s: float = 0.0
    fault: type[BaseException] | None = None

    def count(
        self, *, model: str, prompt: Prompt, limit_tokens: int, tenant: str, deliver: Callable[[Count], None]
    ) -> None:
        if self.fault is not None:
            raise self.fault("planted")
        count = Counted(per_sequence_tokens=(10,))
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, deliver, count)
        else:
            deliver(count)


@dataclass
class LateReader:
    """Reads long bodies `delay_s` later; may be told to fail."""

    delay_s: float = 0.0
    fault: type[BaseException] | None = None

    def read(
        self, body: Body, *, tenant: str, deliver: Callable[[BodyRead | BodyRefused | CountFailed], None]
    ) -> None:
        if self.fault is not None:
            raise self.fault("planted")
        asyncio.get_running_loop().call_later(self.delay_s, deliver, read_elsewhere(body))


@dataclass
class Watcher:
    """Remembers what was decided."""

    decisions: list[Decision] = field(default_factory=list)

    def decided(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def settled(self, settled: Settled) -> None:
        raise AssertionError("nobody sends records here")


@dataclass
class Service:
    """A served exchange factory with everything behind it in reach."""

    target: str
    processor: ExternalProcessor
    ledger: MemoryLedger
    reader: LateReader
    counter: TenTokens
    watcher: Watcher
    policy: Policy
    draining: bool = False
    long_bodies: bool = False
    exchanges: list[weakref.ref[Exchange]] = field(default_factory=list)

    async def is_idle(self) -> bool:
        """Whether nothing is held, once the streams have had a moment to end."""
        for _ in range(200):
            snapshot = await self.ledger.snapshot(self.policy)
            if snapshot.is_idle and self.processor.open_streams == 0:
                return True
            await asyncio.sleep(0.01)
        return False


@asynccontextmanager
async def served(directory: Path, policy: Policy | None = None) -> AsyncIterator[Service]:
    """The service on a Unix socket."""
    clock = SteppedClock()
    policy = policy or a_policy()
    numbers = iter(range(1_000_000))

    def new_driver(send: Callable[[Answer], None], close: Callable[[bool], None], *_: Any) -> Driver:
        exchange = Exchange(
            policy=service.policy,
            lease_id=f"lease-{next(numbers)}",
            read_json=long_json if service.long_bodies else plain_json,
            draining=service.draining,
        )
        service.exchanges.append(weakref.ref(exchange))
        return Driver(
            exchange=exchange,
            clock=clock,
            reader=service.reader,
            counter=service.counter,
            ledger=service.ledger,
            observer=service.watcher,
            send=send,
            close=close,
        )

    service = Service(
        target=f"unix:{directory}/s.sock",
        processor=ExternalProcessor(new_driver),
        ledger=MemoryLedger(clock),
        reader=LateReader(),
        counter=TenTokens(),
        watcher=Watcher(),
        policy=policy,
    )
    server = aio.server(options=server_options(1 << 20))
    server.add_generic_rpc_handlers((service.processor.handler(),))
    server.add_insecure_port(service.target)
    await server.start()
    try:
        yield service
    finally:
        await server.stop(None)


class StrictEnvoy:
    """One ext_proc stream from Envoy's side: an answer of the wrong kind, or one too many, is an error."""

    def __init__(self, channel: aio.Channel, mode: int = ProcessingMode.BUFFERED) -> None:
        process: Any = channel.stream_stream(
            PROCESS, pb.ProcessingRequest.SerializeToString, pb.ProcessingResponse.FromString
        )
        self._call = process()
        self._mode = mode
        self._first = True

    async def send(self, kind: str, **fields: Any) -> None:
        """Send one message of `kind`."""
        message = pb.ProcessingRequest(**{kind: fields})
        if self._first:
            message.protocol_config.request_body_mode = self._mode
            self._first = False
        await self._call.write(message)

    async def head(self, headers: Mapping[str, str] | None = None, **fields: Any) -> None:
        """Send the head of acme's chat."""
        values = {
            ":method": "POST",
            ":path": "/v1/chat/completions",
            "x-tenant": "acme",
            "x-request-id": "req-1",
        } | dict(headers or {})
        await self.send(
            "request_headers",
            headers={
                "headers": [HeaderValue(key=key, raw_value=value.encode()) for key, value in values.items()]
            },
            **fields,
        )

    async def body(self, data: bytes = CHAT, *, end_of_stream: bool = True) -> None:
        """Send a body message."""
        await self.send("request_body", body=data, end_of_stream=end_of_stream)

    async def answer(self, kind: str) -> Any:
        """The next answer, which must be of `kind`."""
        response = await asyncio.wait_for(self._call.read(), timeout=10)
        assert response is not _EOF, "the stream ended instead of an answer"
        assert response.WhichOneof("response") == kind, response
        return getattr(response, kind), response

    async def end(self) -> grpc.StatusCode:
        """Half-close, and see that nothing more was said."""
        await self._call.done_writing()
        assert await asyncio.wait_for(self._call.read(), timeout=10) is _EOF
        code: grpc.StatusCode = await self._call.code()
        return code

    async def status(self) -> grpc.StatusCode:
        """How the server ends the stream by itself."""
        code: grpc.StatusCode = await asyncio.wait_for(self._call.code(), timeout=10)
        return code

    def cancel(self) -> None:
        """Reset the stream, as Envoy does when a client leaves."""
        self._call.cancel()


async def admitted(envoy: StrictEnvoy) -> Any:
    """Play a whole admission; the response that routes."""
    await envoy.head()
    _, asked = await envoy.answer("request_headers")
    assert asked.mode_override.request_body_mode == ProcessingMode.BUFFERED
    assert asked.mode_override.response_trailer_mode == ProcessingMode.SEND
    await envoy.body()
    _, routed = await envoy.answer("request_body")
    return routed


async def test_an_admission_routes_in_the_bodys_answer_with_raw_values(tmp_path: Path) -> None:
    """Headers in raw_value, the route cache cleared in the same answer, the decision in dynamic metadata."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        envoy = StrictEnvoy(channel)
        routed = await admitted(envoy)
        common = routed.request_body.response
        headers = {option.header.key: option.header for option in common.header_mutation.set_headers}
        assert headers["x-admission-pool"].raw_value == b"chat"
        assert all(header.value == "" for header in headers.values())
        assert common.clear_route_cache
        decision = routed.dynamic_metadata.fields["extproc.admission"].struct_value.fields
        assert decision["decision"].string_value == "admitted"
        assert decision["input_tokens"].number_value == 10
        assert not await service.is_idle()
        assert await envoy.end() is grpc.StatusCode.OK
        assert await service.is_idle()


async def test_a_refusal_is_the_last_word(tmp_path: Path) -> None:
    """An immediate response with status, reason and a JSON body; whatever Envoy had sent meanwhile is ignored."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        envoy = StrictEnvoy(channel)
        await envoy.head({"x-tenant": "stranger"})
        refused, _ = await envoy.answer("immediate_response")
        assert refused.status.code == 401
        assert json.loads(refused.body)["error"]["code"] == "tenant_unknown"
        await envoy.body()
        assert await envoy.end() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        (ProcessingMode.BUFFERED, ["request_headers", "request_body"]),
        (ProcessingMode.NONE, ["request_headers", "request_body"]),
        (ProcessingMode.BUFFERED_PARTIAL, ["request_headers", "request_body"]),
        (ProcessingMode.STREAMED, ["request_headers", "request_body"]),
        (ProcessingMode.FULL_DUPLEX_STREAMED, []),
    ],
)
async def test_every_body_mode_gets_answers_of_its_own_kind(
    tmp_path: Path, mode: int, kinds: list[str]
) -> None:
    """One answer per message, in the order of the messages; only full duplex echoes its body."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        envoy = StrictEnvoy(channel, mode)
        await envoy.head()
        if kinds:
            await envoy.answer("request_headers")
        await envoy.body()
        if mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            headers, _ = await envoy.answer("request_headers")
            assert headers.response.clear_route_cache
            body, _ = await envoy.answer("request_body")
            streamed = body.response.body_mutation.streamed_response
            assert (streamed.body, streamed.end_of_stream) == (CHAT, True)
        else:
            await envoy.answer("request_body")
        await envoy.end()
        assert await service.is_idle()


async def test_an_unsupported_body_mode_fails_the_stream_and_only_it(tmp_path: Path) -> None:
    """GRPC mode is not spoken here: the stream fails, so the request does not pass unseen."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        envoy = StrictEnvoy(channel, 5)
        await envoy.head()
        assert await envoy.status() is not grpc.StatusCode.OK
        assert await service.is_idle()
        assert (await admitted(StrictEnvoy(channel))).HasField("request_body")


@pytest.mark.parametrize("long_bodies", [False, True])
async def test_the_answer_to_a_local_reply_does_not_wait_for_the_decision(
    tmp_path: Path, long_bodies: bool
) -> None:
    """While reading or counting is under way Envoy begins a local reply; it is answered before they have ended."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        service.long_bodies = long_bodies
        service.counter.delay_s = service.reader.delay_s = 0.5
        envoy = StrictEnvoy(channel)
        await envoy.head()
        await envoy.answer("request_headers")
        await envoy.body()
        await envoy.send("response_headers")
        await envoy.answer("response_headers")
        await envoy.end()
        assert await service.is_idle()
        assert [decision.outcome for decision in service.watcher.decisions] == ["abandoned"]


@pytest.mark.parametrize("long_bodies", [False, True])
async def test_a_fault_is_one_requests_503(tmp_path: Path, long_bodies: bool) -> None:
    """An exception anywhere becomes that request's answer; the next one is served."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        service.long_bodies = long_bodies
        service.counter.fault = service.reader.fault = KeyError
        envoy = StrictEnvoy(channel)
        await envoy.head()
        await envoy.answer("request_headers")
        await envoy.body()
        refused, _ = await envoy.answer("immediate_response")
        assert refused.status.code == 503
        service.counter.fault = service.reader.fault = None
        assert (await admitted(StrictEnvoy(channel))).HasField("request_body")


async def test_a_drain_ends_admitted_streams_cleanly_and_refuses_newcomers(tmp_path: Path) -> None:
    """OK for streams past admission, 503 draining for new ones."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        envoy = StrictEnvoy(channel)
        await admitted(envoy)
        service.draining = True
        await service.processor.drain(5_000)
        assert await envoy.status() is grpc.StatusCode.OK
        newcomer = StrictEnvoy(channel)
        await newcomer.head()
        refused, _ = await newcomer.answer("immediate_response")
        assert (refused.status.code, json.loads(refused.body)["error"]["code"]) == (503, "draining")


async def test_streams_that_end_at_any_phase_give_everything_back(tmp_path: Path) -> None:
    """Five hundred streams, cut at random: nothing is held, and the next request of a full tenant passes."""
    tenant = a_tenant(tier=a_tier(quota=a_quota(inflight_requests=8)))
    policy = a_policy(tenants=(tenant,), pools=(a_pool(request_cap=8),))
    rng = random.Random(7)
    async with served(tmp_path, policy) as service, aio.insecure_channel(service.target) as channel:

        async def cut(phase: int, delay_s: float) -> None:
            envoy = StrictEnvoy(channel)
            if phase > 0:
                await envoy.head()
            if phase > 1:
                await envoy.answer("request_headers")
            if phase > 2:
                await envoy.body(rng.choice((CHAT, b"{", CHAT.replace(b"tiny", b"nope"))))
            await asyncio.sleep(delay_s)
            envoy.cancel()

        for _ in range(10):
            service.counter.delay_s = rng.choice((0.0, 0.005))
            service.reader.delay_s = rng.choice((0.0, 0.005))
            service.long_bodies = rng.random() < 0.5
            await asyncio.gather(*(cut(rng.randrange(4), rng.random() * 0.02) for _ in range(50)))
            assert await service.is_idle()
        service.counter.delay_s = 0.0
        assert (await admitted(StrictEnvoy(channel))).HasField("request_body")


async def test_an_ended_stream_leaves_nothing_for_the_collector(tmp_path: Path) -> None:
    """However it ends: else every collection would have to walk through all streams that are open."""
    async with served(tmp_path) as service, aio.insecure_channel(service.target) as channel:
        gc.disable()
        try:
            ended = StrictEnvoy(channel)
            await admitted(ended)
            await ended.end()
            refused = StrictEnvoy(channel)
            await refused.head({"x-tenant": "stranger"})
            await refused.answer("immediate_response")
            await refused.end()
            service.counter.delay_s = 0.02
            left = StrictEnvoy(channel)
            await left.head()
            await left.answer("request_headers")
            await left.body()
            left.cancel()
            assert await service.is_idle()
            del ended, refused, left
            async with asyncio.timeout(10):
                while any(exchange() is not None for exchange in service.exchanges):
                    await asyncio.sleep(0.01)
            assert len(service.exchanges) == 3
        finally:
            gc.enable()
