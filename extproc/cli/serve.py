"""`extproc serve`: the service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="serve")(serve)


def serve(
    policy: Annotated[Path, typer.Option(help="Policy file (YAML).", envvar="EXTPROC_POLICY")],
    listen: Annotated[
        str, typer.Option(help="gRPC address: HOST:PORT or unix:/path.", envvar="EXTPROC_LISTEN")
    ] = "127.0.0.1:9002",
    admin: Annotated[
        str, typer.Option(help="Admin HTTP address, HOST:PORT.", envvar="EXTPROC_ADMIN")
    ] = "127.0.0.1:9903",
    drain_wait_ms: Annotated[
        int,
        typer.Option(
            min=0,
            help="After SIGTERM, keep serving this long so that Envoy's health check notices.",
            envvar="EXTPROC_DRAIN_WAIT_MS",
        ),
    ] = 4_000,
) -> None:
    """Serve ext_proc and access logs until SIGTERM; SIGHUP reloads the policy."""
    from extproc.adapters.policy_file import PolicyError
    from extproc.adapters.tokens.errors import TokenizerUnusable
    from extproc.app import serve as serve_forever
    from extproc.settings import Settings

    host, _, port = admin.rpartition(":")
    if not host or not port.isdecimal():
        raise typer.BadParameter(f"{admin!r} is not HOST:PORT, such as 127.0.0.1:9903", param_hint="--admin")
    settings = Settings(
        policy=policy, listen=listen, admin_host=host, admin_port=int(port), drain_wait_ms=drain_wait_ms
    )
    try:
        serve_forever(settings)
    except (PolicyError, TokenizerUnusable, OSError) as error:
        typer.echo(f"extproc: {error}", err=True)
        raise typer.Exit(code=1) from None
