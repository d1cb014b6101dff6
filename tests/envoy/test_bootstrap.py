"""The generated configuration as text: accepted by the real Envoy, sized by the policy, honest about mistakes."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.adapters.envoy_bootstrap import (
    Address,
    BootstrapError,
    GatewayOptions,
    PipeAddress,
    Sizing,
    SocketAddress,
    bootstrap,
    bootstrap_message,
    parse_address,
    parse_socket_address,
)
from extproc.adapters.envoy_bootstrap.commentary import COMMENTS
from extproc.adapters.envoy_bootstrap.rendering import from_yaml, to_yaml
from extproc.adapters.envoy_bootstrap.usage import usage_keys
from extproc.dialects.reading import JsonPath, UsageField, UsagePaths
from extproc.domain.policy import MetadataIdentity, Policy
from tests.envoy.policies import policy, pool
from tests.support.envoy_binary import envoy_program

PIPE = PipeAddress(path="/run/extproc/worker-0.sock")
OPTIONS = GatewayOptions(extproc=(PIPE,))


def validate(text: str, directory: Path) -> str:
    """What the real Envoy says about a configuration that it accepts."""
    config = directory / "envoy.yaml"
    config.write_text(text, encoding="utf-8")
    result = subprocess.run(
        [envoy_program(), "--mode", "validate", "--log-level", "warning", "--config-path", config],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def parts(policy: Policy, options: GatewayOptions = OPTIONS) -> dict[str, Any]:
    """The configuration's parts that tests look at, as plain values."""
    whole = yaml.safe_load(bootstrap(policy, options))
    resources = whole["static_resources"]
    (listener,) = resources["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return {
        "clusters": {cluster["name"]: cluster for cluster in resources["clusters"]},
        "manager": manager,
        "filters": {one["name"].rpartition(".")[2]: one["typed_config"] for one in manager["http_filters"]},
        "host": manager["route_config"]["virtual_hosts"][0],
    }


@pytest.mark.parametrize(
    ("subject", "options"),
    [
        pytest.param(policy(), OPTIONS, id="smallest"),
        pytest.param(
            policy(
                pool("a", addresses=("vllm-0.vllm:8000", "vllm-1.vllm:8000")), pool("b", request_cap=4_000)
            ),
            GatewayOptions(
                extproc=(
                    SocketAddress(host="admission", port=9002),
                    SocketAddress(host="127.0.0.1", port=9003),
                ),
                otlp=SocketAddress(host="collector", port=4317),
                pool_health_path="/health",
                usage_filters=False,
            ),
            id="names-and-tcp",
        ),
        pytest.param(
            policy(
                pool(addresses=("[::1]:8000", "10.0.0.1:8000")),
                identity=MetadataIdentity(namespace="envoy.filters.http.jwt_authn", path=("payload", "org")),
            ),
            GatewayOptions(
                extproc=(PIPE, SocketAddress(host="::1", port=9002)),
                otlp=SocketAddress(host="10.0.0.9", port=4317),
            ),
            id="ipv6-and-jwt",
        ),
        pytest.param(
            policy(
                *(pool(name) for name in ("n", "Y", "on", "null", "~", "1e3", "0x10", "08", "1:30", "a: b"))
            ),
            GatewayOptions(extproc=(PIPE,), node_id="no", node_cluster="012"),
            id="names-that-look-like-something-else",
        ),
    ],
)
def test_envoy_accepts_it(subject: Policy, options: GatewayOptions, tmp_path: Path) -> None:
    """Whatever policy and options say, the real Envoy loads the result, and nothing in it is deprecated."""
    said = validate(bootstrap(subject, options), tmp_path)
    assert "deprecated" not in said.lower()
    assert "no configured limit" not in said


def test_text_and_typed_form_are_the_same() -> None:
    """Nothing is lost or changed between the typed configuration and its text."""
    text = bootstrap(policy(pool("n"), pool("b", addresses=("host:1",))), OPTIONS)
    message = bootstrap_message(policy(pool("n"), pool("b", addresses=("host:1",))), OPTIONS)
    assert from_yaml(text).to_dict(casing=Casing.SNAKE) == message.to_dict(casing=Casing.SNAKE)


TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300),
    st.lists(
        st.sampled_from(["a" * 60, " ", "|", "\n", '"', "\\", "# ", ": ", "- ", "é", "😀"]), min_size=1
    ).map("".join),
    st.sampled_from(
        ["y", "No", "on", "~", "null", "1e3", "0x1F", "1_000", "1:30", "2026-01-01", "=", "<<", ".inf"]
    ),
)


@settings(deadline=None, max_examples=50)
@given(TEXTS, st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=200))
def test_any_text_survives_rendering(text: str, comment: str) -> None:
    """Whatever a name looks like and however long it is, it is read back as the same text, beside any comment."""
    message = bootstrap_v3.Bootstrap(
        node=core.Node(id=text, user_agent_name="n", cluster=text * 3),
        static_resources=bootstrap_v3.BootstrapStaticResources(clusters=[cluster.Cluster(name=text)]),
    )
    rendered = to_yaml(
        message, {"id": comment, "clusters": comment, f"[{text}]": comment, "node.cluster": comment}
    )
    assert from_yaml(rendered).to_dict() == message.to_dict()


