"""Headers: what an admitted request carries to its engine, and what of a request's own can be believed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from extproc.domain.admission import Plan
from extproc.domain.policy import Fallback, Lane, Replica
from extproc.domain.reservation import Granted

LANE_NAMES = frozenset(str(lane) for lane in Lane)

ADMISSION_HEADERS = "x-admission-"
"""What the names of all of them begin with, and of nothing that a client may send on to an engine."""

POOL_HEADER = "x-admission-pool"
FALLBACK_HEADER = "x-admission-fallback"
REPLICA_HEADER = "x-admission-replica"
LANE_HEADER = "x-admission-lane"
INPUT_TOKENS_HEADER = "x-admission-input-tokens"
RESERVED_TOKENS_HEADER = "x-admission-reserved-tokens"
DEADLINE_HEADER = "x-admission-deadline-ms"

ADMITTED_HEADERS = (
    POOL_HEADER,
    FALLBACK_HEADER,
    REPLICA_HEADER,
    LANE_HEADER,
    INPUT_TOKENS_HEADER,
    RESERVED_TOKENS_HEADER,
    DEADLINE_HEADER,
)
"""What an admitted request carries to the engine. A client's own copies never reach this service: the gateway
strips these names, so what is set below and what is stripped there is one list."""


def accounting_headers(
    planned: Plan, granted: Granted | None, left_ms: int, fallback: Fallback | None
) -> tuple[tuple[str, str], ...]:
    """What the engine, and Envoy's routes, are told about an admitted request."""
    reservation = planned.reservation
    headers = [
        (LANE_HEADER, str(planned.lane)),
        (POOL_HEADER, planned.pool.name),
        (INPUT_TOKENS_HEADER, str(reservation.input_tokens)),
        (RESERVED_TOKENS_HEADER, str(reservation.total_tokens)),
        (DEADLINE_HEADER, str(max(left_ms, 0))),
    ]
    if granted is not None:
        headers.insert(2, (REPLICA_HEADER, granted.replica))
    if fallback is not None:
        headers.append((FALLBACK_HEADER, fallback.label))
    return tuple(headers)


def foreign_headers(headers: Mapping[str, str], ours: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Names of ours that the client has used itself, as far as we do not overwrite them."""
    found = [name for name in headers if name.startswith(ADMISSION_HEADERS)]
    if not found:
        return ()
    overwritten = {name for name, _ in ours}
    return tuple(name for name in found if name not in overwritten)


def address_of(replicas: tuple[Replica, ...], granted: Granted | None) -> str | None:
    """Where the replica listens that was granted, if the policy says."""
    if granted is None:
        return None
    return next((replica.address for replica in replicas if replica.name == granted.replica), None)


def declared_lane(value: str | None) -> Lane | None:
    """A declared lane; anything else declares nothing."""
    return Lane(value) if value is not None and value in LANE_NAMES else None


def safe_request_id(value: str | None) -> str | None:
    """A request id that is safe to repeat: short and printable ASCII."""
    if value is None or not 0 < len(value) <= 128 or not value.isascii() or not value.isprintable():
        return None
    return value


def spread_of(request_id: str) -> int:
    """A number that differs between requests; the same for the same id, in every process."""
    return zlib.crc32(request_id.encode())
