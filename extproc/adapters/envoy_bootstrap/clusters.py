"""Where requests can go: this service, the pools, the collector, and nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
from envoy_data_plane.envoy.type import v3 as envoy_type
from envoy_data_plane.envoy.type.metadata import v3 as metadata

from extproc.adapters.envoy_bootstrap.options import (
    Address,
    BootstrapError,
    GatewayOptions,
    PipeAddress,
    SocketAddress,
    parse_socket_address,
)
from extproc.adapters.envoy_bootstrap.rendering import duration, packed
from extproc.adapters.envoy_bootstrap.sizing import Sizing, pool_requests
from extproc.adapters.envoy_names import DESTINATION_KEY, DESTINATION_NAMESPACE, EXT_PROC_SERVICE
from extproc.domain.policy import Policy, Pool

EXTPROC = "extproc"
UNROUTED = "unrouted"
OTLP = "otlp"

HEALTH_INTERVAL_MS = 1_000
"""A draining worker waits two of these before it stops admitting."""

POOL_IDLE_MS = 4_000
"""Engines behind uvicorn close an idle connection after 5 s; whoever reuses it at that moment gets a 503."""

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def clusters(policy: Policy, options: GatewayOptions, sizing: Sizing) -> Iterator[cluster.Cluster]:
    """All clusters of the gateway. Raises BootstrapError for addresses that cannot stand together."""
    yield _extproc(options.extproc, sizing)
    for name, pools in _by_cluster(policy.pools.values()).items():
        yield _pool(name, pools, options.pool_health_path)
    yield cluster.Cluster(
        name=UNROUTED, type=cluster.ClusterDiscoveryType.STATIC, connect_timeout=duration(1_000)
    )
    if options.otlp is not None:
        yield _otlp(options.otlp)


def _by_cluster(pools: Iterable[Pool]) -> dict[str, list[Pool]]:
    """Pools by the cluster they name; several pools may divide the replicas of one."""
    found: dict[str, list[Pool]] = {}
    for pool in pools:
        if pool.cluster in (EXTPROC, UNROUTED, OTLP):
            raise BootstrapError(
                f"pool {pool.name!r} names cluster {pool.cluster!r}, which the gateway needs for itself: rename it"
            )
        found.setdefault(pool.cluster, []).append(pool)
    return found


def _extproc(addresses: Sequence[Address], sizing: Sizing) -> cluster.Cluster:
    """This service: one endpoint per worker, least busy first, and only those that say they serve."""
    if not addresses:
        raise BootstrapError("no address of the service: give one --extproc per worker process")
    http2 = core.Http2ProtocolOptions()
    if any(isinstance(address, SocketAddress) for address in addresses):
        # A peer that vanished without closing is only noticed on the network, never on a Unix socket. The
        # service's ping policy allows this interval; a stock gRPC server would close the connection over it.
        http2.connection_keepalive = core.KeepaliveSettings(
            interval=duration(30_000), timeout=duration(5_000)
        )
    return _cluster(
        EXTPROC,
        addresses,
        connect_timeout=duration(250),
        lb_policy=cluster.ClusterLbPolicy.LEAST_REQUEST,
        # With the default threshold of 50 % Envoy would send exchanges to workers known to be down.
        common_lb_config=cluster.ClusterCommonLbConfig(healthy_panic_threshold=envoy_type.Percent(value=0.0)),
        circuit_breakers=_breaker(sizing.extproc_requests),
        typed_extension_protocol_options={
            _HTTP_OPTIONS: packed(
                upstream_http.HttpProtocolOptions(
                    explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
                        http2_protocol_options=http2
                    )
                )
            )
        },
        health_checks=[
            core.HealthCheck(
                timeout=duration(1_000),
                interval=duration(HEALTH_INTERVAL_MS),
                no_traffic_interval=duration(HEALTH_INTERVAL_MS),
                unhealthy_threshold=2,
                healthy_threshold=1,
                grpc_health_check=core.HealthCheckGrpcHealthCheck(service_name=EXT_PROC_SERVICE),
            )
        ],
    )


def _pool(name: str, pools: Sequence[Pool], health_path: str | None) -> cluster.Cluster:
    """The replicas of a pool. With IP addresses the reserved replica serves, else the least busy one does."""
    addresses = list(dict.fromkeys(_replica_addresses(pools)))
    message = _cluster(
        name,
        addresses,
        connect_timeout=duration(1_000),
        circuit_breakers=_breaker(sum(pool_requests(pool) for pool in pools)),
        typed_extension_protocol_options={
            _HTTP_OPTIONS: packed(
                upstream_http.HttpProtocolOptions(
                    common_http_protocol_options=core.HttpProtocolOptions(
                        idle_timeout=duration(POOL_IDLE_MS)
                    ),
                    explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
                        http_protocol_options=core.Http1ProtocolOptions()
                    ),
                )
            )
        },
        # A replica whose machine died says nothing, and a long prefill looks just the same.
        upstream_connection_options=cluster.UpstreamConnectionOptions(
            tcp_keepalive=core.TcpKeepalive(keepalive_probes=3, keepalive_time=30, keepalive_interval=10)
        ),
    )
    if health_path is not None:
        message.health_checks = [
            core.HealthCheck(
                timeout=duration(2_000),
                interval=duration(5_000),
                no_traffic_interval=duration(5_000),
                unhealthy_threshold=2,
                healthy_threshold=1,
                http_health_check=core.HealthCheckHttpHealthCheck(path=health_path),
            )
        ]
    if all(address.is_ip for address in addresses):
        message.load_balancing_policy = _reserved_replica_first()
    else:
        message.lb_policy = cluster.ClusterLbPolicy.LEAST_REQUEST
    return message


def _reserved_replica_first() -> cluster.LoadBalancingPolicy:
    """The replica named in the request's metadata; without one, or on a retry, the least busy one."""
    fallback = _policy("envoy.load_balancing_policies.least_request", least_request.LeastRequest())
    source = override_host.OverrideHostOverrideHostSource(
        metadata=metadata.MetadataKey(
            key=DESTINATION_NAMESPACE, path=[metadata.MetadataKeyPathSegment(key=DESTINATION_KEY)]
        )
    )
    return _policy(
        "envoy.load_balancing_policies.override_host",
        override_host.OverrideHost(override_host_sources=[source], fallback_policy=fallback),
    )


