"""A rate, kept as debt: the arithmetic of a token bucket in exact integers.

A bucket that refills at `rate` per minute and holds `burst` is stored as what has been taken and not yet
refilled, in units of 1/60,000 of an amount, so that one millisecond refills exactly `rate` of them. Nothing
is rounded, an absent bucket is an untouched one, and a change of `burst` needs no migration. Lua runs the
same arithmetic: with rates and bursts up to 10^10 every value stays below 2^53.

Time pays the oldest charge first. So what a charge still owes at a later time is known from the level that
the debt had right after it (`charge` returns it), less what has been refilled since; and a refund gives back
no more than that. The rest of the charge has already been given back by time, and giving it back again would
let a tenant hold large reservations, cancel them, and take its burst twice.

`since_ms` is when the bucket last began to owe anything: every charge made before that moment is paid.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTS = 60_000
"""Parts of one amount: a rate per minute is a rate in parts per millisecond."""

LARGEST_AMOUNT = 10_000_000_000
"""Rates and bursts above this would leave the integers that Lua represents exactly."""

CLOCK_STEP_MS = 60_000
"""How far back a clock may go and be waited for. Refilling the same minute twice would admit too much, so a
failover between servers whose clocks differ by seconds refills nothing until the old time is reached again;
a clock that goes back further has been set, and waiting for it would refill nothing for hours."""


@dataclass(slots=True)
class Debt:
    """What a bucket is owed: `parts` at `at_ms`, without a break since `since_ms`, at the last rate seen."""

    parts: int = 0
    at_ms: int = 0
    since_ms: int = 0
    rate_per_minute: int = 1

    def decay(self, rate_per_minute: int, now_ms: int) -> None:
        """Let time pass: refill what `now_ms` allows. A clock that runs backwards refills nothing."""
        self.parts = self.parts_at(rate_per_minute, now_ms)
        self.rate_per_minute = rate_per_minute
        if now_ms < self.at_ms - CLOCK_STEP_MS:
            self.at_ms = now_ms
            self.since_ms = min(self.since_ms, now_ms)
        else:
            self.at_ms = max(self.at_ms, now_ms)

    def parts_at(self, rate_per_minute: int, now_ms: int) -> int:
        """What would be owed at `now_ms`. Changes nothing."""
        elapsed_ms = now_ms - self.at_ms
        if elapsed_ms <= 0:
            return self.parts
        # Dividing first keeps the product small however long the bucket has slept.
        if elapsed_ms >= -(-self.parts // rate_per_minute):
            return 0
        return self.parts - elapsed_ms * rate_per_minute

    def is_owed(self, now_ms: int) -> bool:
        """Whether anything would be owed at `now_ms`, at the rate of the last charge. Changes nothing."""
        return self.parts > 0 and self.parts_at(self.rate_per_minute, now_ms) > 0

    def charge(self, amount: int, now_ms: int) -> int:
        """Take `amount`, and say what is owed right after it. Call `decay` first."""
        if self.parts == 0:
            self.since_ms = now_ms
        self.parts += amount * PARTS
        return self.parts

    def refund(self, amount: int, *, charged: int, level_parts: int, charged_at_ms: int) -> None:
        """Give back `amount` of a charge of `charged` that left the debt at `level_parts` at `charged_at_ms`.

        Gives back no more of it than time has not paid yet. Call `decay` first.
        """
        if charged_at_ms < self.since_ms:
            return
        elapsed_ms = max(0, self.at_ms - charged_at_ms)
        if elapsed_ms >= -(-level_parts // self.rate_per_minute):
            return
        owed_parts = min(charged * PARTS, level_parts - elapsed_ms * self.rate_per_minute)
        self.parts = max(0, self.parts - min(amount * PARTS, owed_parts))


def wait_ms(parts: int, amount: int, *, rate_per_minute: int, burst: int) -> int:
    """How long until `amount` fits into a bucket that is owed `parts`: 0 when it fits now.

    Exact: it fits then and not one millisecond earlier. `amount` <= `burst`, or it never fits.
    """
    excess_parts = parts + (amount - burst) * PARTS
    return 0 if excess_parts <= 0 else -(-excess_parts // rate_per_minute)


def remaining(parts: int, burst: int) -> int:
    """What could be taken now from a bucket of `burst` that is owed `parts`, rounded down."""
    return max(0, burst - -(-parts // PARTS))


def reset_ms(parts: int, rate_per_minute: int) -> int:
    """How long until a bucket that is owed `parts` is full again."""
    return -(-parts // rate_per_minute)
