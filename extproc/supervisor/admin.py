"""The admin port over all workers: their answers, merged or passed on.

| path | answer |
|---|---|
| `/livez` | 200 while the supervisor can answer |
| `/readyz` | 200 when every worker is ready |
| `/state` | what is held (one worker's view of the shared ledger), and how each worker is |
| `/metrics` | the sum of the workers' metrics |
| `/recent` | the last decisions of all workers |
| `/loglevel` | PUT sets it in every worker |
| anything else | passed on to a worker |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from extproc.adapters.admin_http.guards import ADMIN_HEADER, guard
from extproc.supervisor.children import Child
from extproc.supervisor.merge import CONTENT_TYPE, merged_page, merged_recent

ANSWER_TIMEOUT_S = 2.0
LARGEST_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the admin port sees it: its process, where it serves, and where it is asked."""

    child: Child
    address: str
    admin_socket: Path


class SupervisorAdmin:
    """Serves from `start` to `stop`."""

    def __init__(
        self, host: str, port: int, workers: Sequence[WorkerView], details: Callable[[], Any]
    ) -> None:
        self._host = host
        self._port = port
        self._workers = workers
        self._details = details
        app = web.Application(client_max_size=1024, middlewares=[guard(frozenset())])
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/state", self._state)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/recent", self._recent)
        app.router.add_put("/loglevel", self._put_level)
        app.router.add_get("/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        self._clients: list[aiohttp.ClientSession] = []

    async def start(self) -> None:
        """Listen. Raises `OSError` where the address is taken."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        self._clients = [
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=str(worker.admin_socket)), timeout=timeout
            )
            for worker in self._workers
        ]
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=64).start()

    async def stop(self) -> None:
        """Close the port and every connection."""
        await self._runner.cleanup()
        for client in self._clients:
            await client.close()

    async def _livez(self, request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        del request
        answers = await self._ask_all("/readyz")
        checks = [
            {
                "check": worker.child.name,
                "ok": answer is not None and answer[0] == 200,
                "detail": _checks(answer),
            }
            for worker, answer in zip(self._workers, answers, strict=True)
        ]
        ready = all(check["ok"] for check in checks)
        return _json({"ready": ready, "checks": checks}, status=200 if ready else 503)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        answers = await self._ask_all(request.rel_url.path_qs)
        states = [orjson.loads(answer[1]) if answer and answer[0] == 200 else None for answer in answers]
        document: dict[str, Any] = dict(next((state for state in states if state is not None), {}))
        if "service" in document:
            document["service"] = document["service"] | {
                "open_streams": sum(state["service"]["open_streams"] for state in states if state)
            }
        document["workers"] = [
            {
                "worker": worker.child.name,
                "address": worker.address,
                "pid": worker.child.pid,
                "restarts": worker.child.restarts,
                "answering": state is not None,
                "open_streams": state["service"]["open_streams"] if state else None,
                "policy_version": state["policy"]["version"] if state else None,
            }
            for worker, state in zip(self._workers, states, strict=True)
        ]
        document["supervisor"] = self._details()
        return _json(document)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        del request
        answers = await self._ask_all("/metrics")
        pages = [answer[1].decode() for answer in answers if answer is not None and answer[0] == 200]
        page = await asyncio.to_thread(merged_page, pages, self._own_metrics())
        return web.Response(body=page, headers={"content-type": CONTENT_TYPE})

    async def _recent(self, request: web.Request) -> web.StreamResponse:
        del request
        answers = await self._ask_all("/recent")
        return _json(
            merged_recent([orjson.loads(answer[1]) for answer in answers if answer and answer[0] == 200])
        )

    async def _put_level(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        answers = await asyncio.gather(*(_put(client, "/loglevel", body) for client in self._clients))
        status, text = max((answer for answer in answers if answer is not None), default=(503, b"{}"))
        return web.Response(status=status, body=text, content_type="application/json")

    def _own_metrics(self) -> list[Metric]:
        alive = GaugeMetricFamily("extproc_workers", "Worker processes that run.")
        alive.add_metric([], sum(worker.child.is_alive for worker in self._workers))
        restarts = CounterMetricFamily(
            "extproc_worker_restarts", "Worker processes started again after a death."
        )
        restarts.add_metric([], sum(worker.child.restarts for worker in self._workers))
        return [alive, restarts]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        for client in self._clients:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with client.get(f"http://localhost{request.rel_url.path_qs}") as answer:
                    return web.Response(
                        status=answer.status,
                        body=await answer.content.read(LARGEST_ANSWER_BYTES),
                        headers={
                            name: value
                            for name, value in answer.headers.items()
                            if name.lower() in ("content-type", "content-security-policy", "cache-control")
                        },
                    )
        return _json({"error": "no worker answers"}, status=503)

    async def _ask_all(self, path: str) -> list[tuple[int, bytes] | None]:
        return await asyncio.gather(*(_ask(client, path) for client in self._clients))


def _checks(answer: tuple[int, bytes] | None) -> Any:
    """A worker's own list of conditions."""
    if answer is None or answer[0] not in (200, 503):
        return "not answering"
    return orjson.loads(answer[1])["checks"]


async def _ask(client: aiohttp.ClientSession, path: str) -> tuple[int, bytes] | None:
    """Status and body of one worker's answer; `None` when it does not answer."""
    try:
        async with client.get(f"http://localhost{path}") as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def _put(client: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes] | None:
    """Status and body of one worker's answer to a change; `None` when it does not answer."""
    try:
        async with client.put(f"http://localhost{path}", data=body, headers={ADMIN_HEADER: "1"}) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
