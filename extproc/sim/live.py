"""The engine model in real time: it submits answers' sequences, tells them of their tokens, and drops them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from extproc.sim.answers import Answer, Choice
from extproc.sim.engine import Ended, Engine, EngineConfig, FirstToken
from extproc.sim.metrics import Metrics

_US_PER_S = 1_000_000


@dataclass(slots=True, eq=False)
class Opened:
    """An answer under way. The bell rings when it has news: for a stream every token, else only the end."""

    answer: Answer
    bell: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_complete(self) -> bool:
        return all(choice.is_complete for choice in self.answer.choices)

    async def news(self) -> None:
        """Wait until there is something new."""
        await self.bell.wait()
        self.bell.clear()


class LiveEngine:
    """Runs the model against the monotonic clock, with one alarm set for the next token of anyone.

    All methods belong to the event loop's thread and none awaits. If the loop is late, the model's times stay
    what they are, and tokens come out in a bunch.
    """

    def __init__(self, config: EngineConfig, metrics: Metrics) -> None:
        self._engine = Engine(config)
        self._metrics = metrics
        self._open: dict[str, tuple[Opened, Choice]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._started_at_s = time.monotonic()

    @property
    def open_sequences(self) -> int:
        return len(self._open)

    def submit(self, answer: Answer) -> Opened:
        """Queue all sequences of an answer. Raises what `Engine.submit` raises."""
        now_us = self._catch_up()
        opened = Opened(answer)
        for choice in answer.choices:
            self._engine.submit(
                request_id=choice.request_id,
                prompt_tokens=choice.prompt_tokens,
                output_tokens=choice.output_tokens,
                now_us=now_us,
            )
            choice.submitted_at_us = now_us
            self._open[choice.request_id] = (opened, choice)
        self._set_alarm()
        return opened

    def abandon(self, opened: Opened) -> None:
        """Drop what is left of an answer, which is nothing if it was completed."""
        if opened.is_complete:
            return
        now_us = self._catch_up()
        for choice in opened.answer.choices:
            if self._open.pop(choice.request_id, None) is not None:
                facts = self._engine.cancel(choice.request_id, now_us=now_us)
                if facts is not None:
                    self._metrics.ended(facts, reason="abort")
        self._set_alarm()

    def metrics_page(self) -> bytes:
        """The /metrics text as of now."""
        self._catch_up()
        return self._metrics.page(self._engine.snapshot())

    def stop(self) -> None:
        """Set no more alarms; open answers get no more news."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _catch_up(self) -> int:
        """Bring the model to the present, pass on what happened, and return the present."""
        now_us = int((time.monotonic() - self._started_at_s) * _US_PER_S)
        for event in self._engine.advance(now_us):
            opened, choice = self._open[event.request_id]
            match event:
                case FirstToken(at_us=at_us):
                    self._metrics.first_token(ttft_us=at_us - choice.submitted_at_us)
                case Ended():
                    del self._open[event.request_id]
                    choice.generated_tokens = event.generated_tokens
                    self._metrics.ended(event, reason=choice.finish_reason)
                    opened.bell.set()
        for request_id, generated_tokens in self._engine.progress():
            opened, choice = self._open[request_id]
            if generated_tokens > choice.generated_tokens:
                choice.generated_tokens = generated_tokens
                if opened.answer.asked.stream:
                    opened.bell.set()
        return now_us

    def _set_alarm(self) -> None:
        self.stop()
        next_us = self._engine.next_step_at_us()
        if next_us is not None:
            delay_s = self._started_at_s + next_us / _US_PER_S - time.monotonic()
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._on_alarm)

    def _on_alarm(self) -> None:
        self._catch_up()
        self._set_alarm()
