"""The `extproc` command. Each group of commands has a module here, which imports what it needs when it runs.

To add commands: write `extproc/cli/NAME.py` with a function `register(app)`, import nothing heavy at its
top, and list it in `_GROUPS`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from extproc import __version__
from extproc.cli import demo, envoy, explain, ledger, policy, serve, simulate, tokens, top

_GROUPS = (demo, serve, policy, envoy, explain, simulate, tokens, top, ledger)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"extproc {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Token-aware admission control for LLM inference, as an Envoy external-processing service."""


def build_app() -> typer.Typer:
    """The command-line application with every command."""
    app = typer.Typer(
        name="extproc",
        no_args_is_help=True,
        add_completion=False,
        # Locals of a failed command may hold prompts or keys: they stay out of tracebacks.
        pretty_exceptions_show_locals=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for group in _GROUPS:
        group.register(app)
    return app


def main() -> None:
    """Run the command that the process was started with."""
    build_app()()
