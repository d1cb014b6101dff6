"""`extproc check` and `extproc schema`: is this policy file good, and what may be in one?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("check")(check)
    app.command("schema")(schema)


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The policy file.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the policy and its version as JSON.")] = False,
    tokenizers: Annotated[
        bool,
        typer.Option(
            "--tokenizers", help="Load tokenizers and templates, too, as the service will: takes seconds."
        ),
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings, too.")] = False,
) -> None:
    """Check a policy FILE as a whole and show the policy that it means, with every default and its version.

    Exit code 0: the policy can be used. 1: it cannot, and everything that is wrong with it is listed.
    """
    from extproc.adapters.policy_file import PolicyError, check_policy
    from extproc.cli import policy_view

    counted = None
    try:
        checked = check_policy(file)
        if tokenizers:
            from extproc.cli import policy_tokenizers

            counted = policy_tokenizers.load(checked.policy, source=str(file))
    except PolicyError as error:
        if json:
            sys.stdout.write(policy_view.problems_as_json(error))
        policy_view.show_problems(error)
        raise typer.Exit(1) from None
    if json:
        sys.stdout.write(policy_view.as_json(checked))
    else:
        policy_view.show_policy(checked.policy, counted)
    policy_view.show_warnings(checked.warnings)
    if strict and checked.warnings:
        raise typer.Exit(1)


def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the configuration reference instead.")
    ] = False,
    dialects: Annotated[
        bool, typer.Option("--dialects", help="Print the table of the APIs that are counted instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of policy files, for editors and other tools."""
    from extproc.cli import dialect_reference, policy_reference

    if dialects:
        sys.stdout.write(dialect_reference.as_markdown())
        return
    sys.stdout.write(policy_reference.as_markdown() if markdown else policy_reference.as_json())
