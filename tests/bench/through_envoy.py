"""The second path: HTTP through a real Envoy, to an engine that answers at once, with h2load on a clock.

Three gateways, each with an Envoy of its own, take turns:

- Envoy alone, which only forwards,
- Envoy with an ext_proc filter and the no-op server behind it,
- Envoy with the configuration that `extproc envoy` generates, which also reads usage out of every answer and sends
  an access-log record of it, and the service behind it.

Envoy, the client and the engine share the client's core, so that each server has its own for itself, as it has
without Envoy. What is told is latency as the client sees it (which sends in bursts, see `h2load`), what it has more
than with Envoy alone in the same round, and the processor time of Envoy and of what answers it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.adapters.envoy_bootstrap import GatewayOptions, PipeAddress, SocketAddress, bootstrap
from extproc.adapters.policy_file import load_policy
from tests.bench import h2load
from tests.bench.envoy_side import await_listening, chat_body
from tests.bench.processes import Cores, Server, cpu_s, pin
from tests.bench.prompts import prompt
from tests.bench.scenarios import spread
from tests.bench.services import AS_IT_COMES, Services
from tests.support import child
from tests.support.envoy_binary import EnvoyProcess
from tests.support.gateway import await_healthy

LOOPBACK = "127.0.0.1"
RATES_PER_S = (200, 500)
SECONDS = 5
HEADERS = {"content-type": "application/json", "x-tenant": "acme", "user-agent": "OpenAI/Python 3.57.0"}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 50, "total_tokens": 250},
}
TYPES = "type.googleapis.com/envoy.extensions"

ALONE = "Envoy alone"
NOOP = "Envoy, no-op ext_proc"
OURS = "Envoy as generated, extproc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A running gateway: its Envoy, its address, and what answers its ext_proc filter."""

    name: str
    envoy: EnvoyProcess
    url: str
    server: Server | None


def engine_config() -> str:
    """An Envoy that answers everything itself, as an engine would that needs no time."""
    route = {
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"inline_string": json.dumps(ANSWER)}},
        "response_headers_to_add": [
            {
                "header": {"key": "content-type", "value": "application/json"},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
        ],
    }
    return json.dumps({"static_resources": {"listeners": [_listener("engine", [route], [])]}})