def test_comments_stand_above_what_they_are_about() -> None:
    """A comment is a line of its own above its field, at the field's indentation, and keeps it off shared lines."""
    message = bootstrap_v3.Bootstrap(
        node=core.Node(id="a", cluster="b"),
        static_resources=bootstrap_v3.BootstrapStaticResources(
            clusters=[cluster.Cluster(name="c"), cluster.Cluster(name="d")]
        ),
    )
    assert to_yaml(message, {"node.cluster": "first", "[d]": "second", "other.id": "never"}) == (
        "node:\n"
        "  id: a\n"
        "  # first\n"
        "  cluster: b\n"
        "static_resources:\n"
        "  clusters:\n"
        "    - {name: c}\n"
        "    # second\n"
        "    - {name: d}\n"
    )


def test_every_comment_is_about_something() -> None:
    """No comment outlives what it explains: each stands in the fullest configuration that there is."""
    options = GatewayOptions(extproc=(SocketAddress(host="10.0.0.1", port=1),))
    subject = policy(identity=MetadataIdentity(namespace="jwt", path=("sub",)))
    text = bootstrap(subject, options)
    said = " ".join(
        line.strip().removeprefix("# ") for line in text.splitlines() if line.strip().startswith("#")
    )
    assert [key for key, comment in COMMENTS.items() if comment not in said] == []


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        pytest.param(
            policy(lane={"residence_ms": 0, "max_output_tokens": 500}),
            {
                "message_timeout_ms": 5_000,
                "max_message_timeout_ms": 60_000,
                "stream_idle_timeout_ms": 300_000,
            },
            id="floors",
        ),
        pytest.param(
            # 20 s hold + 131,072 tokens x 3 us = 394 ms + 1.5 s
            policy(lane={"residence_ms": 20_000}, context_tokens=131_072),
            {"message_timeout_ms": 21_894, "max_message_timeout_ms": 60_000},
            id="a-long-hold",
        ),
        pytest.param(
            policy(lane={"residence_ms": 60_000}),
            {"message_timeout_ms": 61_599, "max_message_timeout_ms": 123_198},
            id="a-longer-hold",
        ),
        pytest.param(
            # 60 s hold + 2 x (32,768 tokens / 1,000 per s + 8,000 tokens / 20 per s = 432.768 s)
            policy(
                pool(prefill_tokens_per_s=1_000, decode_tokens_per_s=20),
                lane={"max_input_tokens": 100_000, "max_output_tokens": 8_000},
            ),
            {"stream_idle_timeout_ms": 925_536},
            id="slow-answers",
        ),
        pytest.param(
            # 2 x (2 replicas x 700 + 1 x 64 + 3 lanes x 100 queued x 2 pools)
            policy(
                pool("a", addresses=("10.0.0.1:1", "10.0.0.2:1"), request_cap=700),
                pool("b"),
                lane={"queue_requests": 100},
                body_bytes=12_345_678,
            ),
            {
                "extproc_requests": 4_128,
                "downstream_connections": 16_512,
                "body_limit_bytes": 12_345_678,
            },
            id="many-requests",
        ),
    ],
)
def test_numbers_follow_from_the_policy(subject: Policy, expected: dict[str, int]) -> None:
    """Timeouts outlast what the policy allows to wait, and breakers open above what it admits and queues."""
    sizing = dataclasses.asdict(Sizing.of(subject))
    assert {name: sizing[name] for name in expected} == expected


def test_the_numbers_reach_envoy() -> None:
    """Each derived number stands where Envoy looks for it."""
    subject = policy(
        pool("a", request_cap=700), lane={"residence_ms": 20_000, "queue_requests": 100}, body_bytes=2_000_000
    )
    found = parts(subject)
    assert found["filters"]["ext_proc"]["message_timeout"] == "21.599s"
    assert found["filters"]["ext_proc"]["max_message_timeout"] == "60s"
    assert found["manager"]["stream_idle_timeout"] == "386.554s"
    assert found["host"]["request_body_buffer_limit"] == 2_000_000
    (service,) = found["clusters"]["extproc"]["circuit_breakers"]["thresholds"]
    assert service["max_requests"] == service["max_pending_requests"] == 2 * (700 + 300)
    (replicas,) = found["clusters"]["a-replicas"]["circuit_breakers"]["thresholds"]
    assert replicas["max_requests"] == replicas["max_connections"] == 1_400


def test_the_exchange_is_set_up_for_leases() -> None:
    """Bodies are buffered, and the stream lives as long as the request in every version of Envoy."""
    filter_config = parts(policy())["filters"]["ext_proc"]
    assert filter_config["processing_mode"] == {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SKIP",
        "response_trailer_mode": "SEND",
    }
    assert filter_config["allow_mode_override"] is True
    assert filter_config["failure_mode_allow"] is True
    assert filter_config["metadata_options"] == {
        "receiving_namespaces": {"untyped": ["extproc.admission", "envoy.lb"]}
    }


