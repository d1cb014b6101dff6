"""One worker's share of every limit: what it may grant alone while nobody can be asked."""

from __future__ import annotations

from dataclasses import replace

from extproc.domain.policy import Pool, Quota
from extproc.domain.reservation import Reservation


def share_of(reservation: Reservation, workers: int) -> Reservation | None:
    """The same reservation against 1/`workers` of every limit, rounded down.

    The shares of all workers together never exceed a limit, and nobody waits for room in one. `None` when the
    reservation does not fit into a share at all, or a limit is too small to be shared: alone, this worker can
    never grant it.
    """
    if workers <= 1:
        return replace(reservation, hold_ms=0)
    quota = _quota_share(reservation.quota, workers)
    pool = _pool_share(reservation.pool, workers)
    lane_limit_tokens = reservation.lane_limit_tokens // workers
    total_tokens = reservation.total_tokens
    if quota is None or pool is None or total_tokens > min(lane_limit_tokens, pool.largest_usable_tokens):
        return None
    if quota.inflight_tokens is not None and total_tokens > quota.inflight_tokens:
        return None
    if quota.burst_tokens is not None and reservation.work_units > quota.burst_tokens:
        return None
    return replace(reservation, quota=quota, pool=pool, lane_limit_tokens=lane_limit_tokens, hold_ms=0)


def _quota_share(quota: Quota, workers: int) -> Quota | None:
    shares: dict[str, int | None] = {}
    for name in Quota.__dataclass_fields__:
        limit: int | None = getattr(quota, name)
        shares[name] = None if limit is None else limit // workers
        if shares[name] == 0:
            return None
    return Quota(**shares)


def _pool_share(pool: Pool, workers: int) -> Pool | None:
    request_cap, prefill_window_ms = pool.request_cap // workers, pool.prefill_window_ms // workers
    if request_cap == 0 or prefill_window_ms == 0:
        return None
    # The guard band is taken off first: shared out, its rounding would hand some of it to the workers.
    replicas = tuple(
        replace(replica, ceiling_tokens=pool.usable_tokens(replica) // workers) for replica in pool.replicas
    )
    return replace(
        pool,
        replicas=replicas,
        guard_band_permille=0,
        request_cap=request_cap,
        prefill_window_ms=prefill_window_ms,
    )