def plain_config(engine_port: int, socket_path: str | None) -> str:
    """An Envoy that forwards to the engine, with an ext_proc filter if there is a socket to ask."""
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engine"}}
    clusters: list[dict[str, Any]] = [
        _cluster("engine", {"socket_address": {"address": LOOPBACK, "port_value": engine_port}})
    ]
    filters: list[dict[str, Any]] = []
    if socket_path is not None:
        filters.append(
            {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "extproc"}},
                    "message_timeout": "5s",
                    "processing_mode": {
                        "request_header_mode": "SEND",
                        "request_body_mode": "BUFFERED",
                        "response_header_mode": "SKIP",
                        "response_trailer_mode": "SEND",
                    },
                },
            }
        )
        http2 = {
            f"{TYPES.removeprefix('type.googleapis.com/')}.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        }
        clusters.append(
            _cluster("extproc", {"pipe": {"path": socket_path}}) | {"typed_extension_protocol_options": http2}
        )
    listener = _listener("inference", [route], filters)
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": clusters}})


def _listener(name: str, routes: list[dict[str, Any]], filters: list[dict[str, Any]]) -> dict[str, Any]:
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], "routes": routes}]},
        "http_filters": [
            *filters,
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"},
            },
        ],
    }
    return {
        "name": name,
        "address": {"socket_address": {"address": LOOPBACK, "port_value": 0}},
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def _cluster(name: str, address: dict[str, Any]) -> dict[str, Any]:
    limits = {"max_requests": 20_000, "max_pending_requests": 20_000, "max_connections": 20_000}
    return {
        "name": name,
        "type": "STATIC",
        "circuit_breakers": {"thresholds": [limits]},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }


@contextmanager
def gateways(directory: Path, policy_text: str, cores: Cores) -> Iterator[list[Gateway]]:
    """All three, running, with one engine behind them."""
    with ExitStack() as stack:

        def envoy(name: str, config: str) -> EnvoyProcess:
            process = stack.enter_context(EnvoyProcess(config_text=config, directory=directory / name))
            pin(process.pid, cores.client)
            return process

        engine = envoy("engine", engine_config())
        engine_port = engine.listener_port("engine")
        policy = directory / "gateway-policy.yaml"
        policy.write_text(policy_text.replace("127.0.0.1:9", f"{LOOPBACK}:{engine_port}"))
        services = stack.enter_context(Services(directory=directory, policy=policy, cores=cores))
        noop, service = services.floor(), services.service(AS_IT_COMES)
        for server in (noop, service):
            await_listening(server.target)
        (port,) = child.free_ports(1)
        generated = bootstrap(
            load_policy(policy),
            GatewayOptions(
                extproc=(PipeAddress(path=_path(service)),),
                listen=SocketAddress(host=LOOPBACK, port=port),
                trust_identity_header=True,  # the client plays the trusted proxy
            ),
        )
        found: list[Gateway] = []
        wanted: tuple[tuple[str, str, Server | None], ...] = (
            (ALONE, plain_config(engine_port, None), None),
            (NOOP, plain_config(engine_port, _path(noop)), noop),
            (OURS, generated, service),
        )
        for name, config, asked in wanted:
            process = envoy(f"envoy-{len(found)}", config)
            listens = port if asked is service else process.listener_port("inference")
            found.append(Gateway(name=name, envoy=process, url=f"http://{LOOPBACK}:{listens}", server=asked))
        await_healthy(found[-1].envoy)
        yield found


def _path(server: Server) -> str:
    return server.target.removeprefix("unix:")


Row = dict[str, Any]


Taken = tuple[h2load.Answered, float, float]
"""What the client saw, and seconds of Envoy's and of the server's per request."""


def measure(directory: Path, policy: Path, cores: Cores, *, rounds: int, scale: float) -> list[Row]:
    """A row per rate and gateway: all gateways in turn, in each round."""
    body = chat_body(prompt(190))
    rows: list[Row] = []
    sent = 0
    with gateways(directory, policy.read_text(), cores) as running:

        def run(gateway: Gateway, rate_per_s: int, count: int) -> Taken:
            server = gateway.server
            envoy_s, server_s = cpu_s(gateway.envoy.pid), server.cpu_s() if server else 0.0
            done = h2load.load(
                directory,
                f"{gateway.url}/v1/chat/completions",
                body=body,
                headers=HEADERS,
                count=count,
                rate_per_s=rate_per_s,
                at_once=250,
                core=cores.one_for_client(),
            )
            envoy_s, server_s = (
                cpu_s(gateway.envoy.pid) - envoy_s,
                (server.cpu_s() if server else 0.0) - server_s,
            )
            return done, envoy_s / count, server_s / count

        for rate_per_s in RATES_PER_S:
            count = max(50, int(rate_per_s * SECONDS * scale))
            taken: dict[str, list[Taken]] = {gateway.name: [] for gateway in running}
            for gateway in running:
                run(gateway, rate_per_s, max(50, count // 10))
            for _ in range(rounds):
                for gateway in running:
                    taken[gateway.name].append(run(gateway, rate_per_s, count))
            rows.extend(_row(name, rate_per_s, one, taken[ALONE]) for name, one in taken.items())
            sent += count * rounds
        records = running[-1].envoy.stats("grpc_access_log.logs_written")
    if sum(records.values()) < sent:
        raise h2load.ClientFailed(f"of {sent} requests only these had an access-log record: {records}")
    return rows


def _row(name: str, rate_per_s: int, taken: list[Taken], alone: list[Taken]) -> Row:
    return {
        "gateway": name,
        "rate_per_s": rate_per_s,
        "per_s": spread(one.per_s for one, _, _ in taken),
        **{
            f"p{percent}_us": spread(one.quantile_us(percent / 100) for one, _, _ in taken)
            for percent in (50, 95, 99)
        },
        **{
            f"added_p{percent}_us": spread(
                one.quantile_us(percent / 100) - bare.quantile_us(percent / 100)
                for (one, _, _), (bare, _, _) in zip(taken, alone, strict=True)
            )
            for percent in (50, 95, 99)
        },
        "envoy_cpu_us": spread(envoy_s * 1e6 for _, envoy_s, _ in taken),
        "server_cpu_us": spread(server_s * 1e6 for _, _, server_s in taken),
        "server_cores": spread(server_s * one.per_s for one, _, server_s in taken),
    }
