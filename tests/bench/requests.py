"""What is sent, by its number: the head's and the body's message of each request, as Envoy would serialize them.

Everything that can be made beforehand is. What must be new to every cache gets a beginning of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from extproc.sim.traces import TraceRow, read_trace
from tests.bench.envoy_side import body_message, chat_body, conversation_body, head_message
from tests.bench.prompts import cut, prompt

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
LONGEST_TOKENS = 120_000
"""Of a traced request: longer ones would be refused as too long, which is not what is measured."""

Make = Callable[[int], tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Chats of one length. `new_text`: never seen before. `new_body`: seen, but no body comes twice.

    `sampled` says whether the caller's trace is sampled; `None` is no trace.
    """

    tokens: int
    texts: int = 16
    tenant: str = "acme"
    new_text: bool = False
    new_body: bool = False
    sampled: bool | None = None

    def prepared(self) -> Make:
        """Makes the messages of a request."""
        more = (
            {} if self.sampled is None else {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-0{self.sampled:d}"}
        )
        if not (self.new_text or self.new_body):
            bodies = [chat_body(prompt(self.tokens, seed=seed)) for seed in range(self.texts)]
            made = [
                (head_message(len(body), tenant=self.tenant, more=more), body_message(body))
                for body in bodies
            ]
            return lambda number: made[number % len(made)]

        def make(number: int) -> tuple[bytes, bytes]:
            text = prompt(self.tokens, seed=0 if self.new_text else number % self.texts)
            if self.new_text:
                text = f"{number} {time.monotonic_ns()} {text}"
            body = chat_body(text, seed=number if self.new_body else None)
            return head_message(len(body), tenant=self.tenant, more=more), body_message(body)

        return make


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations that grow: every request sends all that was said before, and a turn more."""

    turns: int
    turn_tokens: int

    def prepared(self) -> Make:
        """Request `n` is turn `n % turns`; a conversation's requests must come one after the other."""

        def make(number: int) -> tuple[bytes, bytes]:
            conversation, turn = divmod(number, self.turns)
            said = [
                cut(self.turn_tokens, start=(conversation * 31 + each) * 97) for each in range(2 * turn + 1)
            ]
            body = conversation_body([f"{conversation} {OPENED} {said[0]}", *said[1:]])
            return head_message(len(body)), body_message(body)

        return make


OPENED = time.monotonic_ns()
"""Makes this run's conversations others than the last run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Requests as long as a trace's, and when they came. No text is known: each is new to every cache."""

    file: str

    @property
    def rows(self) -> tuple[TraceRow, ...]:
        """When they came and how long they were."""
        return _rows(self.file)

    def prepared(self) -> Make:
        """Request `n` is the trace's row `n`, from the beginning again at its end."""
        rows = self.rows

        def make(number: int) -> tuple[bytes, bytes]:
            tokens = min(rows[number % len(rows)].input_tokens, LONGEST_TOKENS)
            body = chat_body(f"{number} {time.monotonic_ns()} {cut(tokens, start=number * 89)}")
            return head_message(len(body)), body_message(body)

        return make


@cache
def _rows(file: str) -> tuple[TraceRow, ...]:
    return read_trace(TRACES / file)


Requests = Chats | Conversations | Traced
