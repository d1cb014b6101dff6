"""Headers: what an admitted request carries to its engine, and what of a request's own can be believed."""

from __future__ import annotations

import zlib

from extproc.domain.admission import Plan
from extproc.domain.policy import Fallback, Lane, Replica
from extproc.domain.reservation import Granted

LANE_NAMES = frozenset(str(lane) for lane in Lane)
POOL_HEADER = "x-admission-pool"
FALLBACK_HEADER = "x-admission-fallback"
ADMISSION_HEADERS = "x-admission-"


def accounting_headers(
    planned: Plan, granted: Granted | None, left_ms: int, fallback: Fallback | None
) -> tuple[tuple[str, str], ...]:
    """What the engine, and Envoy's routes, are told about an admitted request."""
    reservation = planned.reservation
    headers = [
        ("x-admission-lane", str(planned.lane)),
        (POOL_HEADER, planned.pool.name),
        ("x-admission-input-tokens", str(reservation.input_tokens)),
        ("x-admission-reserved-tokens", str(reservation.total_tokens)),
        ("x-admission-deadline-ms", str(max(left_ms, 0))),
    ]
    if granted is not None:
        headers.insert(2, ("x-admission-replica", granted.replica))
    if fallback is not None:
        headers.append((FALLBACK_HEADER, fallback.label))
    return tuple(headers)


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
