"""The `TokenCounter` of a server: short counts at once, long ones in threads, one request never at another's cost.

Nearly every prompt is short or has been counted up to its last turn, and is answered before `count` returns. The
others go on where the event loop left off, in a `FairPool`; their answers come back to the loop. A count has a time
budget, so the pool's queue is bounded in time as well.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from extproc.adapters.tokens.errors import Uncountable
from extproc.adapters.tokens.fair_pool import FairPool
from extproc.adapters.tokens.mistral_tokens import PromptTokens
from extproc.domain.outcome import Reason
from extproc.domain.prompt import Count, Counted, CountFailed, Prompt, TokenIdPrompt

ESTIMATES_EXCEED = 2
"""Estimates of time are about twice what is measured."""

INLINE_US = 800
"""What the event loop may spend on one prompt, by estimate: 4 to 5 KB of new text with `tiktoken`, 1 to 1.5 KB with
`tokenizers`."""

TURN_US = 4_000
"""How long a thread works on a job before it looks for others."""


@dataclass(slots=True, kw_only=True)
class CounterStats:
    """What was done so far. Written on the event loop's thread only."""

    inline: int = 0
    """Prompts answered before `count` returned."""
    pooled: int = 0
    """Prompts given to the threads."""
    failed: int = 0
    """Prompts that have no count."""
    overloaded: int = 0
    """Prompts that were not counted because there was too much to do, or in too much time."""


class ExactTokenCounter:
    """Counts for the models of a policy. To be used on one event loop; see `extproc.ports.TokenCounter`."""

    def __init__(
        self,
        models: Mapping[str, PromptTokens],
        *,
        threads: int | None = None,
        inline_us: int = INLINE_US,
        budget_ms: int = 2_000,
        jobs_limit: int = 256,
        jobs_per_tenant_limit: int = 64,
    ) -> None:
        """`threads` is by default the number of processors. `budget_ms` is for one prompt, waiting included.

        No more is queued than the threads can do within the budget: what would be late is refused at once.
        """
        self._models = dict(models)
        self._inline_us = inline_us
        self._budget_ms = budget_ms
        threads = threads or os.cpu_count() or 1
        self._pool = FairPool(
            threads=threads,
            jobs_limit=jobs_limit,
            jobs_per_tenant_limit=jobs_per_tenant_limit,
            work_limit_us=ESTIMATES_EXCEED * threads * budget_ms * 1_000,
        )
        self._open: set[_PooledCount] = set()
        self.stats = CounterStats()

    @property
    def models(self) -> Mapping[str, PromptTokens]:
        """The models by their names in the policy; each has its own figures."""
        return self._models

    @property
    def queue_depth(self) -> int:
        """Prompts in the threads' hands."""
        return self._pool.jobs

    def replace_models(self, models: Mapping[str, PromptTokens]) -> None:
        """Count with these from now on. What is being counted goes on with the old ones."""
        self._models = dict(models)

    def count(
        self,
        *,
        model: str,
        prompt: Prompt,
        limit_tokens: int,
        tenant: str,
        deliver: Callable[[Count], None],
    ) -> None:
        """See `extproc.ports.TokenCounter.count`."""
        if isinstance(prompt, TokenIdPrompt):
            self.stats.inline += 1
            deliver(Counted(per_sequence_tokens=prompt.lengths_tokens))
            return
        tokens = self._models.get(model)
        if tokens is None:
            self.stats.failed += 1
            deliver(CountFailed(reason=Reason.INTERNAL_ERROR, detail="no tokenizer is loaded for this model"))
            return
        steps = tokens.steps(prompt, limit_tokens)
        reached = _advance(steps, self._inline_us)
        if isinstance(reached, int):
            self.stats.pooled += self.run(
                steps,
                next_step_us=reached,
                work_us=tokens.work_us(prompt),
                tenant=tenant,
                deliver=deliver,
            )
            return
        self.stats.inline += 1
        self.stats.failed += isinstance(reached, CountFailed)
        deliver(reached)

    def run(
        self,
        steps: Generator[int, None, Any],
        *,
        next_step_us: int,
        work_us: int,
        tenant: str,
        deliver: Callable[[Any], None],
    ) -> bool:
        """Run `steps` in the threads, by turns with all that is counted there and within the same bounds.

        They yield about how many microseconds the next step takes, the first one `next_step_us` and all together
        `work_us`. What they return is delivered on the event loop, or a `CountFailed` if there is too much to do
        or it takes too long. False if the steps were not begun: that has been delivered then.
        """
        loop = asyncio.get_running_loop()
        job = _PooledCount(steps, loop, self._finish, deliver)
        if not self._pool.submit(tenant, job, next_step_us, work_us):
            steps.close()
            self.stats.overloaded += 1
            deliver(_overloaded("too many long prompts are being counted"))
            return False
        self._open.add(job)
        job.timer = loop.call_later(self._budget_ms / 1000, self._expire, job)
        return True

    def close(self) -> None:
        """Stop the threads. Prompts that are still being counted are answered with `draining`."""
        for job in tuple(self._open):
            job.left = True
            self._finish(job, CountFailed(reason=Reason.DRAINING, detail="the gateway is shutting down"))
        self._pool.close()

    def _expire(self, job: _PooledCount) -> None:
        job.left = True
        self._finish(job, _overloaded(f"the prompt could not be counted within {self._budget_ms} ms"))

    def _finish(self, job: _PooledCount, answer: Any) -> None:
        """Deliver, once. Runs on the event loop."""
        if job not in self._open:
            return
        self._open.remove(job)
        if job.timer is not None:
            job.timer.cancel()
        if isinstance(answer, CountFailed):
            if answer.reason is Reason.TOKENIZER_OVERLOADED:
                self.stats.overloaded += 1
            else:
                self.stats.failed += 1
        job.deliver(answer)


