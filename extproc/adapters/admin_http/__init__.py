"""The admin port: is it alive, is it ready, what does it hold, what does it count."""

from __future__ import annotations

from extproc.adapters.admin_http.server import AdminServer
from extproc.adapters.admin_http.sources import ServiceStatus, Sources

__all__ = ["AdminServer", "ServiceStatus", "Sources"]
