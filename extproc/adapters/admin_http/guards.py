"""Who may talk to the admin port, and what every answer of it says to browsers.

The port has no login: reaching it is the permission. So what has to be kept out is a web page that makes
an operator's own browser reach it. A page of another site that re-binds its name to our address still sends
that name as `Host`, so only addresses, `localhost` and names that the operator listed are answered. A form or
a script of another site can send a request but not a header of its own choosing (that takes a pre-flight
that nobody here allows), so whatever changes something wants `x-extproc-admin`.
"""

from __future__ import annotations

import ipaddress

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

ADMIN_HEADER = "x-extproc-admin"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SAFE_METHODS = frozenset({"GET", "HEAD"})


def is_known_host(host: str, allowed_hosts: frozenset[str]) -> bool:
    """Whether a request's `Host` is an address, `localhost`, or one of `allowed_hosts`."""
    name = _without_port(host).lower().rstrip(".")
    if name == "localhost" or name in allowed_hosts:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def guard(allowed_hosts: frozenset[str]) -> Middleware:
    """The middleware that applies all of the above."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check(request, allowed_hosts)
            return _hardened(await handler(request))
        except web.HTTPException as refused:
            _hardened(refused)
            raise

    return guarded


def _hardened(response: web.StreamResponse) -> web.StreamResponse:
    """Headers that keep browsers from guessing, caching, framing, or loading anything from elsewhere."""
    headers = response.headers
    headers[hdrs.X_CONTENT_TYPE_OPTIONS] = "nosniff"
    headers["content-security-policy"] = CONTENT_SECURITY_POLICY
    headers["referrer-policy"] = "no-referrer"
    headers["cross-origin-resource-policy"] = "same-origin"
    headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    return response


def _check(request: web.Request, allowed_hosts: frozenset[str]) -> None:
    if not is_known_host(request.headers.get(hdrs.HOST, ""), allowed_hosts):
        raise web.HTTPMisdirectedRequest(
            text="This host name is not known here; use an address, or add the name to the allowed hosts.\n"
        )
    if request.method in SAFE_METHODS:
        return
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise web.HTTPForbidden(text="Changes are not taken from other sites' pages.\n")
    if request.headers.get(ADMIN_HEADER) is None:
        raise web.HTTPForbidden(text=f"Changes need the header {ADMIN_HEADER}: 1.\n")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
