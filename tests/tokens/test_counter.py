"""The counter of a server: at once or from threads, exactly once, and no request at another's cost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from extproc.adapters.tokens.chat_template import ChatTemplate, ChatTemplates
from extproc.adapters.tokens.count_cache import CountCache
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.adapters.tokens.encoder import TiktokenEncoder
from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.domain.outcome import Reason
from extproc.domain.prompt import AtLeast, Count, Counted, CountFailed, Prompt, TextPrompt, TokenIdPrompt
from tests.tokens.counting import NO_LIMIT, chat, count_text

PATIENCE_S = 20.0
LONG = "x" * 20_000
"""Too long for the event loop at the fake encoder's price."""


class PanicException(BaseException):
    """Like what Rust libraries raise."""


class FakeEncoder:
    """One token per character; does what `act` does with each text, and notes where."""

    name = "fake"
    nanoseconds_per_byte = 1_000

    def __init__(self, act: Callable[[str], None] = lambda text: None) -> None:
        self._act = act
        self.threads: list[str] = []

    def count(self, text: str) -> int:
        self.threads.append(threading.current_thread().name)
        self._act(text)
        return len(text)


def model(
    act: Callable[[str], None] = lambda text: None, *, slice_chars: int | None = None, cache_bytes: int = 0
) -> ModelTokens:
    """A model that counts characters."""
    template = ChatTemplate("{{ messages[0].content }}", name="t", special_tokens={})
    return ModelTokens(
        templates=ChatTemplates({"default": template}),
        encoder=FakeEncoder(act),
        splitter=None,
        pieces=CountCache(cache_bytes),
        prompts=CountCache(0),
        slice_chars=slice_chars,
    )


class Answers:
    """What was delivered, and on which thread."""

    def __init__(self) -> None:
        self.all: list[Count] = []
        self.threads: set[int] = set()

    def __call__(self, answer: Count) -> None:
        self.all.append(answer)
        self.threads.add(threading.get_ident())

    async def wait_for(self, number: int = 1) -> list[Count]:
        """The answers once there are so many."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.all) < number:
                await asyncio.sleep(0.001)
        return self.all


Ask = Callable[..., Answers]


@pytest_asyncio.fixture
async def counter_of() -> AsyncIterator[Callable[..., tuple[ExactTokenCounter, Ask]]]:
    """Makes a counter for one model, and a function that asks it; closes it afterwards."""
    counters: list[ExactTokenCounter] = []

    def make(tokens: ModelTokens, **settings: Any) -> tuple[ExactTokenCounter, Ask]:
        counter = ExactTokenCounter({"m": tokens}, **{"threads": 2, "budget_ms": 60_000, **settings})
        counters.append(counter)

        def ask(
            prompt: Prompt | str,
            *,
            tenant: str = "t",
            limit_tokens: int = NO_LIMIT,
            name: str = "m",
            answers: Answers | None = None,
        ) -> Answers:
            answers = answers or Answers()
            counter.count(
                model=name,
                prompt=TextPrompt(texts=(prompt,)) if isinstance(prompt, str) else prompt,
                limit_tokens=limit_tokens,
                tenant=tenant,
                deliver=answers,
            )
            return answers

        return counter, ask

    yield make
    for counter in counters:
        counter.close()


def counted(*tokens: int) -> Counted:
    return Counted(per_sequence_tokens=tokens)


async def test_short_prompts_are_answered_at_once(counter_of: Any) -> None:
    """A short text, a chat and token ids are answered before `count` returns, in no other thread."""
    tokens = model()
    counter, ask = counter_of(tokens)
    assert ask("four").all == [counted(4)]
    assert ask(chat("hello")).all == [counted(5)]
    assert ask(TokenIdPrompt(lengths_tokens=(3, 2))).all == [counted(3, 2)]
    assert set(tokens._encoder.threads) == {threading.current_thread().name}  # type: ignore[attr-defined]
    assert (counter.stats.inline, counter.stats.pooled, counter.queue_depth) == (3, 0, 0)


async def test_long_prompts_are_answered_from_threads_on_the_loops_thread(counter_of: Any) -> None:
    """A long text or chat is counted elsewhere; its answer comes on the event loop's thread, exactly once."""
    tokens = model()
    counter, ask = counter_of(tokens)
    answers = Answers()
    for prompt in (LONG, chat(LONG), TextPrompt(texts=("a", LONG, "bc"))):
        ask(prompt, answers=answers)
    assert answers.all == []
    await answers.wait_for(3)
    await asyncio.sleep(0.02)
    assert sorted(answers.all, key=str) == sorted(
        [counted(20_000), counted(20_000), counted(1, 20_000, 2)], key=str
    )
    assert answers.threads == {threading.get_ident()}
    assert threading.current_thread().name not in tokens._encoder.threads[-3:]  # type: ignore[attr-defined]
    assert (counter.stats.pooled, counter.stats.failed) == (3, 0)