class _PooledCount:
    """A count that goes on in the pool."""

    def __init__(
        self,
        steps: Generator[int, None, Any],
        loop: asyncio.AbstractEventLoop,
        finish: Callable[[_PooledCount, Any], None],
        deliver: Callable[[Any], None],
    ) -> None:
        self._steps = steps
        self._loop = loop
        self._finish = finish
        self.deliver = deliver
        self.timer: asyncio.TimerHandle | None = None
        self.left = False
        """Nobody waits for the answer any more. Set on the event loop, read by the threads."""

    def turn(self) -> int | None:
        begun_ns = time.thread_time_ns()
        while not self.left:
            reached = _advance(self._steps, 0)
            if not isinstance(reached, int):
                self._tell(reached)
                return None
            # By the clock: estimates are for the slowest of texts, and every turn costs two threads a look.
            if (time.thread_time_ns() - begun_ns) // 1_000 + reached > TURN_US:
                return reached
        return None

    def _tell(self, answer: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: there is nobody left to tell
            self._loop.call_soon_threadsafe(self._finish, self, answer)


def _advance(steps: Generator[int, None, Any], budget_us: int) -> Any:
    """Run steps until the next one would exceed the budget; return its cost, or the answer.

    The first step, which has been announced before, runs in any case. Libraries in Rust report a failed assertion
    by an exception that is no `Exception`; it is this prompt's answer and nobody else's affair.
    """
    try:
        while True:
            next_step_us = next(steps)
            budget_us -= next_step_us
            if budget_us < 0:
                return next_step_us
    except StopIteration as end:
        return end.value
    except Uncountable as error:
        return CountFailed(reason=error.reason, detail=error.detail)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        return CountFailed(
            reason=Reason.INVALID_PARAMETER,
            detail=f"the model's tokenizer fails on this prompt ({type(error).__name__})",
        )


def _overloaded(detail: str) -> CountFailed:
    return CountFailed(reason=Reason.TOKENIZER_OVERLOADED, detail=detail)
