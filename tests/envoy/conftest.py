"""A real Envoy with a generated configuration between a client, a stub service and stub engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.adapters.envoy_bootstrap import GatewayOptions, PipeAddress, SocketAddress, bootstrap
from extproc.domain.policy import Policy
from tests.envoy.stubs import Decide, Respond, StubEngine, StubService
from tests.support.envoy_binary import EnvoyProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A running gateway: `client` talks to it, `service` decides for it."""

    envoy: EnvoyProcess
    service: StubService
    client: aiohttp.ClientSession


@asynccontextmanager
async def running_gateway(
    policy: Policy, decide: Decide, directory: Path, **options: Any
) -> AsyncIterator[Gateway]:
    """A gateway for `policy`, made with these `options`, whose service answers with `decide`."""
    async with AsyncExitStack() as stack:
        service = StubService(socket=directory / "service.sock", decide=decide)
        await service.start()
        stack.push_async_callback(service.stop)
        options.setdefault("extproc", (PipeAddress(path=str(service.socket)),))
        settings = GatewayOptions(listen=SocketAddress(host="127.0.0.1", port=0), **options)
        envoy = EnvoyProcess(config_text=bootstrap(policy, settings), directory=directory / "envoy")
        # In a thread: Envoy is not ready before the service has answered its health check.
        await asyncio.to_thread(envoy.__enter__)
        stack.push_async_callback(asyncio.to_thread, envoy.stop)
        port = await asyncio.to_thread(envoy.listener_port, "inference")
        client = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
        yield Gateway(envoy=envoy, service=service, client=client)


@asynccontextmanager
async def running_engine(respond: Respond) -> AsyncIterator[StubEngine]:
    """An engine that answers with `respond`."""
    engine = StubEngine(respond=respond)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


StartGateway = Callable[..., Awaitable[Gateway]]
StartEngine = Callable[[Respond], Awaitable[StubEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts engines that end with the test."""
    async with AsyncExitStack() as stack:

        async def start(respond: Respond) -> StubEngine:
            return await stack.enter_async_context(running_engine(respond))

        yield start


@pytest.fixture
async def start_gateway(tmp_path: Path) -> AsyncIterator[StartGateway]:
    """Starts a gateway that ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(policy: Policy, decide: Decide, **options: Any) -> Gateway:
            return await stack.enter_async_context(running_gateway(policy, decide, tmp_path, **options))

        yield start