async def test_a_long_conversation_is_rendered_in_a_thread(counter_of: Any) -> None:
    """Many messages are not rendered on the event loop, even if they are short."""
    counter, ask = counter_of(model())
    answers = ask(chat(*(["hi"] * 500)))
    assert answers.all == []
    assert await answers.wait_for() == [counted(2)]
    big_tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {str(n): [n] for n in range(1_500)}},
    }
    assert await ask(chat("hi", tools=[big_tool])).wait_for() == [counted(2)]
    assert counter.stats.pooled == 2


async def test_a_prompt_over_its_limit_is_told_about_from_anywhere(counter_of: Any) -> None:
    """A lower bound over the limit is an answer, at once or from a thread, and slices after it are not counted."""
    text = "word " * 4_000
    tokens = model(slice_chars=100)
    _, ask = counter_of(tokens)
    assert ask("seven..", limit_tokens=6).all == [AtLeast(input_tokens=7)]
    (answer,) = await ask(text, limit_tokens=2_000).wait_for()
    assert isinstance(answer, AtLeast)
    assert 2_000 < answer.input_tokens < 2_200


async def test_an_unknown_model_is_an_answer(counter_of: Any) -> None:
    """No tokenizer is the service's fault and says so; models can be replaced while others are being counted."""
    gate = threading.Event()
    counter, ask = counter_of(model(lambda text: _wait(gate)))
    (failed,) = ask("a", name="other").all
    assert isinstance(failed, CountFailed)
    assert failed.reason is Reason.INTERNAL_ERROR
    old = ask(LONG)
    counter.replace_models({"other": model()})
    assert ask("a", name="other").all == [counted(1)]
    gate.set()
    assert await old.wait_for() == [counted(20_000)]


def _wait(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)


def _die(text: str) -> None:
    if "SECRET" in text:
        raise PanicException(text)


@pytest.mark.parametrize("text", ["SECRET", f"SECRET{LONG}"])
async def test_a_tokenizer_that_panics_fails_one_prompt(counter_of: Any, text: str) -> None:
    """Whatever a tokenizer dies of is that prompt's answer; the next prompts are counted, at once and in threads."""
    counter, ask = counter_of(model(_die))
    for _ in range(5):
        (failed,) = await ask(text).wait_for()
        assert isinstance(failed, CountFailed)
        assert failed.reason is Reason.INVALID_PARAMETER
        assert "SECRET" not in failed.detail
    assert ask("fine").all == [counted(4)]
    assert await ask(LONG).wait_for() == [counted(20_000)]
    assert counter.stats.failed == 5


async def test_an_interrupt_is_not_a_tokenizers_failure(counter_of: Any) -> None:
    """Ctrl-C on the event loop's thread goes through."""

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    _, ask = counter_of(model(interrupt))
    with pytest.raises(KeyboardInterrupt):
        ask("a")


async def test_a_template_that_refuses_is_an_answer(counter_of: Any) -> None:
    """What cannot be rendered has no count, with the reason and words of the refusal."""
    _, ask = counter_of(model())
    (failed,) = ask(chat()).all
    assert failed == CountFailed(
        reason=Reason.MALFORMED_REQUEST, detail="messages must have at least one message"
    )


async def test_too_many_long_prompts_are_refused_at_once(counter_of: Any) -> None:
    """A tenant over its share, and everybody over the bound, is told to come back; nobody waits unbounded."""
    gate = threading.Event()
    counter, ask = counter_of(
        model(lambda text: _wait(gate)), threads=1, jobs_limit=4, jobs_per_tenant_limit=3
    )
    waiting = Answers()
    for _ in range(3):
        ask(LONG, tenant="a", answers=waiting)
    (own_share,) = ask(LONG, tenant="a").all
    assert isinstance(own_share, CountFailed)
    assert own_share.reason is Reason.TOKENIZER_OVERLOADED
    ask(LONG, tenant="b", answers=waiting)
    (all_full,) = ask(LONG, tenant="c").all
    assert isinstance(all_full, CountFailed)
    assert all_full.reason is Reason.TOKENIZER_OVERLOADED
    assert (counter.queue_depth, counter.stats.overloaded, waiting.all) == (4, 2, [])
    gate.set()
    assert await waiting.wait_for(4) == [counted(20_000)] * 4


async def test_no_more_is_queued_than_can_be_done_in_time(counter_of: Any) -> None:
    """Work that would be late is refused at once: half of the time may be one tenant's, the rest is for others."""
    gate = threading.Event()
    tokens = model(lambda text: _wait(gate))
    tokens._encoder.nanoseconds_per_byte = 2_500_000  # 50 s for each long text, of 120 s by estimate
    _, ask = counter_of(tokens, threads=1)
    answers = [ask(LONG, tenant=tenant).all for tenant in ("a", "a", "b", "c")]
    refused = [bool(delivered) for delivered in answers]
    assert refused == [False, True, False, True]
    gate.set()


