"""System text in blocks: each engine makes another text of it."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.adapters.tokens.chat_template import ChatTemplate, ChatTemplates
from extproc.dialects import anthropic_messages
from extproc.dialects.anthropic_messages import ATTRIBUTION
from extproc.domain.policy import Engine
from extproc.domain.prompt import ChatPrompt

ANYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
IN_FRONT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LINE = f"{ATTRIBUTION}: a=b;"


def rendered(template: str, engine: Engine, system: Any, *inline: Any) -> str:
    messages = [{"role": "user", "content": "u"}, *({"role": "system", "content": text} for text in inline)]
    body = {"model": "m", "max_tokens": 1, "system": system, "messages": messages}
    prompt = anthropic_messages.read(body, "/v1/messages").prompt
    assert isinstance(prompt, ChatPrompt)
    made = ChatTemplate(template, name="t", special_tokens={}, engine=engine)
    return ChatTemplates({"default": made}).render(prompt)


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("system", "vllm", "llama_cpp"),
    [
        (blocks("a", "b"), "<system>ab<user>u", "<system>ab<user>u"),
        (blocks(LINE, "b"), "<system>b<user>u", f"<system>{LINE}b<user>u"),
        (blocks(f"{LINE}\na", "b"), "<system>b<user>u", f"<system>{LINE}\nab<user>u"),
        (blocks(LINE), "<user>u", f"<system>{LINE}<user>u"),
        (f"{LINE}\na", "<system>a<user>u", f"<system>{LINE}\na<user>u"),
        ("a", "<system>a<user>u", "<system>a<user>u"),
    ],
)
def test_blocks_are_one_text(system: Any, vllm: str, llama_cpp: str) -> None:
    """Nothing stands between them; attribution is left out by vLLM, a block of it whole, of a string its line."""
    assert rendered(ANYWHERE, Engine.VLLM, system) == vllm
    assert rendered(ANYWHERE, Engine.LLAMA_CPP, system) == llama_cpp


def test_late_system_messages_go_to_the_front_where_the_template_wants_that() -> None:
    """The first text, then each later one, with nothing between; elsewhere they stay where they are."""
    late = ("b", blocks("c", LINE, "d"), f"{LINE}\ne")
    assert rendered(ANYWHERE, Engine.VLLM, "a", *late) == "<system>a<user>u<system>b<system>cd"
    assert rendered(IN_FRONT, Engine.VLLM, "a", *late) == "<system>abcd<user>u"
    assert rendered(IN_FRONT, Engine.VLLM, None, *late) == "<system>bcd<user>u"


@pytest.mark.parametrize(
    ("source", "moves"),
    [
        (ANYWHERE, False),
        (IN_FRONT, True),
        ("{{ strftime_now('%Y') }}", True),
        ("{{ bos_token + 'x' }}", True),
        ("{{ namespace(a=1).a }}", False),
        ("{{ 1 // 0 }}", False),
        (
            "{% for _ in range(99999) %}{% for _ in range(99999) %}{{ messages[0].role }}{% endfor %}{% endfor %}",
            False,
        ),
    ],
)
def test_what_a_template_wants_is_found_by_trying(source: str, moves: bool) -> None:
    """Any failure of the template itself means that it wants system text in front, as vLLM reads it."""
    settings: dict[str, Any] = {"special_tokens": {"bos_token": "<s>"}, "render_limit_ms": 50}
    assert ChatTemplate(source, name="t", **settings).moves_system is moves
    assert not ChatTemplate(source, name="t", engine=Engine.LLAMA_CPP, **settings).moves_system
