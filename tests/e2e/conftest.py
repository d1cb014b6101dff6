"""Gateways in front of simulated and real engines."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import child
from tests.support.gateway import Gateway, running_gateway
from tests.support.llama_cpp import LlamaServer

POLICY = """
version: 1
models:
  tiny:
    aliases: [default]
    tokenizer: {tokenizer}
    context_tokens: 16_384
    default_output_tokens: 64
    lanes: {{interactive: chat, bulk: documents}}
lanes:
  interactive: {{max_input_tokens: 4_096, max_output_tokens: 2_048, deadline_ms: 30s, residence_ms: 0}}
  bulk:
    {{max_input_tokens: 16_000, max_output_tokens: 4_096, deadline_ms: 60s, residence_ms: 0,
     prefill_share_permille: 1000}}
pools:
  chat:
    replicas: [{{name: chat-0, address: "{chat}", ceiling_tokens: {ceiling_tokens}}}]
    guard_band_permille: 100
    prefill_tokens_per_s: 20_000
    decode_tokens_per_s: 100
    request_cap: 256
  documents:
    replicas: [{{name: documents-0, address: "{documents}", ceiling_tokens: 64_000}}]
    prefill_tokens_per_s: 20_000
    prefill_window_ms: 60s
    decode_tokens_per_s: 100
    request_cap: 8
    overload: {{waiting_requests: 100}}
tenants:
  identity: {{header: x-tenant-id}}
  tiers:
    paid: {{}}
    trial: {{tokens_per_minute: 1_000, burst_tokens: 1_000, inflight_requests: 2}}
  members:
    acme: {{tier: paid}}
    visitor: {{tier: trial}}
    gone: {{tier: paid, enabled: false}}
limits: {{body_bytes: 2MiB}}
"""


@pytest.fixture(scope="session")
def llama_gateway(
    llama_server: LlamaServer, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """Envoy, the service, and one real llama.cpp that serves both lanes."""
    policy = (
        POLICY.replace("bulk: documents", "bulk: chat")
        .replace("_s: 20_000", "_s: 1_000_000")
        .format(
            tokenizer=tokenizer_dir / "tokenizer.json",
            chat=llama_server.url.removeprefix("http://"),
            documents="127.0.0.1:9",  # nobody is ever sent there
            ceiling_tokens=64_000,
        )
    )
    with running_gateway(tmp_path_factory.mktemp("llama-gateway"), policy) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def engines() -> Iterator[dict[str, str]]:
    """Two simulated engines, as `host:port` by pool name."""
    ports = dict(zip(("chat", "documents"), child.free_ports(2), strict=True))
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "extproc.sim.server",
                f"--port={port}",
                "--model=tiny",
                "--prefill-tokens-per-s=20000",
                "--kv-tokens=64000",
            ],
            stdin=subprocess.DEVNULL,
            text=True,
        )
        for port in ports.values()
    ]
    try:
        for port in ports.values():
            _await_up(f"http://127.0.0.1:{port}/health")
        yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    finally:
        for process in processes:
            child.stop(process)


@pytest.fixture(scope="session")
def sim_policy(engines: dict[str, str], tokenizer_dir: Path) -> str:
    """The policy of a gateway in front of the simulated engines: 8,000 tokens for chats, less 10 %."""
    return POLICY.format(
        tokenizer=tokenizer_dir / "tokenizer.json",
        chat=engines["chat"],
        documents=engines["documents"],
        ceiling_tokens=8_000,
    )


@pytest.fixture(scope="session")
def shared_gateway(sim_policy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Envoy, the service and two simulated engines, for all tests that leave them as they were."""
    with running_gateway(tmp_path_factory.mktemp("gateway"), sim_policy) as gateway:
        yield gateway


@pytest.fixture
def sim_gateway(shared_gateway: Gateway) -> Iterator[Gateway]:
    """The shared gateway, idle before and after."""
    shared_gateway.await_idle()
    yield shared_gateway
    shared_gateway.await_idle()


@pytest.fixture
def own_gateway(sim_policy: str, tmp_path: Path) -> Iterator[Gateway]:
    """A gateway that a test may kill."""
    with running_gateway(tmp_path, sim_policy) as gateway:
        yield gateway


def _await_up(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, f"{url} did not come up"
            time.sleep(0.05)
