"""A real Envoy with a generated configuration between a client, a stub service and stub engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from extproc.adapters.envoy_bootstrap import GatewayOptions, PipeAddress, SocketAddress, bootstrap
from extproc.domain.policy import Policy
from tests.envoy.stubs import Respond, StubEngine, StubService
from tests.support.envoy_binary import EnvoyProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A running gateway: `client` talks to it, `service` decides for it."""

    envoy: EnvoyProcess
    service: StubService
    client: aiohttp.ClientSession


StartGateway = Callable[[Policy, StubService], Awaitable[Gateway]]


StartEngine = Callable[[Respond], Awaitable[StubEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Starts engines that answer with the given function."""
    async with AsyncExitStack() as stack:

        async def start(respond: Respond) -> StubEngine:
            engine = StubEngine(respond=respond)
            await engine.start()
            stack.push_async_callback(engine.stop)
            return engine

        yield start


@pytest.fixture
async def start_gateway(tmp_path: Path) -> AsyncIterator[StartGateway]:
    """Starts gateways for a policy and a service; everything ends with the test."""
    async with AsyncExitStack() as stack:

        async def start(policy: Policy, service: StubService) -> Gateway:
            options = GatewayOptions(
                extproc=(PipeAddress(path=str(service.socket)),),
                listen=SocketAddress(host="127.0.0.1", port=0),
            )
            await service.start()
            stack.push_async_callback(service.stop)
            envoy = EnvoyProcess(config_text=bootstrap(policy, options), directory=tmp_path / "envoy")
            # In a thread: Envoy is not ready before the service has answered its health check.
            await asyncio.to_thread(envoy.__enter__)
            stack.push_async_callback(asyncio.to_thread, envoy.stop)
            port = await asyncio.to_thread(envoy.listener_port, "inference")
            client = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            return Gateway(envoy=envoy, service=service, client=client)

        yield start
