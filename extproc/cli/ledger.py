"""`extproc ledger`: a look into the shared ledger's store, and the end of what a dead worker left there."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import typer

Ledger = Annotated[
    str,
    typer.Option(
        "--ledger",
        help="The ledger's store, as for `extproc serve`.",
        envvar="EXTPROC_LEDGER",
        show_default=False,
    ),
]
Domain = Annotated[str, typer.Option("--domain", help="The ledger domain.", envvar="EXTPROC_LEDGER_DOMAIN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        name="ledger",
        help="Look into the shared ledger's store, and give back what a dead worker left.",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
    )
    group.command(name="show")(show)
    group.command(name="leases")(leases)
    group.command(name="drain")(drain)
    app.add_typer(group)


def show(ledger: Ledger, domain: Domain = "default", as_json: AsJson = False) -> None:
    """Which workers there are, and what every tenant, lane and replica holds."""

    async def look(inspection: Any) -> Any:
        found = await inspection.leases()
        return await inspection.holders(found), await inspection.scopes()

    holders, scopes = _with(ledger, domain, look)
    if as_json:
        document = {"holders": _plain(holders), "scopes": _plain(scopes)}
        typer.echo(json.dumps(document, indent=2))
        return
    _print(
        "Workers",
        ("worker", "is", "leases", "tokens"),
        [(one.id, _life(one.alive_for_ms), str(one.leases), str(one.tokens)) for one in holders],
    )
    _print(
        "Held",
        ("scope", "name", "requests", "tokens"),
        [(one.kind, one.name, str(one.requests), str(one.tokens)) for one in scopes],
    )


def leases(
    ledger: Ledger,
    domain: Domain = "default",
    holder: Annotated[str | None, typer.Option(help="Only this worker's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many to show, oldest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Who holds what, since when, and what happens to it next."""

    async def look(inspection: Any) -> Any:
        return await inspection.leases(holder)

    found = _with(ledger, domain, look)
    if as_json:
        typer.echo(json.dumps(_plain(found[:limit]), indent=2))
        return
    _print(
        f"Leases ({min(limit, len(found))} of {len(found)})",
        ("lease", "worker", "state", "since", "tenant", "lane", "replica", "tokens", "next step in"),
        [
            (
                one.id,
                one.holder,
                one.state.name.lower(),
                _span(one.age_ms),
                one.tenant,
                one.lane,
                f"{one.pool} / {one.replica}",
                str(one.tokens),
                "-" if one.due_in_ms is None else _span(one.due_in_ms),
            )
            for one in found[:limit]
        ],
    )


def drain(
    holder: Annotated[str, typer.Argument(help="The worker, as `extproc ledger show` names it.")],
    ledger: Ledger,
    domain: Domain = "default",
    free: Annotated[
        bool,
        typer.Option(
            "--free", help="Free its tokens at once: only if Envoy serves none of its answers any more."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even though the worker is alive: it will claim its leases again.")
    ] = False,
) -> None:
    """Do not wait for a dead worker's TTL: its leases become orphans now, and are counted for their grace."""
    from extproc.domain.lease import LeaseState

    async def give_back(inspection: Any) -> tuple[int, int]:
        found = await inspection.leases(holder)
        [known] = [one for one in await inspection.holders(found) if one.id == holder] or [None]
        if known is None:
            raise typer.BadParameter(
                f"no worker {holder!r} holds anything in the domain {domain!r}; see `extproc ledger show`"
            )
        if known.alive_for_ms > 0 and not force:
            raise typer.BadParameter(
                f"worker {holder!r} is alive and renews its leases; stop it, or use --force"
            )
        live = [one.id for one in found if one.state is not LeaseState.RELEASED]
        return len(live), await inspection.give_back(live, at_once=free)

    live, changed = _with(ledger, domain, give_back)
    typer.echo(f"{changed} of {live} leases {'freed' if free else 'made orphans'}")


def _with(url: str, domain: str, use: Callable[[Any], Awaitable[Any]]) -> Any:
    """What `use` finds in the store; says what is wrong and ends where it cannot be asked."""
    from redis.exceptions import RedisError

    from extproc.adapters.redis_ledger.address import Address, AddressError
    from extproc.adapters.redis_ledger.connection import Lost, ReplyError
    from extproc.adapters.redis_ledger.inspection import Inspection

    async def run() -> Any:
        inspection = Inspection(Address.parse(url), domain)
        await inspection.connect()
        try:
            return await use(inspection)
        finally:
            inspection.close()

    try:
        return asyncio.run(run())
    except AddressError as error:
        typer.echo(f"extproc: {error}", err=True)
    except (OSError, TimeoutError, Lost, ReplyError, RedisError) as error:
        kind = error.code if isinstance(error, ReplyError) else type(error).__name__
        typer.echo(
            f"extproc: the ledger's store cannot be asked ({kind}): check --ledger, and that it runs",
            err=True,
        )
    raise typer.Exit(code=1)


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        numeric = column in {"leases", "tokens", "requests"}
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _plain(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in found]


def _life(alive_for_ms: int) -> str:
    return "alive" if alive_for_ms > 0 else "gone"


def _span(ms: int) -> str:
    """A span of time as people read it."""
    sign, seconds = ("-", -ms / 1000) if ms < 0 else ("", ms / 1000)
    if seconds < 120:
        return f"{sign}{seconds:.1f} s"
    return f"{sign}{seconds / 60:.1f} min"
