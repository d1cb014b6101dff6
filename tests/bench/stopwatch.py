"""Times nested calls: how long each function runs by itself, without what it calls that is timed as well.

Timing costs time. What it costs is measured beside, on functions that do nothing, and taken off: inside a timed
call (between its two looks at the clock) and outside it, which its caller would be charged for. It is measured
again for every block of calls, because a shared machine is never as fast as a moment ago.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

CALIBRATION_CALLS = 300


class StepGone(Exception):
    """A step names a function that is no longer there: the table of steps must follow the code."""


@dataclass(slots=True)
class Taken:
    """What one step has taken: nanoseconds by itself, calls, and timed calls made from within it."""

    ns: int = 0
    calls: int = 0
    inner_calls: int = 0


@dataclass(slots=True)
class Stopwatch:
    """Times what it wraps, by name, in the order in which names were first heard of."""

    taken: dict[str, Taken] = field(default_factory=dict)
    _stack: list[list[int]] = field(default_factory=list)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed under `name`; several functions may share a name."""
        taken, stack, now = self.taken, self._stack, time.perf_counter_ns

        def timed(*arguments: Any, **named: Any) -> Any:
            mine = taken.get(name)
            if mine is None:
                mine = taken[name] = Taken()
            frame = [0, 0]
            stack.append(frame)
            begun_ns = now()
            try:
                return function(*arguments, **named)
            finally:
                took_ns = now() - begun_ns
                stack.pop()
                mine.ns += took_ns - frame[0]
                mine.inner_calls += frame[1]
                mine.calls += 1
                if stack:
                    stack[-1][0] += took_ns
                    stack[-1][1] += 1

        return timed

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a block under `name`; it may await, as long as nothing else runs meanwhile."""
        mine = self.taken.setdefault(name, Taken())
        frame = [0, 0]
        self._stack.append(frame)
        begun_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            mine.ns += time.perf_counter_ns() - begun_ns - frame[0]
            self._stack.pop()
            mine.inner_calls += frame[1]
            mine.calls += 1

    @contextmanager
    def collector(self, name: str) -> Iterator[None]:
        """Time the garbage collector's runs under `name`, wherever they happen, until the block ends."""
        mine = self.taken.setdefault(name, Taken())
        begun_ns = 0

        def heard(phase: str, _info: dict[str, int]) -> None:
            nonlocal begun_ns
            if phase == "start":
                begun_ns = time.perf_counter_ns()
                return
            took_ns = time.perf_counter_ns() - begun_ns
            mine.ns += took_ns
            mine.calls += 1
            if self._stack:
                self._stack[-1][0] += took_ns

        gc.callbacks.append(heard)
        try:
            yield
        finally:
            gc.callbacks.remove(heard)

    def clear(self) -> None:
        """Forget what was timed, not the order of the names."""
        for one in self.taken.values():
            one.ns = one.calls = one.inner_calls = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What timing one call costs, in nanoseconds: charged to the call itself, and to its caller."""

    inside_ns: float
    outside_ns: float

    def net_ns(self, taken: Taken) -> float:
        """What a step took without the cost of timing it. Never negative."""
        return max(0.0, taken.ns - taken.calls * self.inside_ns - taken.inner_calls * self.outside_ns)


def overhead() -> Overhead:
    """Measured here and now; the best of three."""
    watch = Stopwatch()

    def nothing(_one: object, _two: object) -> None:
        return

    timed = watch.wrap("inner", nothing)

    def calls(function: Callable[..., Any]) -> None:
        for _ in range(CALIBRATION_CALLS):
            function(None, None)

    best_inside, best_outside = float("inf"), float("inf")
    for _ in range(3):
        watch.clear()
        watch.wrap("timed calls", calls)(timed)
        watch.wrap("plain calls", calls)(nothing)
        plain_ns = watch.taken["plain calls"].ns
        # A plain call costs its caller something too, which is the step's own work and stays in it.
        best_inside = min(best_inside, watch.taken["inner"].ns / CALIBRATION_CALLS)
        best_outside = min(best_outside, (watch.taken["timed calls"].ns - plain_ns) / CALIBRATION_CALLS)
    return Overhead(inside_ns=best_inside, outside_ns=max(0.0, best_outside))


@contextmanager
def timing(watch: Stopwatch, steps: dict[str, tuple[tuple[Any, str], ...]]) -> Iterator[None]:
    """Time the functions of `steps` (a module's, a class's or an object's attributes) until the block ends.

    Raises `StepGone` when an attribute does not exist.
    """
    with ExitStack() as stack:
        for name, targets in steps.items():
            for owner, attribute in targets:
                if not hasattr(owner, attribute):
                    raise StepGone(f"step {name!r}: {owner!r} has no {attribute!r} any more")
                before = getattr(owner, attribute)
                stack.callback(_set, owner, attribute, before)
                _set(owner, attribute, watch.wrap(name, before))
        yield


def _set(owner: Any, attribute: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, attribute, value)
    else:
        object.__setattr__(
            owner, attribute, value
        )  # frozen values are changed here, for the time of measuring
