"""What the admin port asks of the service, as questions. Whoever composes the service answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.domain.load import PoolLoad, ReplicaLoad
from extproc.domain.policy import Policy
from extproc.domain.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """How the process is. Times are milliseconds since the epoch; `policy_error` is the last reload's.

    `details` are whatever other parts want to show: short names, and values that JSON knows. Nothing in it
    may be a prompt, a credential or anything else that a client typed.
    """

    version: str
    started_at_ms: int
    now_ms: int
    open_streams: int
    draining: bool
    policy_version: str
    policy_loaded_at_ms: int
    policy_error: str | None = None
    ledger: str = "memory"
    details: Mapping[str, Any] = field(default_factory=dict)


def nothing_recent() -> Sequence[Mapping[str, Any]]:
    """The answer of a service that keeps no recent decisions."""
    return ()


def nothing_known() -> Iterable[PoolLoad | ReplicaLoad]:
    """The answer of a service that asks no engine."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """One callable per question. All but `snapshot` and `metrics` answer at once.

    `ready_checks` names every condition of readiness; its value is `None` where the condition holds, else
    what is missing. `snapshot` may raise `LedgerFault`. `metrics` gets the scraper's Accept header and answers
    a page and its content type. `recent` are the last decisions, newest first, as JSON objects;
    `history` counts them over the last minutes. `load` is what is known of the engines.
    """

    ready_checks: Callable[[], Mapping[str, str | None]]
    status: Callable[[], ServiceStatus]
    policy: Callable[[], Policy]
    snapshot: Callable[[], Awaitable[Snapshot]]
    metrics: Callable[[str], Awaitable[tuple[bytes, str]]]
    recent: Callable[[], Sequence[Mapping[str, Any]]] = nothing_recent
    history: Callable[[], Mapping[str, Any]] = dict
    load: Callable[[], Iterable[PoolLoad | ReplicaLoad]] = nothing_known
