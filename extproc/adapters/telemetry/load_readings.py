"""What is known of the engines, as readings. What is unknown has no series: it is not zero."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from extproc.adapters.telemetry import instruments as i
from extproc.adapters.telemetry.metrics import Reading
from extproc.domain.breaker import BreakerState
from extproc.domain.load import PoolLoad, ReplicaLoad


def load_readings(loads: Iterable[PoolLoad | ReplicaLoad]) -> Iterator[Reading]:
    """As they come."""
    for load in loads:
        if isinstance(load, ReplicaLoad):
            yield from _replica(load)
            continue
        for lane, is_suspended in load.lanes.items():
            yield Reading(name=i.LANE_SUSPENDED.name, labels=(load.pool, str(lane)), value=int(is_suspended))


def _replica(load: ReplicaLoad) -> Iterator[Reading]:
    labels = (load.pool, load.replica)
    is_open = load.breaker is BreakerState.OPEN
    yield Reading(name=i.BREAKER_OPEN.name, labels=labels, value=int(is_open))
    yield Reading(name=i.BREAKER_OPENED.name, labels=labels, value=load.breaker_opened_total)
    if not load.is_probed:
        return
    yield Reading(name=i.SIGNAL_STALE.name, labels=labels, value=int(load.is_stale))
    for result, number in load.probes.items():
        yield Reading(name=i.PROBES.name, labels=(*labels, str(result)), value=number)
    if load.age_ms is not None:
        yield Reading(name=i.SIGNAL_AGE.name, labels=labels, value=load.age_ms)
    if load.signal is None:
        return
    for instrument, told in (
        (i.ENGINE_WAITING, load.signal.waiting_requests),
        (i.ENGINE_RUNNING, load.signal.running_requests),
        (i.ENGINE_KV_USED, load.signal.kv_used_permille),
    ):
        if told is not None:
            yield Reading(name=instrument.name, labels=labels, value=told)
