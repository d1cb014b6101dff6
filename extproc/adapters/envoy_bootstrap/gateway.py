"""A complete Envoy configuration for a policy."""

from __future__ import annotations

from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.overload import v3 as overload
from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
    DownstreamConnectionsConfig,
)
from envoy_data_plane.google.protobuf import Struct

from extproc.adapters.envoy_bootstrap.clusters import clusters, core_address
from extproc.adapters.envoy_bootstrap.commentary import COMMENTS
from extproc.adapters.envoy_bootstrap.listener import gateway_listener
from extproc.adapters.envoy_bootstrap.options import BootstrapError, GatewayOptions
from extproc.adapters.envoy_bootstrap.rendering import packed, to_yaml
from extproc.adapters.envoy_bootstrap.sizing import Sizing
from extproc.domain.policy import Policy

_RUNTIME = {
    # End the exchange's stream with a clean half-close instead of a reset that races with it.
    "envoy.reloadable_features.ext_proc_graceful_grpc_close": True,
    # All inference paths are one regular expression; Envoy's default stops at a handful.
    "re2.max_program_size.error_level": 2_000,
}


def bootstrap(policy: Policy, options: GatewayOptions) -> str:
    """The YAML of one Envoy that admits by `policy`. Raises BootstrapError."""
    return to_yaml(bootstrap_message(policy, options), COMMENTS)


def bootstrap_message(policy: Policy, options: GatewayOptions) -> bootstrap_v3.Bootstrap:
    """The same as `bootstrap`, as typed messages that a caller may still change."""
    if not policy.pools:
        raise BootstrapError("the policy has no pools: there is nothing that an admitted request could go to")
    sizing = Sizing.of(policy)
    return bootstrap_v3.Bootstrap(
        node=core.Node(id=options.node_id, cluster=options.node_cluster),
        admin=bootstrap_v3.Admin(address=core_address(options.admin)),
        layered_runtime=bootstrap_v3.LayeredRuntime(
            layers=[bootstrap_v3.RuntimeLayer(name="static", static_layer=Struct.from_dict(_RUNTIME))]
        ),
        overload_manager=_connection_limit(sizing),
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[gateway_listener(policy, options, sizing)],
            clusters=list(clusters(policy, options, sizing)),
        ),
    )


def _connection_limit(sizing: Sizing) -> overload.OverloadManager:
    """Clients beyond this wait in the kernel: a flood of idle connections must not use up Envoy's descriptors."""
    limit = DownstreamConnectionsConfig(max_active_downstream_connections=sizing.downstream_connections)
    return overload.OverloadManager(
        resource_monitors=[
            overload.ResourceMonitor(
                name="envoy.resource_monitors.global_downstream_max_connections", typed_config=packed(limit)
            )
        ]
    )
