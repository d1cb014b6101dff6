"""The gateway's numbers, derived from the policy so that the two cannot drift apart.

Times are milliseconds. Every limit here exists to stop Envoy from interfering with a decision that the policy
allows; none of them is meant to be the limit that acts in daily work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from extproc.domain.policy import Policy, Pool

SHORTEST_MESSAGE_TIMEOUT_MS = 5_000
"""Envoy's default of 200 ms turns every short hold, and every pause of a worker, into a 504."""

DECISION_SLACK_MS = 1_500
"""For everything between hold and answer that is not counting: the ledger's own time budget and a busy worker."""

COUNTING_NS_PER_TOKEN = 3_000
"""Twice what the slower tokenizer takes per token of long text on one core (1 to 1.5 microseconds)."""

LONGEST_EXTENSION_MS = 60_000
"""The service may ask for more time once per message; this much is always allowed."""

SHORTEST_STREAM_IDLE_MS = 300_000
"""Envoy's own default, kept as the floor."""

FEWEST_STREAMS = 1_024
"""Envoy's default circuit breaker, kept as the floor."""


FEWEST_CONNECTIONS = 10_000
"""Idle connections are cheap; the limit is there because descriptors are not endless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The derived numbers of one gateway."""

    message_timeout_ms: int
    max_message_timeout_ms: int
    stream_idle_timeout_ms: int
    body_limit_bytes: int
    extproc_requests: int
    downstream_connections: int

    @classmethod
    def of(cls, policy: Policy) -> Sizing:
        """The numbers for `policy`; each formula is described at its function below."""
        message_timeout_ms = _message_timeout_ms(policy)
        max_message_timeout_ms = max(LONGEST_EXTENSION_MS, 2 * message_timeout_ms)
        extproc_requests = _extproc_requests(policy)
        return cls(
            message_timeout_ms=message_timeout_ms,
            max_message_timeout_ms=max_message_timeout_ms,
            stream_idle_timeout_ms=_stream_idle_timeout_ms(policy, max_message_timeout_ms),
            body_limit_bytes=policy.limits.body_bytes,
            extproc_requests=extproc_requests,
            # Clients keep connections that they do not use.
            downstream_connections=max(FEWEST_CONNECTIONS, 4 * extproc_requests),
        )


def pool_requests(pool: Pool) -> int:
    """Requests that Envoy lets into a pool: twice what reservations allow, so that the ledger decides first."""
    return max(FEWEST_STREAMS, 2 * pool.request_cap * len(pool.replicas))


def _message_timeout_ms(policy: Policy) -> int:
    """max(5 s, longest hold + time to count the largest context + slack).

    Envoy restarts this timer with every message it sends, and the hold happens inside one message.
    """
    largest_context_tokens = max((model.context_tokens for model in policy.models.values()), default=0)
    counting_ms = -(-largest_context_tokens * COUNTING_NS_PER_TOKEN // 1_000_000)
    return max(SHORTEST_MESSAGE_TIMEOUT_MS, policy.longest_residence_ms + counting_ms + DECISION_SLACK_MS)


def _stream_idle_timeout_ms(policy: Policy, max_message_timeout_ms: int) -> int:
    """max(5 min, longest permitted hold + twice the longest answer).

    No byte moves during a hold, nor before the first token, and an answer that is not streamed moves none until
    it is complete: the longest silence is the longest residence of a request on its replica.
    """
    longest_answer_ms = max(_residences_ms(policy), default=0)
    return max(SHORTEST_STREAM_IDLE_MS, max_message_timeout_ms + 2 * longest_answer_ms)


def _residences_ms(policy: Policy) -> Iterator[int]:
    """For each model and lane: how long its largest request occupies a replica."""
    for model in policy.models.values():
        for lane, pool_name in model.lanes.items():
            limits = policy.lanes[lane]
            yield policy.pools[pool_name].residence_ms(
                min(limits.max_input_tokens, model.context_tokens),
                min(limits.max_output_tokens, model.context_tokens),
            )


def _extproc_requests(policy: Policy) -> int:
    """Twice the requests that can be admitted or queued at once.

    Every HTTP request holds one request to this service for its whole life, so the circuit breaker of the
    service's cluster bounds the gateway's concurrency. The second half is for requests that are being decided
    or refused.
    """
    admitted = sum(pool.request_cap * len(pool.replicas) for pool in policy.pools.values())
    queued = sum(lane.queue_requests for lane in policy.lanes.values()) * len(policy.pools)
    return max(FEWEST_STREAMS, 2 * (admitted + queued))
