"""The live page's files, as they ship with the package: read once, served from memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file of the page."""

    content_type: str
    body: bytes


_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def page_assets() -> Mapping[str, Asset]:
    """The files by the path under which they are served."""
    folder = resources.files("extproc.adapters.admin_http").joinpath("page")
    return {
        path: Asset(content_type=content_type, body=folder.joinpath(name).read_bytes())
        for path, (name, content_type) in _FILES.items()
    }
