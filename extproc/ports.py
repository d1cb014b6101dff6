"""What one exchange needs from the world, as questions; and how each may fail.

Answers are delivered by callback, exactly once and on the event loop's thread, possibly before the call
returns. That keeps the common case (an answer that is already known) free of tasks and futures, and it
makes a caller's departure harmless: the answer still arrives, and the exchange gives back what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from extproc.domain.outcome import Reason
from extproc.domain.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Input tokens per sequence of the prompt, in order, exactly as the engine will count them."""

    per_sequence_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLeast:
    """The prompt is longer than the limit that was asked about: it has at least this many tokens."""

    input_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountFailed:
    """The prompt cannot be counted. `detail` is safe to show: it never quotes the prompt."""

    reason: Reason
    detail: str


Count = Counted | AtLeast | CountFailed


class TokenCounter(Protocol):
    """How many input tokens will the engine see?"""

    def count(
        self,
        *,
        model: str,
        prompt: Prompt,
        limit_tokens: int,
        tenant: str,
        deliver: Callable[[Count], None],
    ) -> None:
        """Count `prompt` with the tokenizer of the policy's model `model`.

        May answer `AtLeast` instead of an exact count when one sequence is provably over `limit_tokens`.
        Never raises: whatever goes wrong is delivered as `CountFailed`.
        """
        ...