def test_only_the_identitys_metadata_is_forwarded() -> None:
    """The service sees the metadata that names the tenant, and no other filter's."""
    identity = MetadataIdentity(namespace="envoy.filters.http.jwt_authn", path=("payload", "org"))
    filter_config = parts(policy(identity=identity))["filters"]["ext_proc"]
    assert filter_config["metadata_options"]["forwarding_namespaces"] == {
        "untyped": ["envoy.filters.http.jwt_authn"]
    }


def test_pings_are_for_networks() -> None:
    """Only endpoints on a network are pinged: on a Unix socket there is nothing to find out."""
    for address, pinged in ((PIPE, False), (SocketAddress(host="10.0.0.1", port=9002), True)):
        cluster = parts(policy(), GatewayOptions(extproc=(address,)))["clusters"]["extproc"]
        (http,) = cluster["typed_extension_protocol_options"].values()
        assert ("connection_keepalive" in http["explicit_http_config"]["http2_protocol_options"]) is pinged


def test_usage_filters_can_be_left_out() -> None:
    """Without usage filters the chain is the admission and the router, for older Envoys."""
    options = dataclasses.replace(OPTIONS, usage_filters=False)
    assert list(parts(policy(), options)["filters"]) == ["ext_proc", "router"]
    assert list(parts(policy())["filters"]) == [
        "ext_proc",
        "sse_to_metadata",
        "json_to_metadata",
        "header_to_metadata",
        "router",
    ]


def test_pools_may_share_a_cluster() -> None:
    """Two pools that divide the replicas of one cluster are one cluster with each replica once."""
    first = pool("a", cluster="shared", addresses=("10.0.0.1:1", "10.0.0.2:1"))
    second = pool("b", cluster="shared", addresses=("10.0.0.2:1", "10.0.0.3:1"))
    found = parts(policy(first, second))
    assert list(found["clusters"]) == ["extproc", "shared", "unrouted"]
    (locality,) = found["clusters"]["shared"]["load_assignment"]["endpoints"]
    hosts = [one["endpoint"]["address"]["socket_address"]["address"] for one in locality["lb_endpoints"]]
    assert hosts == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


@pytest.mark.parametrize(
    ("subject", "options", "told"),
    [
        (
            policy(pool(addresses=(None,))),
            OPTIONS,
            r"replica 'main-0' of pool 'main' has no address.*host:port",
        ),
        (
            policy(pool(addresses=("vllm",))),
            OPTIONS,
            r"replica 'main-0' of pool 'main': address 'vllm' is not",
        ),
        (policy(pool(cluster="extproc")), OPTIONS, r"pool 'main' names cluster 'extproc'.*rename it"),
        (policy(), GatewayOptions(extproc=()), r"no address of the service: give one --extproc"),
        (
            policy(),
            GatewayOptions(extproc=(PIPE, SocketAddress(host="admission", port=1))),
            r"'admission' cannot be endpoints of one cluster",
        ),
    ],
)
def test_what_cannot_work_is_told_with_its_remedy(
    subject: Policy, options: GatewayOptions, told: str
) -> None:
    """A policy that no gateway can be made from is refused in words that name the place and what to do."""
    with pytest.raises(BootstrapError, match=told):
        bootstrap(subject, options)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", SocketAddress(host="127.0.0.1", port=8000)),
        ("vllm-0.vllm.svc:1", SocketAddress(host="vllm-0.vllm.svc", port=1)),
        ("[::1]:65535", SocketAddress(host="::1", port=65535)),
        ("unix:/run/a b.sock", PipeAddress(path="/run/a b.sock")),
    ],
)
def test_addresses_are_read(text: str, address: Address) -> None:
    """Sockets, IPv4, bracketed IPv6 and names are understood."""
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":80",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:٣",
        "::1:80",
        "[]:80",
        "unix:relative",
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    """What is no address is refused with an example of one."""
    with pytest.raises(BootstrapError, match=r"write"):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_an_error(text: str) -> None:
    """No text makes the reader fail in another way, and what it accepts has a host and a port."""
    try:
        address = parse_socket_address(text)
    except BootstrapError:
        return
    assert address.host
    assert 0 < address.port < 65536


def test_one_place_has_one_meaning() -> None:
    """Two dialects that disagree on what a place in an answer means cannot be configured together."""
    part = UsageField(body=(("usage", "a"),), stream=())
    whole = UsagePaths(input_fields=(part,))
    output = UsagePaths(output_fields=(part,))
    second = UsagePaths(input_fields=(UsageField(body=(("usage", "b"),), stream=()), part))
    assert usage_keys((whole, whole), _body) == {("usage", "a"): "input_tokens"}
    assert usage_keys((second,), _body) == {("usage", "b"): "input_tokens", ("usage", "a"): "input_tokens_2"}
    for other in (output, second):
        with pytest.raises(ValueError, match=r"usage path usage\.a is both input_tokens and"):
            usage_keys((whole, other), _body)


def _body(field: UsageField) -> tuple[JsonPath, ...]:
    return field.body