async def test_a_count_has_a_time_budget(counter_of: Any) -> None:
    """A prompt that takes or waits too long is answered once, as overload, and what comes later is not delivered."""
    gate = threading.Event()
    counter, ask = counter_of(model(lambda text: _wait(gate)), threads=1, budget_ms=30)
    answers = Answers()
    for _ in range(3):
        ask(LONG, answers=answers)
    await answers.wait_for(3)
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        while counter.queue_depth:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len(answers.all) == 3
    assert {answer.reason for answer in answers.all if isinstance(answer, CountFailed)} == {
        Reason.TOKENIZER_OVERLOADED
    }
    assert counter.stats.overloaded == 3


async def test_one_tenants_flood_does_not_hold_up_another(counter_of: Any) -> None:
    """With one thread and fifty long prompts of one tenant waiting, another tenant's is done after one turn."""
    gate = threading.Event()
    done: list[str] = []
    counter, _ = counter_of(model(lambda text: _wait(gate), slice_chars=1_000), threads=1)

    def ask(text: str, tenant: str) -> None:
        prompt = TextPrompt(texts=(text,))
        counter.count(
            model="m",
            prompt=prompt,
            limit_tokens=NO_LIMIT,
            tenant=tenant,
            deliver=lambda _: done.append(tenant),
        )

    for _ in range(50):
        ask("word " * 4_000, "flood")
    ask("word " * 300, "other")
    gate.set()
    async with asyncio.timeout(PATIENCE_S):
        while len(done) < 51:
            await asyncio.sleep(0.001)
    assert done.index("other") <= 2


async def test_a_document_sent_many_times_at_once_is_encoded_once(counter_of: Any) -> None:
    """Whoever waited for a thread finds what was counted meanwhile."""
    gate = threading.Event()
    tokens = model(lambda text: _wait(gate), cache_bytes=10_000)
    _, ask = counter_of(tokens, threads=1)
    answers = Answers()
    for _ in range(10):
        ask(LONG, answers=answers)
    gate.set()
    assert await answers.wait_for(10) == [counted(20_000)] * 10
    assert len(tokens._encoder.threads) == 1  # type: ignore[attr-defined]


async def test_closing_answers_what_is_open(counter_of: Any) -> None:
    """On shutdown every prompt that is still being counted is answered once, and the threads end."""
    gate = threading.Event()
    counter, ask = counter_of(model(lambda text: _wait(gate)))
    answers = Answers()
    for _ in range(4):
        ask(LONG, answers=answers)
    threading.Timer(0.05, gate.set).start()
    counter.close()
    assert [answer.reason for answer in answers.all if isinstance(answer, CountFailed)] == [
        Reason.DRAINING
    ] * 4
    await asyncio.sleep(0.05)
    assert len(answers.all) == 4
    (late,) = ask(LONG).all
    assert isinstance(late, CountFailed)


def test_an_answer_for_a_loop_that_is_gone_harms_nobody() -> None:
    """A loop that was closed while a thread counted cannot be told; the thread goes on."""
    gate = threading.Event()
    counter = ExactTokenCounter({"m": model(lambda text: _wait(gate))}, threads=1)
    answers = Answers()

    async def ask() -> None:
        counter.count(
            model="m", prompt=TextPrompt(texts=(LONG,)), limit_tokens=NO_LIMIT, tenant="t", deliver=answers
        )

    with asyncio.Runner() as runner:
        runner.run(ask())
    gate.set()
    until_s = time.monotonic() + PATIENCE_S
    while counter.queue_depth:
        assert time.monotonic() < until_s
    assert answers.all == []
    counter.close()


async def test_hostile_runs_beside_ordinary_prompts(counter_of: Any, qwen3: ModelTokens) -> None:
    """While long runs of one character are being counted, ordinary prompts are answered at once, all exactly."""
    _, ask = counter_of(qwen3)
    hostile = Answers()
    runs = ("^" * 100_000, " " * 100_000, "\n" * 100_000, "a" * 100_001)
    for run in runs:
        ask(run, tenant="hostile", answers=hostile)
    for number in range(200):
        assert ask(f"ordinary text number {number}", tenant="good").all == [counted(4 + len(str(number)))]
    await hostile.wait_for(len(runs))
    assert sorted(hostile.all, key=str) == sorted(
        (counted(25_000), counted(782), counted(3_125), counted(12_501)), key=str
    )


def test_a_panic_of_the_fast_encoder_is_no_failure(
    qwen3: ModelTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If tiktoken panics, the model's own tokenizer counts; an interrupt still goes through."""

    class Dying:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def encode_to_tiktoken_buffer(self, text: str, allowed_special: object) -> bytes:
            raise self.error

    encoder = qwen3._encoder
    assert isinstance(encoder, TiktokenEncoder)
    monkeypatch.setattr(encoder, "_core", Dying(PanicException("x")))
    assert count_text(qwen3, "Name three rivers, never seen before.") == 8
    monkeypatch.setattr(encoder, "_core", Dying(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        count_text(qwen3, "Name four rivers, never seen before.")
