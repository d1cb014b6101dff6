"""A rate, kept as debt: the arithmetic of a token bucket in exact integers.

A bucket that refills at `rate` per minute and holds `burst` is stored as what has been taken and not yet
refilled, in units of 1/60,000 of an amount, so that one millisecond refills exactly `rate` of them. Nothing
is rounded, an absent bucket is an untouched one, and a change of `burst` needs no migration. Lua runs the
same arithmetic: with rates and bursts up to 10^10 every value stays below 2^53.

`since_ms` is when the bucket last began to owe anything. A refund for a charge made before that moment is
void: time has already given back what the charge took.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTS = 60_000
"""Parts of one amount: a rate per minute is a rate in parts per millisecond."""

LARGEST_AMOUNT = 10_000_000_000
"""Rates and bursts above this would leave the integers that Lua represents exactly."""


@dataclass(slots=True)
class Debt:
    """What a bucket is owed: `parts` at `at_ms`, without a break since `since_ms`."""

    parts: int = 0
    at_ms: int = 0
    since_ms: int = 0

    def decay(self, rate_per_minute: int, now_ms: int) -> None:
        """Let time pass: refill what `now_ms` allows. A clock that runs backwards refills nothing."""
        elapsed_ms = now_ms - self.at_ms
        if elapsed_ms > 0:
            # Dividing first keeps the product small however long the bucket has slept.
            if elapsed_ms >= -(-self.parts // rate_per_minute):
                self.parts = 0
            else:
                self.parts -= elapsed_ms * rate_per_minute
            self.at_ms = now_ms

    def wait_ms(self, amount: int, rate_per_minute: int, burst: int) -> int:
        """How long until `amount` fits, 0 when it fits now. Call `decay` first; `amount` <= `burst`."""
        excess_parts = self.parts + (amount - burst) * PARTS
        return 0 if excess_parts <= 0 else -(-excess_parts // rate_per_minute)

    def charge(self, amount: int, now_ms: int) -> None:
        """Take `amount`. Call `decay` first."""
        if self.parts == 0:
            self.since_ms = now_ms
        self.parts += amount * PARTS

    def refund(self, amount: int, charged_at_ms: int) -> None:
        """Give back `amount` of a charge made at `charged_at_ms`. Call `decay` first."""
        if charged_at_ms >= self.since_ms:
            self.parts = max(0, self.parts - amount * PARTS)

    def remaining(self, burst: int) -> int:
        """What could be taken now, rounded down. Call `decay` first."""
        return max(0, burst - -(-self.parts // PARTS))

    def reset_ms(self, rate_per_minute: int) -> int:
        """How long until the bucket is full again. Call `decay` first."""
        return -(-self.parts // rate_per_minute)
