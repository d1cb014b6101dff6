"""`extproc serve`: the service."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class LogFormat(StrEnum):
    """How lines look; `auto` is for people on a terminal and for machines otherwise."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    """What is worth a line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="serve")(serve)


def serve(
    *,
    policy: Annotated[Path, typer.Option(help="Policy file (YAML).", envvar="EXTPROC_POLICY")],
    listen: Annotated[
        str,
        typer.Option(
            help="gRPC address: HOST:PORT or unix:/path. Several workers count the port up, or number the path; "
            "{worker} is replaced by the number.",
            envvar="EXTPROC_LISTEN",
        ),
    ] = "127.0.0.1:9002",
    admin: Annotated[
        str, typer.Option(help="Admin HTTP address: HOST:PORT or unix:/path.", envvar="EXTPROC_ADMIN")
    ] = "127.0.0.1:9903",
    ledger: Annotated[
        str | None,
        typer.Option(
            help="The shared ledger: redis://, rediss://, unix:// or redis+sentinel:// URL. Without it one "
            "worker keeps the books in memory, and several share an embedded Valkey.",
            envvar="EXTPROC_LEDGER",
            show_default="in memory",
        ),
    ] = None,
    ledger_domain: Annotated[
        str,
        typer.Option(
            help="Workers with the same domain share limits; a tenant's quota holds per domain.",
            envvar="EXTPROC_LEDGER_DOMAIN",
        ),
    ] = "default",
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Worker processes.", envvar="EXTPROC_WORKERS")
    ] = 1,
    drain_wait_ms: Annotated[
        int,
        typer.Option(
            min=0,
            help="After SIGTERM, keep serving this long so that Envoy's health check notices.",
            envvar="EXTPROC_DRAIN_WAIT_MS",
        ),
    ] = 4_000,
    log_format: Annotated[
        LogFormat, typer.Option(help="Lines for machines or for people.", envvar="EXTPROC_LOG_FORMAT")
    ] = LogFormat.AUTO,
    log_level: Annotated[
        LogLevel, typer.Option(help="Also changed at run time: PUT /loglevel.", envvar="EXTPROC_LOG_LEVEL")
    ] = LogLevel.INFO,
) -> None:
    """Serve ext_proc and access logs until SIGTERM; SIGHUP reloads the policy."""
    from extproc.adapters.policy_file import PolicyError
    from extproc.adapters.redis_ledger.address import AddressError
    from extproc.adapters.telemetry import TelemetrySettingsError, install_log
    from extproc.adapters.tokens.errors import TokenizerUnusable
    from extproc.app import serve as serve_forever
    from extproc.settings import Settings
    from extproc.supervisor.supervise import NoEmbeddedValkey, supervise

    host, port = _admin_address(admin)
    settings = Settings(
        policy=policy,
        listen=listen,
        admin_host=host,
        admin_port=port,
        ledger=ledger,
        ledger_domain=ledger_domain,
        drain_wait_ms=drain_wait_ms,
        log_format=log_format.value,
        log_level=log_level.value,
    )
    log = install_log(style=log_format.value, level=log_level.value)
    try:
        if workers > 1:
            supervise(settings, workers=workers)
        else:
            serve_forever(settings)
    except (
        PolicyError,
        TokenizerUnusable,
        TelemetrySettingsError,
        AddressError,
        NoEmbeddedValkey,
        OSError,
    ) as error:
        typer.echo(f"extproc: {error}", err=True)
        raise typer.Exit(code=1) from None
    finally:
        log.close()


def _admin_address(text: str) -> tuple[str, int]:
    """Host and port; a socket's path is a host without a port."""
    if text.startswith("unix:/"):
        return text, 0
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise typer.BadParameter(
            f"{text!r} is neither HOST:PORT, such as 127.0.0.1:9903, nor unix:/path", param_hint="--admin"
        )
    return host, int(port)
