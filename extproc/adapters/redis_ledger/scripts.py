"""The Lua scripts: files of one verb each, joined into what the server runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from importlib import resources

_LUA = resources.files("extproc.adapters.redis_ledger") / "lua"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script's text, and the digest by which a server that has seen it knows it."""

    text: bytes
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "digest", hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()
        )


def _joined(*names: str) -> Script:
    return Script(text=b"\n".join((_LUA / f"{name}.lua").read_bytes() for name in names))


BATCH = _joined(
    "prelude",
    "fitting",
    "queue",
    "waiting",
    "reserve",
    "settle",
    "renew",
    "reassert",
    "reclaim",
    "snapshot",
    "batch",
)

KEYS = ("scopes", "leases", "dues", "holders", "waits", "expiries")


LAYOUT = 2
"""Of what is stored. Another layout has other keys: no worker finds books that it would misread."""


def keys_of(domain: str) -> tuple[bytes, ...]:
    """The keys of a ledger domain, in the order in which the scripts expect them (see `KEYS`).

    The braces make the domain's name a hash tag: all are in one slot of a cluster, and different domains
    spread over its nodes.
    """
    return tuple(f"extproc:{{{domain}}}:{LAYOUT}:{name}".encode() for name in KEYS)
