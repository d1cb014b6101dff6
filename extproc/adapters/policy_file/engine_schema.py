"""The keys of a policy file about engines: how they are asked, when a replica is left alone, when lanes pause."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

from extproc.adapters.policy_file.values import DURATIONS, Requests, Share, UrlPath, WaitFromZero, Whole

_CLOSED = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

Pause = Annotated[
    int, Whole(least=100, most=3_600_000, noun="milliseconds", units=DURATIONS, example="500ms or 2s")
]


class ProbeSpec(BaseModel):
    """How the engines are asked for their load. Replicas without an `address` are not asked."""

    model_config = _CLOSED

    interval_ms: Pause = 1_000
    """How often each worker asks each replica, give or take a quarter."""
    timeout_ms: Annotated[
        int, Whole(least=10, most=60_000, noun="milliseconds", units=DURATIONS, example="500ms")
    ] = 500
    """How long an answer may take."""
    stale_ms: Pause = 5_000
    """How old the last answer may be. An older one is not believed: the load is unknown, not zero and not full."""
    path: UrlPath = "/metrics"
    """Where the engine tells its load, as Prometheus text."""


class BreakerSpec(BaseModel):
    """When a replica gets no more requests. Without any replica left, the pool answers 503 `breaker_open`."""

    model_config = _CLOSED

    failures: Annotated[int, Whole(least=1, most=1_000, noun="failures")] = 5
    """So many failed answers in a row open it (5xx, connections that fail or break), and so many probes in a row
    that nobody accepts. A probe that hangs or finds something else does not count."""
    error_permille: Share = 500
    """So large a share of failed answers within the window opens it, too."""
    least_requests: Annotated[int, Whole(least=1, most=100_000, noun="requests")] = 20
    """But not before so many answers have ended within the window."""
    window_ms: Pause = 10_000
    """How far back answers count."""
    open_ms: Pause = 5_000
    """How long the replica gets nothing then; for as long again it gets only trials."""
    trial_requests: Annotated[int, Whole(least=1, most=1_000, noun="requests")] = 3
    """How many trials each worker lets through. One good answer closes the breaker, one that fails opens it anew."""


class OverloadSpec(BaseModel):
    """When lower lanes are suspended (429 `lane_suspended`) because the engines have too much to do: overflow first,
    then bulk, never interactive. Left out: never. At least one threshold is needed.
    """

    model_config = _CLOSED

    waiting_requests: Requests | None = None
    """So many requests wait in each engine, as the mean over the replicas that tell."""
    kv_used_permille: Share | None = None
    """So much of the KV cache is used, as the mean over the replicas that tell. llama.cpp and TGI tell none."""
    leave_permille: Annotated[int, Whole(least=1, most=999, noun="thousandths")] = 700
    """Below this part of every threshold the pool has caught up. In between nothing changes."""
    enter_ms: WaitFromZero = 3_000
    """How long a threshold must be reached before a lane is suspended, and before the next one is."""
    leave_ms: Pause = 5_000
    """How long the pool must have caught up, or be unknown, before a lane goes on, and before the next one does."""
