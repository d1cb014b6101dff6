"""`extproc top`: what is happening now, in a terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Annotated, Any

import typer

TIMEOUT_S = 5.0
MOST_BYTES = 8 * 1024 * 1024


class NoAnswer(Exception):
    """The admin port did not answer as one. The text names the address and the remedy."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="top")(top)


def top(
    admin: Annotated[
        str, typer.Option(help="Admin HTTP address of a worker, HOST:PORT.", envvar="EXTPROC_ADMIN")
    ] = "127.0.0.1:9903",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
) -> None:
    """Watch pools, lanes, refusals and tenants; Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from extproc.cli.top_view import view

    host, _, port = admin.rpartition(":")
    if not host or not port.isdecimal():
        raise typer.BadParameter(f"{admin!r} is not HOST:PORT, such as 127.0.0.1:9903", param_hint="--admin")
    url = f"http://{admin}"
    console = Console()
    if once:
        try:
            console.print(view(_get(url, "/state"), _get(url, "/recent")))
        except NoAnswer as error:
            typer.echo(f"extproc: {error}", err=True)
            raise typer.Exit(code=1) from None
        return
    state: Mapping[str, Any] | None = None
    recent: Mapping[str, Any] = {}
    try:
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                trouble = None
                try:
                    state, recent = _get(url, "/state"), _get(url, "/recent")
                except NoAnswer as error:
                    trouble = str(error)
                live.update(view(state, recent, trouble=trouble, rows=console.height), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _get(url: str, path: str) -> Mapping[str, Any]:
    """One JSON document of the admin port. Raises `NoAnswer`."""
    try:
        with urllib.request.urlopen(url + path, timeout=TIMEOUT_S) as answer:  # noqa: S310 - always http
            document = json.loads(answer.read(MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise NoAnswer(
            f"no answer from {url}{path} ({reason}); is the service running, and is --admin its address?"
        ) from None
    if not isinstance(document, dict):
        raise NoAnswer(f"{url}{path} is not an admin port of this service; check --admin")
    return document
