"""Envoy's side of the agreement: a complete gateway configuration, made from the policy in force."""

from __future__ import annotations

from extproc.adapters.envoy_bootstrap.gateway import bootstrap, bootstrap_message
from extproc.adapters.envoy_bootstrap.options import (
    Address,
    BootstrapError,
    GatewayOptions,
    PipeAddress,
    SocketAddress,
    parse_address,
    parse_socket_address,
)
from extproc.adapters.envoy_bootstrap.sizing import Sizing

__all__ = [
    "Address",
    "BootstrapError",
    "GatewayOptions",
    "PipeAddress",
    "Sizing",
    "SocketAddress",
    "bootstrap",
    "bootstrap_message",
    "parse_address",
    "parse_socket_address",
]
