"""The real Chromium, headless, spoken to over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support import child

PROGRAM = Path("/usr/bin/chromium")
PATIENCE_S = 20


def require_chromium() -> None:
    """Skip where there is no browser; in CI, whose script installs it, fail."""
    if PROGRAM.exists():
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{PROGRAM} is missing: the CI script must install Debian's chromium")
    pytest.skip(f"{PROGRAM} is missing: install Debian's chromium to test the page")


class Page:
    """One tab. `errors` are what it printed as errors, and exceptions of its scripts."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, method: str, **params: Any) -> Any:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(answer, PATIENCE_S)

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Go to `url`, on a screen of this size and colour scheme."""
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await self.send(f"{domain}.enable")
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression is right now."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def press(self, key: str, code: int) -> None:
        """Press and release a key, such as ("Tab", 9)."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def tree(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader is told, in order."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored")
        ]

    async def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        size = await self.value(
            "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        """Stop listening to it."""
        self._reader.cancel()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._waiting.pop(said["id"])
                if not answer.done():
                    if "error" in said:
                        answer.set_exception(RuntimeError(str(said["error"])))
                    else:
                        answer.set_result(said["result"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(str(said["params"]["entry"]))


@asynccontextmanager
async def chromium_page() -> AsyncIterator[Page]:
    """A browser with one empty tab."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                PROGRAM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                url = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    page = Page(socket)
                    yield page
                    await page.close()
        finally:
            child.stop(process)


async def _port(file: Path, process: subprocess.Popen[str]) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while not (file.exists() and file.read_text().count("\n")):
            assert process.poll() is None, "Chromium ended while starting"
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
