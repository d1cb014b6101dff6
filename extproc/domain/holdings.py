"""What a scope of the books holds, and when it will have room again.

Waiting times are Little's law on what is held: a scope that holds L tokens whose holders stay W ms frees
L / W tokens per millisecond, so a shortfall of S tokens is gone after S x W / L ms. W is the mean over held
tokens, not over requests: a thousand short chats do not make one long document leave earlier. Holders are
counted with their whole permitted residence, which makes the estimate conservative.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.domain.budget import PARTS, Debt
from extproc.domain.policy import Pool

LONGEST_RESIDENCE_MS = 10_000_000
"""Residences count up to here (2.8 hours), so that sums of tokens x ms stay integers that Lua represents."""

SECONDS_PER_MINUTE = 60


def wait_ms(shortfall: int, held: int, residence_products: int) -> int:
    """Little's law: when `shortfall` of `held` is free. `residence_products` is the sum of held x ms.

    At least 1: whoever asks has just been told that it does not fit now.
    """
    if held <= 0:
        return 1
    mean_residence_ms = -(-residence_products // held)
    return max(1, -(-shortfall * mean_residence_ms // held))


@dataclass(slots=True)
class Held:
    """What a scope holds: tokens, requests, and the sums over its holders of ms, and of tokens x ms."""

    tokens: int = 0
    requests: int = 0
    request_ms: int = 0
    token_ms: int = 0

    def add(self, tokens: int, residence_ms: int) -> None:
        """Take one more holder in."""
        self.tokens += tokens
        self.requests += 1
        self.request_ms += residence_ms
        self.token_ms += tokens * residence_ms

    def remove(self, tokens: int, residence_ms: int) -> None:
        """Let one holder go."""
        self.tokens -= tokens
        self.requests -= 1
        self.request_ms -= residence_ms
        self.token_ms -= tokens * residence_ms

    def wait_for_tokens_ms(self, shortfall_tokens: int) -> int:
        """When `shortfall_tokens` will be free."""
        return wait_ms(shortfall_tokens, self.tokens, self.token_ms)

    def wait_for_requests_ms(self, shortfall_requests: int) -> int:
        """When `shortfall_requests` holders will have left."""
        return wait_ms(shortfall_requests, self.requests, self.request_ms)


@dataclass(slots=True)
class ReplicaBook:
    """What one replica holds, and the prompt tokens that it has been given and cannot have read yet."""

    held: Held = field(default_factory=Held)
    backlog: Debt = field(default_factory=Debt)

    def backlog_tokens(self, pool: Pool, now_ms: int) -> int:
        """The backlog at the pool's prefill speed, rounded up. Changes nothing."""
        parts = self.backlog.parts_at(pool.prefill_tokens_per_s * SECONDS_PER_MINUTE, now_ms)
        return -(-parts // PARTS)

    def add_prefill(self, input_tokens: int, pool: Pool, now_ms: int) -> None:
        """Put one more prompt behind the others."""
        self.backlog.decay(pool.prefill_tokens_per_s * SECONDS_PER_MINUTE, now_ms)
        self.backlog.charge(input_tokens, now_ms)

    def is_idle(self, now_ms: int) -> bool:
        """Whether this is no different from a replica that was never used."""
        return self.held.requests == 0 and not self.backlog.is_owed(now_ms)


@dataclass(slots=True)
class TenantBook:
    """What one tenant holds and owes."""

    held: Held = field(default_factory=Held)
    token_debt: Debt = field(default_factory=Debt)
    request_debt: Debt = field(default_factory=Debt)

    def is_idle(self, now_ms: int) -> bool:
        """Whether this is no different from a tenant that was never seen."""
        return self.held.requests == 0 and not (
            self.token_debt.is_owed(now_ms) or self.request_debt.is_owed(now_ms)
        )
