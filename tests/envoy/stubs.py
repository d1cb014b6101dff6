"""Stand-ins around a real Envoy: a service that answers as it is told, and engines that answer in any shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from extproc.adapters.envoy_codec import bytes_of, event_of
from extproc.adapters.envoy_names import EXT_PROC_SERVICE
from extproc.domain.decision import Decision
from extproc.domain.outcome import Outcome
from extproc.exchange.events import Answer, Continue, Phase, RequestBody, RequestHeaders, Route

_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # missing from the stubs

PATIENCE_S = 10
"""How long a test waits for something that happens within milliseconds."""


def admitted_to(pool: str, endpoint: str | None = None) -> Route:
    """The answer that sends a request to `pool`, and to the replica at `endpoint`."""
    return Route(
        phase=Phase.REQUEST_BODY,
        set_headers=(("x-admission-pool", pool), ("x-admission-lane", "interactive")),
        remove_headers=(),
        endpoint=endpoint,
        decision=Decision(
            outcome=Outcome.ADMITTED,
            lease_id="lease-1",
            tenant="acme",
            pool=pool,
            input_tokens=12,
            output_tokens=8,
            work_units=11,
            policy_version="0123456789ab",
        ),
    )


Decide = Callable[[RequestHeaders, bytes], Awaitable[Answer]]


@dataclass(kw_only=True)
class StubService:
    """ext_proc, access log and health on one Unix socket. `decide` is asked once per request that has a body."""

    socket: Path
    decide: Decide
    heads: list[RequestHeaders] = field(default_factory=list, init=False)
    ended: int = field(default=0, init=False)
    records: asyncio.Queue[Any] = field(default_factory=asyncio.Queue, init=False)
    _server: aio.Server | None = field(default=None, init=False)
    _health: HealthServicer = field(init=False)

    async def start(self) -> None:
        server = aio.server()
        server.add_generic_rpc_handlers((self._ext_proc(), self._access_log()))
        self._health = HealthServicer()
        await self._health.set(EXT_PROC_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_insecure_port(f"unix:{self.socket}")
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """End at once, as a crash would; stopping twice does nothing."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def say_not_serving(self) -> None:
        """Tell health checks that no more requests are wanted; those that come are served."""
        await self._health.set(EXT_PROC_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def record(self) -> Any:
        """The next access-log record."""
        return await asyncio.wait_for(self.records.get(), PATIENCE_S)

    def _ext_proc(self) -> Any:
        method = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=pb.ProcessingRequest.FromString, response_serializer=None
        )
        return grpc.method_handlers_generic_handler(EXT_PROC_SERVICE, {"Process": method})

    def _access_log(self) -> Any:
        method = grpc.stream_unary_rpc_method_handler(
            self._log,
            request_deserializer=als_pb2.StreamAccessLogsMessage.FromString,
            response_serializer=als_pb2.StreamAccessLogsResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(
            "envoy.service.accesslog.v3.AccessLogService", {"StreamAccessLogs": method}
        )

    async def _process(self, _requests: Any, context: Any) -> None:
        head: RequestHeaders | None = None
        try:
            while (message := await context.read()) is not _EOF:
                event = event_of(message)
                if isinstance(event, RequestHeaders):
                    head = event
                    self.heads.append(event)
                    await context.write(bytes_of(Continue(phase=Phase.REQUEST_HEADERS, ask_body=True)))
                elif isinstance(event, RequestBody) and head is not None:
                    await context.write(bytes_of(await self.decide(head, event.data)))
                else:
                    await context.write(bytes_of(Continue(phase=Phase.RESPONSE_HEADERS)))
        finally:
            self.ended += 1

    async def _log(self, _requests: Any, context: Any) -> als_pb2.StreamAccessLogsResponse:
        while (message := await context.read()) is not _EOF:
            for record in message.http_logs.log_entry:
                await self.records.put(record)
        return als_pb2.StreamAccessLogsResponse()


Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True)
class StubEngine:
    """An engine at `address` that answers every request with `respond`."""

    respond: Respond
    address: str = field(default="", init=False)
    served: list[web.Request] = field(default_factory=list, init=False)
    _runner: web.AppRunner | None = field(default=None, init=False)

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        self.address = f"{host}:{port}"
        self._runner = runner

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.served.append(request)
        await request.read()
        return await self.respond(request)
