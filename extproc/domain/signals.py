"""What an engine says of its own load, and for how long that is worth anything.

A number that an engine does not tell is `None`, and so is everything of a reading that is too old: unknown is
neither idle nor full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from extproc.domain.policy import OverloadPolicy


class ProbeResult(StrEnum):
    """How one reading of an engine ended. Only `REFUSED` says that nobody is there."""

    OK = "ok"
    MISS = "miss"  # it answered, and told none of the numbers that are known here
    ERROR = "error"  # it answered something else
    TIMEOUT = "timeout"  # it may well be serving: reading metrics is not what it is for
    REFUSED = "refused"  # no process accepts connections there


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSignal:
    """One good reading: requests that wait in the engine and that it runs, and the used part of its KV cache."""

    waiting_requests: int | None
    running_requests: int | None
    kv_used_permille: int | None
    at_ms: int

    def is_fresh(self, *, stale_ms: int, now_ms: int) -> bool:
        """Whether it may still be believed."""
        return now_ms - self.at_ms <= stale_ms


def pressure_permille(signals: list[EngineSignal], rules: OverloadPolicy) -> int | None:
    """How near a pool is to its thresholds: 1000 is at the nearest of them; `None` if nothing is known of any.

    Each number is the mean over the replicas that tell it, so that one busy replica is not a busy pool.
    """
    pressures = [
        sum(told) * 1000 // (len(told) * most)
        for told, most in (
            (_told(signal.waiting_requests for signal in signals), rules.waiting_requests),
            (_told(signal.kv_used_permille for signal in signals), rules.kv_used_permille),
        )
        if most is not None and told
    ]
    return max(pressures, default=None)


def _told(values: Iterable[int | None]) -> list[int]:
    return [value for value in values if value is not None]
