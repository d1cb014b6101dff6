"""What each engine makes of the same request, by its own rules."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from extproc.adapters.tokens.chat_template import ChatTemplate
from extproc.adapters.tokens.engine_rules import RULES
from extproc.adapters.tokens.errors import Uncountable
from extproc.domain.outcome import Reason
from extproc.domain.policy import Engine
from extproc.domain.prompt import ChatPrompt

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}</>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking %}[T]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}(({{ m.reasoning_content }})){% endif %}"
    "{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ONLY_PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"

USER: dict[str, Any] = {"role": "user", "content": "u"}
PARTS: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "text", "text": text} for text in ("", "a", "b")],
}
ANSWER: dict[str, Any] = {"role": "assistant", "content": " a "}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n": 1.0}'}}


def render(engine: Engine, *messages: dict[str, Any], template: str = CHATML, **settings: Any) -> str:
    made = ChatTemplate(template, name="t", special_tokens={}, engine=engine)
    return made.render(ChatPrompt(messages=messages, **settings))


def test_every_engine_has_its_rules() -> None:
    """No engine that a policy can name is without a row."""
    assert set(RULES) == set(Engine)


@pytest.mark.parametrize(
    ("engine", "prompt"),
    [
        (Engine.VLLM, "<user>u</><assistant> a </><assistant>"),
        (Engine.LLAMA_CPP, "<user>u</><assistant> a "),
        (Engine.TGI, "<user>u</><assistant> a"),
        (Engine.SGLANG, "<user>u</><user> a </><assistant>"),
    ],
)
def test_a_last_turn_of_the_assistant(engine: Engine, prompt: str) -> None:
    """Without a word about it in the request, each engine does something else."""
    assert render(engine, USER, ANSWER) == prompt


@pytest.mark.parametrize(
    ("engine", "prompt"),
    [
        (Engine.VLLM, "<user>u</><assistant> a "),
        (Engine.LLAMA_CPP, "<user>u</><assistant> a "),
        (Engine.TGI, "<user>u</><assistant> a"),
        (Engine.SGLANG, "<user>u</><assistant> a "),
    ],
)
def test_a_turn_to_be_continued(engine: Engine, prompt: str) -> None:
    """With `continue_final_message`, all go on after the text; only the space around it is a matter of opinion."""
    assert render(engine, USER, ANSWER, add_generation_prompt=False, continue_final_message=True) == prompt


@pytest.mark.parametrize(
    ("engine", "text"),
    [(Engine.VLLM, "a\nb"), (Engine.LLAMA_CPP, "a\nb"), (Engine.TGI, "ab"), (Engine.SGLANG, " a b")],
)
def test_parts_are_joined(engine: Engine, text: str) -> None:
    """What stands between the text parts of a message is the engine's choice."""
    assert render(engine, PARTS).startswith(f"<user>{text}</>")


@pytest.mark.parametrize("engine", [Engine.TGI, Engine.SGLANG])
def test_some_engines_always_prompt(engine: Engine) -> None:
    """These do not know a request without a generation prompt."""
    assert render(engine, USER, add_generation_prompt=False).endswith("<assistant>")


def test_developers() -> None:
    """A template that does not know them gets one system message from vLLM, and each for itself from llama.cpp."""
    messages = ({"role": "system", "content": "s"}, USER, {"role": "developer", "content": "d"})
    assert render(Engine.VLLM, *messages) == "<system>s\n\nd</><user>u</><assistant>"
    assert render(Engine.LLAMA_CPP, *messages) == "<system>s</><user>u</><system>d</><assistant>"
    assert "<developer>d</>" in render(Engine.SGLANG, *messages)
    assert "<developer>d</>" in render(Engine.LLAMA_CPP, *messages, template=CHATML + "{# <|channel|> #}")


