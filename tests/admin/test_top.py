"""`extproc top`: the live page's numbers on a terminal."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from extproc.cli.top_view import BAR_CELLS, bar, span, spark, view
from tests.admin.port import open_port
from tests.admin.test_page import HOSTILE, busy_service
from tests.support import child


async def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "extproc", "top", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "140", "TERM": "xterm-256color"},
    )


async def test_once_prints_what_is_held() -> None:
    """Pools, lanes, refusals, tenants and decisions of a running service, as text."""
    async with open_port(busy_service()) as (_, server):
        done = await top("--once", "--admin", f"127.0.0.1:{server.port}")

    assert done.returncode == 0, done.stderr
    for words in (
        "serving   policy test   streams 7   leases 69   up 90 s",
        "queue full",
        "batch-translations-europe-west",
        HOSTILE,
        "26 s",
    ):
        assert words in done.stdout
    assert re.search(r"chat-0 .*█·+░░░ +81,000 +86,400 +41/64 +12,400 +3 wait, 8 run, KV 64 %", done.stdout)
    assert "gone, 3.2 s" in done.stdout
    assert "unknown" in done.stdout
    assert "bulk, suspended" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 140


async def test_an_address_where_nobody_answers_is_told() -> None:
    """The error names the address and the remedy, and the command fails."""
    (port,) = child.free_ports(1)
    done = await top("--once", "--admin", f"127.0.0.1:{port}")

    assert done.returncode == 1
    assert f"no answer from http://127.0.0.1:{port}/state" in done.stderr
    assert "is --admin its address?" in done.stderr
    wrong = await top("--once", "--admin", "9903")
    assert wrong.returncode == 2
    assert "is not HOST:PORT" in wrong.stderr


async def test_it_follows_the_service_on_a_real_terminal_until_it_is_interrupted() -> None:
    """On a terminal the numbers move, a service that goes is told, and Ctrl-C ends it and restores the screen."""
    service = busy_service()
    async with open_port(service) as (_, server):
        terminal, inside = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "extproc", "top", "--interval=0.2", f"--admin=127.0.0.1:{server.port}"],
            stdin=inside,
            stdout=inside,
            stderr=subprocess.PIPE,
            env=os.environ | {"COLUMNS": "140", "LINES": "60", "TERM": "xterm-256color"},
        )
        os.close(inside)
        try:
            await asyncio.to_thread(_read_until, terminal, "serving")
            service.policy_error = "line 3: unknown field"
            await asyncio.to_thread(_read_until, terminal, "policy not taken: line 3: unknown field")
            await server.stop()
            await asyncio.to_thread(_read_until, terminal, "is the service running")
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(_read_until, terminal, "\x1b[?1049l")
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
            assert process.stderr is not None
            process.stderr.close()


def _read_until(terminal: int, words: str) -> None:
    seen = ""
    deadline = time.monotonic() + 30
    while words not in seen:
        assert time.monotonic() < deadline, f"{words!r} did not appear in {seen[-500:]!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65_536).decode(errors="replace")


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_bar_is_always_as_long_as_it_is_wide(reserved: int, limit: int, guard: int) -> None:
    """Whatever is held, the bar fills its cells, and nothing held is no block."""
    drawn = bar(reserved, limit, guard).plain
    assert len(drawn) == BAR_CELLS
    assert ("█" in drawn) is (reserved > 0)


@given(st.lists(st.integers(0, 10**6), max_size=50))
def test_a_spark_shows_every_count(counts: list[int]) -> None:
    """One block per count; only nothing is blank."""
    drawn = spark(counts)
    assert len(drawn) == len(counts)
    assert [char != " " for char in drawn] == [count > 0 for count in counts]


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (4_200, "4.2 s"),
        (90_000, "90 s"),
        (600_000, "10 min"),
        (90_000_000, "25 h"),
    ],
)
def test_durations_are_short(milliseconds: int, words: str) -> None:
    """A duration is shown in its largest sensible unit."""
    assert span(milliseconds) == words


def test_names_are_never_markup_or_control_sequences() -> None:
    """A name with terminal codes or markup is shown as it is, harmless."""
    console = Console(width=140, record=True, file=io.StringIO())
    state = {
        "service": {"draining": False, "open_streams": 0, "uptime_s": 1, "version": "1"},
        "policy": {"version": "[bold]x[/bold]\x1b[2J", "last_reload_error": None},
        "pools": [],
        "tenants": [],
    }
    console.print(view(state, {}))
    shown = console.export_text()
    assert "[bold]x[/bold]" in shown
    assert "\x1b" not in shown


def test_a_service_without_balances_is_shown_without_them() -> None:
    """While the ledger does not answer, the rest is shown, and that it does not."""
    console = Console(width=140, record=True, file=io.StringIO())
    state = {
        "service": {"draining": False, "open_streams": 3, "uptime_s": 1, "version": "1"},
        "policy": {"version": "p", "last_reload_error": None},
        "ledger_error": "the store refuses connections",
    }
    console.print(view(state, {"decisions": [], "history": {}}))
    assert "ledger not answering" in console.export_text(clear=False)
    assert "the store refuses connections" in console.export_text()
