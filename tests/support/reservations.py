"""Small reservations for tests of the ledger: everything roomy unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from extproc.domain.policy import Lane, Pool, Quota, Replica
from extproc.domain.reservation import Reservation

NO_QUOTA = Quota(
    tokens_per_minute=None,
    burst_tokens=None,
    requests_per_minute=None,
    inflight_tokens=None,
    inflight_requests=None,
)


def quota(**limits: int | None) -> Quota:
    """A quota with only the named limits; a rate's burst is one minute's worth unless it is given."""
    fields: dict[str, int | None] = {
        "tokens_per_minute": None,
        "requests_per_minute": None,
        "inflight_tokens": None,
        "inflight_requests": None,
        **limits,
    }
    fields.setdefault("burst_tokens", fields["tokens_per_minute"])
    return Quota(**fields)


def pool(*ceilings_tokens: int, **changes: Any) -> Pool:
    """A pool `chat` with a replica `a`, `b`, … for each ceiling; no guard band, and prefill 1 token per ms."""
    fields: dict[str, Any] = {
        "name": "chat",
        "cluster": "engines",
        "replicas": tuple(
            Replica(name=chr(ord("a") + position), ceiling_tokens=ceiling)
            for position, ceiling in enumerate(ceilings_tokens)
        ),
        "guard_band_permille": 0,
        "request_cap": 1_000,
        "prefill_tokens_per_s": 1_000,
        "decode_tokens_per_s": 50,
        "prefill_window_ms": 1_000_000,
    }
    return Pool(**{**fields, **changes})


ROOMY = pool(1_000_000)


def reservation(lease_id: str, *, total_tokens: int = 100, **changes: Any) -> Reservation:
    """A reservation of `total_tokens`, one of them input, in a pool that has room for it."""
    input_tokens = changes.get("input_tokens", 1)
    fields: dict[str, Any] = {
        "lease_id": lease_id,
        "tenant": "acme",
        "quota": NO_QUOTA,
        "lane": Lane.INTERACTIVE,
        "lane_limit_tokens": 1_000_000_000,
        "pool": ROOMY,
        "input_tokens": input_tokens,
        "output_tokens": total_tokens - input_tokens,
        "work_units": total_tokens,
        "deadline_in_ms": 1_000_000_000,
        "residence_ms": 10_000,
        "policy_version": "v1",
    }
    return Reservation(**{**fields, **changes})
