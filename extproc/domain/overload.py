"""Which lanes of a pool are suspended, by the load that its engines tell. Pure: time is an argument.

The seed of it is a rule of operators: a defined signal, hysteresis, and a documented condition of recovery. At a
pressure of 1000 (see `pressure_permille`) for `enter_ms` the lowest lane is suspended, after as long again the next
one. Below `leave_permille` for `leave_ms` the last one goes on, after as long again the one before it. In between
everything stays as it is, and both waits begin anew. Interactive is never suspended: budgets and queues are what
refuses people.

Law: between two changes lies at least the shorter of the two waits; unknown pressure suspends nobody, and ends a
suspension like calm does. So signals only ever take away from what would be admitted without them, and what they
took they give back.
"""

from __future__ import annotations

from dataclasses import dataclass

from extproc.domain.policy import LANES_DOWNWARDS, Lane, OverloadPolicy

HIGHEST_PRESSURE_PERMILLE = 1000


def suspendable(lanes: frozenset[Lane]) -> tuple[Lane, ...]:
    """The lanes that may be suspended, in the order in which they are: the lowest first."""
    return tuple(lane for lane in reversed(LANES_DOWNWARDS) if lane in lanes and lane is not Lane.INTERACTIVE)


@dataclass(slots=True)
class Overload:
    """One pool's overload control: the first `level` of its `lanes` are suspended."""

    rules: OverloadPolicy
    lanes: tuple[Lane, ...]
    level: int = 0
    _hot_since_ms: int | None = None
    _calm_since_ms: int | None = None

    @property
    def suspended(self) -> tuple[Lane, ...]:
        """The lanes that are suspended."""
        return self.lanes[: self.level]

    def states(self) -> dict[Lane, bool]:
        """Whether each lane that can be suspended is."""
        return {lane: number < self.level for number, lane in enumerate(self.lanes)}

    def observe(self, pressure_permille: int | None, now_ms: int) -> None:
        """This is the pressure now; `None`: nobody knows."""
        rules = self.rules
        if pressure_permille is not None and pressure_permille >= HIGHEST_PRESSURE_PERMILLE:
            self._calm_since_ms = None
            if self._hot_since_ms is None:
                self._hot_since_ms = now_ms
            if now_ms - self._hot_since_ms >= rules.enter_ms and self.level < len(self.lanes):
                self.level += 1
                self._hot_since_ms = now_ms
        elif pressure_permille is None or pressure_permille < rules.leave_permille:
            self._hot_since_ms = None
            if self._calm_since_ms is None:
                self._calm_since_ms = now_ms
            if now_ms - self._calm_since_ms >= rules.leave_ms and self.level > 0:
                self.level -= 1
                self._calm_since_ms = now_ms
        else:
            self._hot_since_ms = self._calm_since_ms = None

    def wait_ms(self, lane: Lane, now_ms: int) -> int:
        """The soonest that the lane can go on; 0 if it is not suspended."""
        if lane not in self.suspended:
            return 0
        steps = self.level - self.lanes.index(lane)
        calm_ms = 0 if self._calm_since_ms is None else now_ms - self._calm_since_ms
        return max(1, steps * self.rules.leave_ms - calm_ms)
