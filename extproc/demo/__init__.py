"""`extproc demo`: the whole thing in one minute, with a real Envoy, against simulated GPU pools."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from extproc.demo.stage import ACME_KEY, DemoFailed, Stage, staged
from extproc.demo.visits import Told, play

IDLE_TIMEOUT_S = 10

__all__ = ["DemoFailed", "run"]


async def run(console: Console, *, keep: bool) -> bool:
    """Play the demo; whether every counter came back to zero. Raises `DemoFailed`."""

    def progress(text: str) -> None:
        console.print(f"[dim]… {text}[/dim]")

    async with staged(progress) as stage:
        console.print(_table(await play(stage, progress)))
        idle, state = await _idle(stage)
        console.print(_balances(state))
        console.print(
            "Every counter is back to zero." if idle else "[bold red]Something is still held.[/bold red]"
        )
        console.print(
            "\nTry it by hand:" if keep else "\nWith --keep it stays up, and you can try it by hand:"
        )
        console.print(
            f"curl -i {stage.gateway}/v1/chat/completions -H 'authorization: Bearer {ACME_KEY}' "
            "-H 'content-type: application/json' "
            """-d '{"model": "demo-model", "messages": [{"role": "user", "content": "Hello!"}]}'""",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
        if keep:
            console.print(
                f"\nService: {stage.admin}/state   Envoy: {stage.envoy_admin}   Policy: {stage.policy}"
            )
            console.print("Ctrl-C ends it.")
            await asyncio.Event().wait()
        return idle


def _table(told: list[Told]) -> Table:
    table = Table(title="What each client was told", box=SIMPLE_HEAD, padding=(0, 1))
    for column in (
        "request",
        "in + out",
        "lane",
        "decision",
        "status",
        "reason",
        "retry after",
        "pool",
    ):
        table.add_column(column, overflow="fold")
    for one in told:
        color = "green" if one.decision == "admitted" else "yellow"
        table.add_row(
            one.name,
            one.tokens,
            one.lane,
            f"[{color}]{one.decision}[/{color}]",
            str(one.status),
            one.reason,
            one.retry_after,
            one.pool,
        )
    return table


async def _idle(stage: Stage) -> tuple[bool, dict[str, Any]]:
    """Wait until nothing is held; the last state either way."""
    async with aiohttp.ClientSession() as client:
        state: dict[str, Any] = {}
        for _ in range(IDLE_TIMEOUT_S * 10):
            async with client.get(f"{stage.admin}/state") as answer:
                state = await answer.json()
            if state["idle"] and state["service"]["open_streams"] == 0:
                return True, state
            await asyncio.sleep(0.1)
        return False, state


def _balances(state: dict[str, Any]) -> Table:
    table = Table(title="What is held now", box=SIMPLE_HEAD)
    for column in ("pool", "replica", "ceiling tokens", "reserved tokens", "requests in flight"):
        table.add_column(column, no_wrap=True)
    for pool in state["pools"]:
        for replica in pool["replicas"]:
            table.add_row(
                pool["pool"],
                replica["replica"],
                f"{replica['ceiling_tokens']:,}",
                str(replica["reserved_tokens"]),
                str(replica["requests"]),
            )
    return table
