"""What a gateway needs to know beyond the policy: where it listens and where its neighbours are."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


class BootstrapError(ValueError):
    """No gateway can be made from this policy and these options; the message names value and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketAddress:
    """A TCP address. `host` is an IP address or a DNS name."""

    host: str
    port: int

    @property
    def is_ip(self) -> bool:
        """Whether `host` needs no DNS lookup."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeAddress:
    """A Unix domain socket."""

    path: str


Address = SocketAddress | PipeAddress


def parse_socket_address(text: str) -> SocketAddress:
    """Reads `host:port`; an IPv6 host stands in brackets. Raises BootstrapError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BootstrapError(
            f"address {text!r} is not host:port; write for example 127.0.0.1:8000 or [::1]:8000"
        )
    return SocketAddress(host=host, port=int(port))


def parse_address(text: str) -> Address:
    """Reads `unix:/path` or `host:port`. Raises BootstrapError."""
    if not text.startswith("unix:"):
        return parse_socket_address(text)
    path = text.removeprefix("unix:")
    if not path.startswith("/"):
        raise BootstrapError(
            f"socket path in {text!r} is not absolute; write unix:/run/extproc/worker-0.sock"
        )
    return PipeAddress(path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Where one Envoy listens, who answers it, and which optional parts it has.

    `extproc` has one address per worker process, so that Envoy balances single exchanges between them.
    `pool_health_path` switches on HTTP health checks of the replicas. `usage_filters` reads token usage out
    of the answers inside Envoy; it needs Envoy 1.38 or newer.

    `trust_identity_header` is for a listener that only a trusted proxy can reach: a policy that takes the tenant
    from a header then takes it from that proxy. Otherwise the header is removed from every request, and a filter
    of this Envoy's own has to set it.
    """

    extproc: tuple[Address, ...]
    listen: SocketAddress = SocketAddress(host="0.0.0.0", port=10000)  # noqa: S104 - a gateway serves its network
    admin: SocketAddress = SocketAddress(host="127.0.0.1", port=9901)
    otlp: SocketAddress | None = None
    usage_filters: bool = True
    pool_health_path: str | None = None
    trust_identity_header: bool = False
    node_id: str = "gateway"
    node_cluster: str = "extproc"
