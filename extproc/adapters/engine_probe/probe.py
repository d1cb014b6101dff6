"""One HTTP request for one engine's metrics page, and what it says of the engine.

Only a refused connection says that no engine is there. One that hangs, fails or tells something else may well be
serving: then its load is unknown, and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import aiohttp

from extproc.adapters.engine_probe.page import PageError, PageReader
from extproc.domain.policy import ProbePolicy
from extproc.domain.signals import EngineSignal, ProbeResult

PIECE_BYTES = 16 * 1024
"""What is read in one go before others get their turn: some ten microseconds of work."""

HEADERS = {"accept": "text/plain", "accept-encoding": "identity", "user-agent": "extproc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine that is asked, and by which rules. `models` are the names that it may serve under."""

    pool: str
    replica: str
    address: str
    rules: ProbePolicy
    models: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """How it ended; `problem` says why there is no signal, in words of ours."""

    result: ProbeResult
    signal: EngineSignal | None = None
    problem: str | None = None


def a_client() -> aiohttp.ClientSession:
    """What probes are sent with: a connection per engine is kept, and nothing else of an answer."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=1, keepalive_timeout=30),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers=HEADERS,
    )


async def probe(client: aiohttp.ClientSession, target: Target, now_ms: Callable[[], int]) -> Probed:
    """Ask once, within the time of the rules. Does not raise."""
    timeout = aiohttp.ClientTimeout(total=target.rules.timeout_ms / 1000)
    try:
        async with client.get(
            f"http://{target.address}{target.rules.path}", timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                return Probed(result=ProbeResult.ERROR, problem=f"it answers {answer.status}")
            if answer.headers.get("content-encoding", "identity") != "identity":
                return Probed(
                    result=ProbeResult.ERROR, problem="it answers in an encoding it was not asked for"
                )
            signal = await _read(answer.content, target.models, now_ms)
    except TimeoutError:
        return Probed(result=ProbeResult.TIMEOUT, problem="it does not answer in time")
    except PageError as error:
        return Probed(result=ProbeResult.ERROR, problem=str(error))
    except aiohttp.ClientConnectorError as error:
        if error.os_error.errno == errno.ECONNREFUSED:
            return Probed(result=ProbeResult.REFUSED, problem="nobody accepts connections")
        return Probed(result=ProbeResult.ERROR, problem="it cannot be reached")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Probed(result=ProbeResult.ERROR, problem=f"reading it failed: {type(error).__name__}")
    if signal is None:
        return Probed(result=ProbeResult.MISS, problem="it tells none of the numbers of an engine known here")
    return Probed(result=ProbeResult.OK, signal=signal)


async def _read(
    content: aiohttp.StreamReader, models: AbstractSet[str], now_ms: Callable[[], int]
) -> EngineSignal | None:
    reader = PageReader(models)
    async for piece in content.iter_chunked(PIECE_BYTES):
        reader.feed(piece)
        await asyncio.sleep(0)
    return reader.signal(now_ms())