def test_llama_cpp_writes_tools_and_calls_anew() -> None:
    """Unknown fields are gone, absent ones are empty, and whole numbers have no point."""
    tool = {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": None, "strict": True},
    }
    made = render(Engine.LLAMA_CPP, USER, {**ANSWER, "tool_calls": [CALL]}, USER, tools=[tool])
    written = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert json.dumps([written]) in made
    assert '{"n": 1}' in made
    effort = "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}"
    kwargs = {"reasoning_effort": "none"}
    assert render(Engine.LLAMA_CPP, USER, template=effort, template_kwargs=kwargs) == "u"


def test_llama_cpp_opens_and_closes_thoughts() -> None:
    """A continued turn has what the template puts around thoughts, with or without thoughts."""
    thought = {**ANSWER, "reasoning_content": "hm"}
    assert render(Engine.LLAMA_CPP, USER, ANSWER, template=THINKING) == "<user>u</><assistant>(()) a "
    assert render(Engine.LLAMA_CPP, USER, thought, template=THINKING) == "<user>u</><assistant>((hm)) a "
    only = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert render(Engine.LLAMA_CPP, USER, only, template=THINKING) == "<user>u</><assistant>((hm"
    empty = {"role": "assistant", "content": ""}
    assert render(Engine.LLAMA_CPP, USER, empty, template=THINKING) == "<user>u</>"


def test_llama_cpp_lets_think_what_can_think() -> None:
    """A template that knows thoughts is told to have some, unless the request says not; others are told not to."""
    asks = THINKING + "{% if enable_thinking %}[T]{% endif %}"
    assert "[T]" in render(Engine.LLAMA_CPP, USER, template=asks)
    assert "[T]" not in render(
        Engine.LLAMA_CPP, USER, template=asks, template_kwargs={"enable_thinking": False}
    )
    assert "[T]" not in render(Engine.LLAMA_CPP, USER)
    only_removes = CHATML + "{# <think> #}"
    assert render(Engine.LLAMA_CPP, USER, ANSWER, template=only_removes).endswith("<think></think> a ")


def test_llama_cpp_tells_the_date() -> None:
    """By two names, and such a prompt is never taken from the cache."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ date_string }}|{{ datetime }}"
    now = datetime(2026, 11, 3, tzinfo=UTC)
    dated = ChatTemplate(template, name="t", special_tokens={}, engine=Engine.LLAMA_CPP, now=lambda: now)
    assert dated.render(ChatPrompt(messages=[USER])) == "u03 Nov 2026|Nov 03 2026"
    assert dated.reads_clock
    assert not ChatTemplate(template, name="t", special_tokens={}).reads_clock


def test_llama_cpp_suits_its_messages_to_the_template() -> None:
    """A system turn goes into the next one, and texts become parts, for templates that need it so."""
    system = {"role": "system", "content": "s"}
    assert render(Engine.LLAMA_CPP, system, USER, template=NO_SYSTEM) == "<user>s\nu"
    assert render(Engine.LLAMA_CPP, system, template=NO_SYSTEM) == ""
    assert render(Engine.LLAMA_CPP, PARTS, USER, template=ONLY_PARTS) == "[][a][b][u]"


def test_llama_cpp_shows_no_media() -> None:
    """The policy's rule counts them, so nothing of them, and no line end on their account, is in the prompt."""
    image = {"type": "image"}
    parts = [image, {"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}, image]
    message = {"role": "user", "content": parts}
    assert render(Engine.LLAMA_CPP, message) == "<user>a\nb</><assistant>"
    assert render(Engine.LLAMA_CPP, message, template=ONLY_PARTS) == "[a][b]"


@pytest.mark.parametrize(
    "messages",
    [
        (USER, {**ANSWER, "tool_calls": [CALL]}),
        (USER, ANSWER, ANSWER),
        (USER, {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "SECRET"}}]}, USER),
    ],
)
def test_what_llama_cpp_refuses(messages: tuple[dict[str, Any], ...]) -> None:
    """It answers these with an error, so they have no count."""
    with pytest.raises(Uncountable) as refused:
        render(Engine.LLAMA_CPP, *messages)
    assert refused.value.reason is Reason.INVALID_PARAMETER
    assert "SECRET" not in refused.value.detail
