"""The live page, in the real Chromium: what people see, read aloud, and reach with the keyboard."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extproc.adapters.admin_http.assets import page_assets
from extproc.domain.breaker import BreakerState
from extproc.domain.policy import Lane
from extproc.domain.snapshot import LaneState, ReplicaState, Snapshot, TenantState
from extproc.ports import LedgerFault
from tests.admin.port import FakeService, an_engine, open_port, some_load
from tests.builders import a_lane, a_policy
from tests.support.chromium import Page, chromium_page, require_chromium

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def _browser() -> None:
    require_chromium()


def a_replica(name: str, reserved_tokens: int, requests: int, **changes: Any) -> ReplicaState:
    fields: dict[str, Any] = {
        "pool": "chat",
        "replica": name,
        "ceiling_tokens": 96_000,
        "guard_band_tokens": 9_600,
        "reserved_tokens": reserved_tokens,
        "requests": requests,
        "request_cap": 64,
        "prefill_backlog_tokens": 0,
    }
    return ReplicaState(**(fields | changes))


def busy_snapshot() -> Snapshot:
    """Two pools under load: one replica nearly full, bulk waiting."""
    return Snapshot(
        at_ms=1_000,
        replicas=(
            a_replica("chat-0", 81_000, 41, prefill_backlog_tokens=12_400),
            a_replica("chat-1", 46_200, 22),
            a_replica("chat-2", 0, 0),
            a_replica(
                "documents-0",
                228_000,
                6,
                pool="documents",
                ceiling_tokens=256_000,
                guard_band_tokens=25_600,
                request_cap=8,
                prefill_backlog_tokens=61_000,
            ),
        ),
        lanes=(
            LaneState(
                pool="chat", lane=Lane.INTERACTIVE, limit_tokens=259_200, reserved_tokens=108_200, requests=58
            ),
            LaneState(
                pool="chat",
                lane=Lane.BULK,
                limit_tokens=64_800,
                reserved_tokens=19_000,
                requests=5,
                queued_requests=12,
                queued_input_tokens=64_000,
                oldest_queued_ms=4_200,
            ),
            LaneState(
                pool="documents",
                lane=Lane.BULK,
                limit_tokens=230_400,
                reserved_tokens=228_000,
                requests=6,
                queued_requests=3,
                queued_input_tokens=91_000,
                oldest_queued_ms=26_000,
            ),
        ),
        tenants=tuple(
            TenantState(
                tenant=name,
                tier="gold",
                inflight_tokens=held,
                inflight_requests=requests,
                tokens_remaining=None,
                requests_remaining=None,
            )
            for name, held, requests in (
                ("acme", 241_000, 31),
                ("batch-translations-europe-west", 80_200, 9),
                (HOSTILE, 30_000, 20),
                ("zeta", 4_000, 9),
                ("idle-tenant", 0, 0),
            )
        ),
        leases=69,
        orphans=0,
        unbooked=2,
    )


def decisions(count: int = 25) -> Sequence[Mapping[str, Any]]:
    """The last decisions; every fourth a refusal."""
    return [
        {
            "at_ms": 1_767_225_600_000 - number * 700,
            "decision": "refused" if number % 4 == 1 else "admitted",
            "reason": "queue_full" if number % 4 == 1 else None,
            "tenant": HOSTILE if number == 2 else "acme",
            "model": "llama-3.1-70b-instruct",
            "lane": "interactive",
            "pool": "chat",
            "replica": None if number % 4 == 1 else "chat-0",
            "input_tokens": 1_840 + number,
            "output_tokens": 512,
            "decided_us": 860 + 40 * number,
            "retry_after_ms": 2_300 if number % 4 == 1 else None,
            "reservation": f"lease-{number}",
        }
        for number in range(count)
    ]


def history() -> Mapping[str, Any]:
    """Ten minutes with a burst of refusals near their end."""
    return {
        "slot_s": 15,
        "counts": {
            "admitted": [40 + (number * 7) % 13 for number in range(40)],
            "abandoned": [number % 3 == 0 for number in range(40)],
            "queue_full": [0] * 30 + [2, 9, 24, 31, 18, 7, 3, 1, 0, 0],
            "tenant_rate": [0, 3, 1, 0] * 10,
            "context_limit": [0] * 40,
        },
        "refusals": ["context_limit", "queue_full", "tenant_rate"],
    }


def busy_service() -> FakeService:
    lanes = {Lane.BULK: a_lane(Lane.BULK, residence_ms=30_000)}
    gone = {"signal": None, "breaker": BreakerState.OPEN, "breaker_wait_ms": 3_200}
    load = (
        *some_load("chat", an_engine("chat", "chat-0"), an_engine("chat", "chat-1", **gone)),
        *some_load("documents", an_engine("documents", "documents-0", signal=None, age_ms=65_000)),
    )
    return FakeService(
        held=busy_snapshot(),
        decisions=decisions(),
        counts=history(),
        rules=a_policy(lanes=lanes),
        load=load,
    )


async def shown(page: Page, url: str, **screen: Any) -> None:
    """Open the page and wait for its first numbers."""
    await page.open(url, **screen)
    await page.until("document.querySelectorAll('#recent tr').length > 0")


def shots(tmp_path: Path) -> Path:
    """Where screenshots go: kept where somebody wants to look at them."""
    return Path(os.environ.get("PAGE_SHOTS", str(tmp_path)))


@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1280, 900, False), (1280, 900, True), (390, 844, False), (390, 844, True)]
)
async def test_the_page_shows_what_is_held_on_every_screen(
    width: int, height: int, dark: bool, tmp_path: Path
) -> None:
    """Pools, lanes, refusals, tenants and decisions, without overflow, on a desk and on a phone, day and night."""
    async with open_port(busy_service()) as (_, server), chromium_page() as page:
        await shown(page, f"http://127.0.0.1:{server.port}/", width=width, height=height, dark=dark)
        text = await page.value("document.body.innerText")
        overflow = await page.value(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        widths = await page.value(
            "[...document.querySelectorAll('.replica .bar')].map(bar => [...bar.children].map(one => "
            "Math.round(1000 * one.getBoundingClientRect().width / bar.clientWidth)))"
        )
        ground = await page.value("getComputedStyle(document.body).backgroundColor")
        await page.screenshot(shots(tmp_path) / f"page-{width}-{'dark' if dark else 'light'}.png")

    assert overflow <= 0
    assert "81,000 of 86,400 tokens" in text
    assert "5,400 free, 9,600 guard" in text
    assert "63 of 192 requests, 12 waiting" in text
    assert "queue full" in text
    assert "Engine: 3 waiting, 8 running, KV cache 64 %" in text
    assert "Engine does not answer: no requests for 3.2 s" in text
    assert "Engine has told no load for 65 s" in text
    assert "bulk, suspended" in text
    assert HOSTILE in text
    assert "4 known" not in text
    assert "5 known" in text
    # Reserved, free and guard band fill the first bar in proportion: 81,000, 5,400 and 9,600 of 96,000.
    for actual, expected in zip(widths[0], (844, 56, 100), strict=True):
        assert abs(actual - expected) <= 6
    assert (sum(int(part) for part in ground[4:-1].split(",")) < 200) is dark
    assert page.errors == []


async def test_the_numbers_move_and_the_focus_stays() -> None:
    """A poll changes numbers in place: what has the focus keeps it, and what is gone goes."""
    service = busy_service()
    async with open_port(service) as (_, server), chromium_page() as page:
        await shown(page, f"http://127.0.0.1:{server.port}/")
        await page.value(
            "document.querySelectorAll('.scroll')[1].focus(), window.kept = document.activeElement"
        )
        first, *others = service.held.replicas
        service.held = replace(service.held, replicas=(replace(first, reserved_tokens=12_345), *others[:1]))
        service.decisions = decisions(3)
        await page.until("document.body.innerText.includes('12,345 of 86,400')")

        assert await page.value("document.activeElement === window.kept")
        assert await page.value("document.querySelectorAll('.replica').length") == 2
        assert await page.value("document.querySelectorAll('#recent tr').length") == 3
        assert page.errors == []


async def test_it_can_be_used_with_the_keyboard_alone() -> None:
    """Tab reaches the skip link, the pause button, every table and every link, and pausing stops the numbers."""
    service = busy_service()
    async with open_port(service) as (_, server), chromium_page() as page:
        await shown(page, f"http://127.0.0.1:{server.port}/")
        reached = []
        for _ in range(11):
            await page.press("Tab", 9)
            reached.append(
                await page.value(
                    "document.activeElement.getAttribute('aria-labelledby') || document.activeElement.innerText"
                )
            )
            if reached[-1] == "Pause":
                await page.press(" ", 32)
        assert reached == [
            "Skip to content",
            "Pause",
            "lanes-title",
            "refusals-title",
            "tenants-title",
            "recent-title",
            "state",
            "policy",
            "metrics",
            "readiness",
            reached[-1],
        ]
        assert await page.value("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        assert await page.value("document.getElementById('health-text').innerText") == "Paused"
        asked = service.asked
        await asyncio.sleep(2.5)
        assert service.asked == asked


async def test_a_screen_reader_is_told_everything_that_is_drawn() -> None:
    """Bars are meters with a name and a value in words, graphs have a text, tables have headers, parts a heading."""
    async with open_port(busy_service()) as (_, server), chromium_page() as page:
        await shown(page, f"http://127.0.0.1:{server.port}/")
        tree = await page.tree()
        words = await page.value(
            "[...document.querySelectorAll('[role=meter]')].map(bar => bar.getAttribute('aria-valuetext'))"
        )
        headings = await page.value(
            "[...document.querySelectorAll('h1, h2, h3')].map(heading => heading.innerText)"
        )

    assert ("meter", "chat, chat-0: reserved tokens") in tree
    assert "81,000 of 86,400 tokens" in words
    assert ("image", "At most 31 in 15 seconds") in tree
    assert {name for role, name in tree if role == "heading"} == set(headings)
    assert headings == [
        *("Admission control", "Pools", "chat", "documents"),
        *("Lanes", "Decisions", "Tenants", "Last decisions"),
    ]
    roles = {role for role, _ in tree}
    assert {"banner", "main", "contentinfo", "status", "columnheader", "rowheader", "navigation"} <= roles
    unnamed = [role for role, name in tree if role in ("button", "link", "meter", "region") and not name]
    assert unnamed == []


async def test_text_is_readable_in_both_schemes() -> None:
    """Every text has a contrast of at least 4.5 to what it stands on, by day and by night."""
    async with open_port(busy_service()) as (_, server), chromium_page() as page:
        for dark in (False, True):
            await shown(page, f"http://127.0.0.1:{server.port}/", dark=dark)
            poor = await page.value(CONTRAST)
            assert poor == []


CONTRAST = """
(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(node.tagName + " " + node.className + ": " + node.textContent);
  }
  return poor;
})()
"""


async def test_trouble_is_told_in_words() -> None:
    """A ledger that is down, a policy that was not taken and a service that is gone are each said, and recovered."""
    service = busy_service()
    async with chromium_page() as page:
        async with open_port(service) as (_, server):
            url = f"http://127.0.0.1:{server.port}/"
            await shown(page, url)
            health = "document.getElementById('health-text').innerText"
            assert await page.value(health) == "Serving"
            service.fault = LedgerFault("the store refuses connections")
            service.policy_error = "policy.yaml, line 3: pools.chat: unknown field"
            await page.until(f"{health} === 'Ledger not answering'")
            notice = await page.value("document.getElementById('notice').innerText")
            assert "the store refuses connections" in notice
            assert "pools.chat: unknown field" in notice
            assert await page.value("document.querySelectorAll('.replica').length") == 4
            service.fault = service.policy_error = None
            await page.until(f"{health} === 'Serving'")
            assert await page.value("document.getElementById('notice').hidden")
        await page.until(f"{health} === 'No answer; trying again'")


async def test_an_empty_service_says_so() -> None:
    """Before the first request the page says that there is nothing yet, in every part."""
    service = FakeService(held=replace(busy_snapshot(), tenants=(), lanes=()))
    async with open_port(service) as (_, server), chromium_page() as page:
        await page.open(f"http://127.0.0.1:{server.port}/")
        await page.until("document.querySelectorAll('.replica').length > 0")
        text = await page.value("document.body.innerText")
        for words in ("No requests in the last ten minutes.", "Nothing is in flight.", "No decisions yet."):
            assert words in text
        assert page.errors == []


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """No file of the page names another host, and none has inline script or style that the policy would block."""
    for path, asset in page_assets().items():
        text = asset.body.decode()
        for scheme in ("https://", "//cdn", "http://"):
            assert scheme not in text.replace("http://www.w3.org/2000/svg", ""), path
        if path == "/":
            assert "<style" not in text
            assert " style=" not in text
            assert "onclick" not in text