def _policy(
    name: str, message: least_request.LeastRequest | override_host.OverrideHost
) -> cluster.LoadBalancingPolicy:
    extension = core.TypedExtensionConfig(name=name, typed_config=packed(message))
    return cluster.LoadBalancingPolicy(
        policies=[cluster.LoadBalancingPolicyPolicy(typed_extension_config=extension)]
    )


def _otlp(address: SocketAddress) -> cluster.Cluster:
    """The collector that Envoy's own spans go to."""
    return _cluster(
        OTLP,
        [address],
        connect_timeout=duration(500),
        typed_extension_protocol_options={
            _HTTP_OPTIONS: packed(
                upstream_http.HttpProtocolOptions(
                    explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
                        http2_protocol_options=core.Http2ProtocolOptions()
                    )
                )
            )
        },
    )


def _replica_addresses(pools: Iterable[Pool]) -> Iterator[SocketAddress]:
    for pool in pools:
        for replica in pool.replicas:
            if replica.address is None:
                raise BootstrapError(
                    f"replica {replica.name!r} of pool {pool.name!r} has no address: "
                    "add `address: host:port` to the policy, Envoy has to know where to send requests"
                )
            try:
                yield parse_socket_address(replica.address)
            except BootstrapError as error:
                raise BootstrapError(f"replica {replica.name!r} of pool {pool.name!r}: {error}") from error


def _breaker(requests: int) -> cluster.CircuitBreakers:
    return cluster.CircuitBreakers(
        thresholds=[
            cluster.CircuitBreakersThresholds(
                max_connections=requests,
                max_pending_requests=requests,
                max_requests=requests,
                max_retries=requests,
            )
        ]
    )


def _cluster(name: str, addresses: Sequence[Address], **settings: Any) -> cluster.Cluster:
    """A cluster of `addresses`, looked up if any of them is a DNS name, with `settings` for the rest."""
    message = cluster.Cluster(
        name=name,
        type=cluster.ClusterDiscoveryType.STATIC,
        load_assignment=_assignment(name, addresses),
        **settings,
    )
    names = [address for address in addresses if isinstance(address, SocketAddress) and not address.is_ip]
    if names:
        if any(isinstance(address, PipeAddress) for address in addresses):
            raise BootstrapError(
                f"Unix sockets and the DNS name {names[0].host!r} cannot be endpoints of one cluster: "
                "use only sockets and IP addresses, or only host:port"
            )
        message.type = cluster.ClusterDiscoveryType.STRICT_DNS
        message.dns_lookup_family = cluster.ClusterDnsLookupFamily.V4_PREFERRED
    return message


def _assignment(name: str, addresses: Iterable[Address]) -> endpoint.ClusterLoadAssignment:
    return endpoint.ClusterLoadAssignment(
        cluster_name=name,
        endpoints=[
            endpoint.LocalityLbEndpoints(
                lb_endpoints=[
                    endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=core_address(address)))
                    for address in addresses
                ]
            )
        ],
    )


def core_address(address: Address) -> core.Address:
    """An address as Envoy's configuration has it."""
    if isinstance(address, PipeAddress):
        return core.Address(pipe=core.Pipe(path=address.path))
    return core.Address(socket_address=core.SocketAddress(address=address.host, port_value=address.port))
