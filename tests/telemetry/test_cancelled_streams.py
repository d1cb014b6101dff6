"""A thousand real streams, cut at random moments: each leaves exactly one span, and nothing else."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio
from opentelemetry import context as otel_context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

from extproc.adapters.envoy_names import EXT_PROC_SERVICE
from extproc.adapters.grpc_server import ExternalProcessor
from extproc.adapters.telemetry.observers import Observers
from extproc.adapters.telemetry.tracing import Tracing
from extproc.dialects.body import Body, BodyRead, BodyRefused
from extproc.domain.policy import Policy
from extproc.domain.prompt import Count, Counted
from extproc.domain.reservation import Answer as LedgerAnswer
from extproc.domain.reservation import Balance, Booking, Granted, Reservation
from extproc.domain.snapshot import Snapshot
from extproc.driver import Driver
from extproc.exchange.events import Answer
from extproc.exchange.machine import Exchange
from tests.builders import a_policy
from tests.exchange.rig import CHAT, long_json, plain_json, read_elsewhere

STREAMS = 1_000
AT_ONCE = 50


class LateCounter:
    """Counts ten tokens, after up to a few milliseconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def count(self, *, deliver: Callable[[Count], None], **asked: Any) -> None:
        """See `TokenCounter.count`."""
        delay_s = self._rng.choice((0, 0.001, 0.004))
        asyncio.get_running_loop().call_later(delay_s, deliver, Counted(per_sequence_tokens=(10,)))


class LateReader:
    """Reads long bodies, after up to a few milliseconds."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def read(self, body: Body, *, deliver: Callable[[BodyRead | BodyRefused], None], **asked: Any) -> None:
        """See `BodyReader.read`."""
        delay_s = self._rng.choice((0, 0.001, 0.004))
        asyncio.get_running_loop().call_later(delay_s, deliver, read_elsewhere(body))


class LateLedger:
    """Grants everything, after up to a few milliseconds, and remembers what it still has out."""

    def __init__(self, rng: random.Random) -> None:
        self.held: set[str] = set()
        self._rng = rng

    def reserve(self, reservation: Reservation, deliver: Callable[[LedgerAnswer], None]) -> None:
        """See `Ledger.reserve`."""

        def grant() -> None:
            self.held.add(reservation.lease_id)
            deliver(Granted(lease_id=reservation.lease_id, replica="r0", ttft_ms=5, balance=Balance()))

        asyncio.get_running_loop().call_later(self._rng.choice((0, 0.001, 0.004)), grant)

    def release(self, lease_id: str) -> None:
        """See `Ledger.release`."""
        self.held.discard(lease_id)

    def withdraw(self, lease_id: str) -> None:
        """See `Ledger.withdraw`: its grants come soon anyway."""

    def book(self, booking: Booking) -> None:
        """See `Ledger.book`."""
        self.held.discard(booking.lease_id)

    async def snapshot(self, policy: Policy) -> Snapshot:
        """See `Ledger.snapshot`."""
        raise NotImplementedError


class SteadyClock:
    """The loop's clock."""

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return int(asyncio.get_running_loop().time() * 1_000_000)


class Service:
    """The real gRPC server around real exchanges, with a tracer whose spans are kept."""

    def __init__(self, rng: random.Random) -> None:
        self.spans: list[ReadableSpan] = []
        self.ledger = LateLedger(rng)
        self.exchanges = 0
        self.observers = Observers(
            Tracing(sampler=ParentBased(ALWAYS_ON), put=self.spans.append, resource=Resource.get_empty())
        )
        self.processor = ExternalProcessor(self._new_driver)
        self._reader = LateReader(rng)
        self._counter = LateCounter(rng)
        self._policy = a_policy()

    def _new_driver(self, send: Callable[[Answer], None], close: Callable[[bool], None]) -> Driver:
        self.exchanges += 1
        return Driver(
            exchange=Exchange(
                policy=self._policy,
                lease_id=f"lease-{self.exchanges}",
                read_json=long_json if self.exchanges % 2 else plain_json,
            ),
            clock=SteadyClock(),
            reader=self._reader,
            counter=self._counter,
            ledger=self.ledger,
            observer=self.observers,
            send=send,
            close=close,
        )


def head(number: int) -> pb.ProcessingRequest:
    """The head of a traced request; each belongs to a trace of its own."""
    request = pb.ProcessingRequest()
    pairs = {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        "x-tenant": "acme",
        "traceparent": f"00-{number:032x}-{number:016x}-01",
    }
    for key, value in pairs.items():
        request.request_headers.headers.headers.append(HeaderValue(key=key, raw_value=value.encode()))
    return request


def body() -> pb.ProcessingRequest:
    """The whole body of a short chat."""
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=CHAT, end_of_stream=True))


async def cut_stream(call: Callable[[], Any], number: int, phase: int, delay_s: float) -> None:
    """Open a stream, go as far as `phase`, wait `delay_s`, and hang up."""
    stream = call()
    try:
        await stream.write(head(number))
        await stream.read()
        if phase >= 1:
            await stream.write(body())
        if phase >= 2:
            await stream.read()
        await asyncio.sleep(delay_s)
    finally:
        if phase == 3:
            await stream.done_writing()
            await stream.read()
        stream.cancel()


async def test_streams_that_are_cut_anywhere_leave_one_span_each(caplog: pytest.LogCaptureFixture) -> None:
    """1,000 streams end in 1,000 spans, each in its own caller's trace, with no context left behind."""
    rng = random.Random(11)
    service = Service(rng)
    async with AsyncExitStack() as stack:
        server = aio.server()
        server.add_generic_rpc_handlers((service.processor.handler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        channel = await stack.enter_async_context(aio.insecure_channel(f"127.0.0.1:{port}"))
        call: Any = channel.stream_stream(
            f"/{EXT_PROC_SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                await cut_stream(call, number, rng.randrange(4), rng.choice((0, 0.001, 0.003)))

        await asyncio.gather(*(one(number) for number in range(1, STREAMS + 1)))
        async with asyncio.timeout(20):
            while service.processor.open_streams or service.ledger.held:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # late answers of the counter and the ledger

    spans = [span for span in service.spans if span.name == "extproc.admission"]
    assert service.exchanges == STREAMS
    assert len(spans) == STREAMS
    assert {span.context.trace_id for span in spans} == set(range(1, STREAMS + 1))
    for span in service.spans:
        assert span.parent is not None
        if span.name == "extproc.admission":
            assert span.parent.span_id == span.context.trace_id  # the caller's, not a neighbour's
    outcomes = Counter(dict(span.attributes or {})["extproc.admission.decision"] for span in spans)
    assert set(outcomes) == {"admitted", "abandoned"}
    assert min(outcomes.values()) > 100
    assert dict(otel_context.get_current()) == {}
    assert service.observers.faults == 0
    assert not [record for record in caplog.records if "detach" in record.getMessage().lower()]
