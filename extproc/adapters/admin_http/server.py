"""The admin port: a small HTTP server for operators, probes and scrapers, on the service's own event loop.

| path | method | answer |
|---|---|---|
| `/` | GET | the live page: what is happening now, for people |
| `/livez` | GET | 200 while the process can answer at all |
| `/readyz` | GET | 200 when every named check holds, else 503; JSON either way |
| `/state` | GET | what is held beside what may be held, per pool, replica, lane and tenant |
| `/policy` | GET | the policy in force, without key digests |
| `/metrics` | GET | Prometheus text or OpenMetrics |
| `/recent` | GET | the last decisions, and refusals by reason over the last minutes |
| `/loglevel` | GET, PUT | the level of the service's log: `{"level": "debug"}` |

It shares the loop with every request in flight, so each answer is built in slices, questions to the ledger
are shared among all who ask, and the number of requests that are answered at the same time is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from extproc.adapters.admin_http.assets import Asset, page_assets
from extproc.adapters.admin_http.guards import guard
from extproc.adapters.admin_http.sharing import Shared
from extproc.adapters.admin_http.sources import Sources
from extproc.adapters.admin_http.views import policy_document, state_document
from extproc.domain.snapshot import Snapshot
from extproc.ports import LedgerFault

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")
MOST_TENANTS = 50
"""Tenants that `/state` lists unless it is asked for more, up to `TENANTS_LIMIT`."""
TENANTS_LIMIT = 1_000
MOST_AT_ONCE = 32
"""Requests that are answered at the same time; further ones are told to come back."""
SNAPSHOT_AGE_S = 0.25
SNAPSHOT_TIMEOUT_S = 1.0
BODY_BYTES = 1_024
STOP_TIMEOUT_S = 0.5


class AdminServer:
    """Serves the admin port from `start` to `stop`.

    `host` is an address of this machine, or `unix:/path`; it should be a loopback one unless a scraper or a probe
    has to come from elsewhere. `port` 0 lets the kernel choose. `allowed_hosts` are names, beside addresses and
    `localhost`, under which browsers may call it. `logger` is the one whose level `/loglevel` sets.
    """

    def __init__(
        self,
        *,
        sources: Sources,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed_hosts: frozenset[str] = frozenset(),
        logger: str = "extproc",
    ) -> None:
        self._sources = sources
        self._host = host
        self._port = port
        self._logger = logging.getLogger(logger)
        self._snapshot: Shared[Snapshot] = Shared(
            sources.snapshot, max_age_s=SNAPSHOT_AGE_S, timeout_s=SNAPSHOT_TIMEOUT_S
        )
        self._policy: tuple[str, bytes] | None = None
        self._busy = 0
        app = web.Application(
            middlewares=[guard(frozenset(name.lower() for name in allowed_hosts)), self._bounded],
            client_max_size=BODY_BYTES,
        )
        for path, asset in page_assets().items():
            app.router.add_get(path, _serve(asset))
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/state", self._state)
        app.router.add_get("/policy", self._policy_in_force)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/recent", self._recent)
        app.router.add_get("/loglevel", self._get_level)
        app.router.add_put("/loglevel", self._put_level)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=STOP_TIMEOUT_S, keepalive_timeout=15
        )

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        return self._port

    async def start(self) -> None:
        """Listen. Raises `OSError` where the address is taken or not this machine's."""
        await self._runner.setup()
        site: web.BaseSite
        if self._host.startswith("unix:"):
            site = web.UnixSite(self._runner, self._host.removeprefix("unix:"), backlog=64)
        else:
            site = web.TCPSite(self._runner, self._host, self._port, backlog=64)
        try:
            await site.start()
        except BaseException:
            await self._runner.cleanup()
            raise
        if isinstance(site, web.TCPSite):
            self._port = int(self._runner.addresses[0][1])
        log.info("admin port open", extra={"host": self._host, "port": self._port})

    async def stop(self) -> None:
        """Close the port and every connection to it. Harmless when repeated."""
        await self._runner.cleanup()
        await self._snapshot.close()

    # What is asked.

    async def _livez(self, request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        del request
        checks = self._sources.ready_checks()
        ready = all(missing is None for missing in checks.values())
        listed = [
            {"check": name, "ok": missing is None, "detail": missing} for name, missing in checks.items()
        ]
        return _json({"ready": ready, "checks": listed}, status=200 if ready else 503)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        most_tenants = _whole_number(request, "tenants", default=MOST_TENANTS, most=TENANTS_LIMIT)
        snapshot: Snapshot | None = None
        ledger_error = None
        try:
            snapshot = await self._snapshot.ask()
        except LedgerFault as fault:
            ledger_error = str(fault)
        except TimeoutError:
            ledger_error = f"the ledger did not answer within {SNAPSHOT_TIMEOUT_S} s"
        body = await state_document(
            self._sources.status(),
            self._sources.policy(),
            snapshot,
            ledger_error,
            load=self._sources.load(),
            most_tenants=most_tenants,
            tenant=request.query.get("tenant"),
        )
        return _json_bytes(body)

    async def _policy_in_force(self, request: web.Request) -> web.StreamResponse:
        del request
        policy = self._sources.policy()
        if self._policy is None or self._policy[0] != policy.version:
            self._policy = (policy.version, await policy_document(policy))
        return _json_bytes(self._policy[1])

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        page, content_type = await self._sources.metrics(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=page, headers={hdrs.CONTENT_TYPE: content_type})

    async def _recent(self, request: web.Request) -> web.StreamResponse:
        del request
        return _json({"decisions": list(self._sources.recent()), "history": self._sources.history()})

    async def _get_level(self, request: web.Request) -> web.StreamResponse:
        del request
        return _json({"level": logging.getLevelName(self._logger.getEffectiveLevel()).lower()})

    async def _put_level(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = orjson.loads(await request.read())
        except orjson.JSONDecodeError:
            asked = None
        level = asked.get("level") if isinstance(asked, dict) else None
        if level not in LEVELS:
            wanted = ", ".join(f'"{name}"' for name in LEVELS)
            raise web.HTTPBadRequest(text=f'Send {{"level": LEVEL}} with one of {wanted}.\n')
        self._logger.setLevel(level.upper())
        log.warning("log level changed", extra={"level": level})
        return await self._get_level(request)

    @property
    def _bounded(self) -> Middleware:
        @web.middleware
        async def bounded(request: web.Request, handler: Handler) -> web.StreamResponse:
            # Probes are never turned away: whether the process lives must not depend on who else asks.
            if self._busy >= MOST_AT_ONCE and request.path not in ("/livez", "/readyz"):
                raise web.HTTPServiceUnavailable(
                    text="Too many questions at once; ask again.\n", headers={hdrs.RETRY_AFTER: "1"}
                )
            self._busy += 1
            try:
                return await handler(request)
            except (web.HTTPException, asyncio.CancelledError):
                raise
            except Exception as fault:
                # Only pages that exist get here, so this is one of their names and not what somebody typed.
                log.exception("admin request failed", extra={"page": request.path})
                raise web.HTTPInternalServerError(text="This question failed; see the log.\n") from fault
            finally:
                self._busy -= 1

        return bounded


def _serve(asset: Asset) -> Handler:
    async def serve(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(body=asset.body, content_type=asset.content_type, charset="utf-8")

    return serve


def _whole_number(request: web.Request, name: str, *, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) > most:
        raise web.HTTPBadRequest(text=f"{name} must be a whole number from 0 to {most}.\n")
    return int(text)


def _json(document: Any, *, status: int = 200) -> web.Response:
    return _json_bytes(orjson.dumps(document), status=status)


def _json_bytes(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
