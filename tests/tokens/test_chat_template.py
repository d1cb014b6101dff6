"""Rendering a model's chat template as the engine would, and nothing beyond."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.adapters.tokens.chat_template import (
    ChatTemplate,
    ChatTemplates,
    read_template_sources,
    special_token_texts,
)
from extproc.adapters.tokens.errors import TokenizerUnusable, Uncountable
from extproc.domain.outcome import Reason
from extproc.domain.prompt import ChatPrompt
from tests.support.reference_count import ReferenceCount
from tests.tokens.counting import chat

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
LONG_LOOP = (
    "{{% for i in range(99999) %}}{{% for j in range(99999) %}}"
    "{{% if {} %}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
)
TOOL = {"type": "function", "function": {"name": "depth", "description": "<é> & 'ok'", "parameters": None}}


def template(source: str, special_tokens: Mapping[str, str] | None = None, **settings: Any) -> ChatTemplate:
    return ChatTemplate(source, name="t.jinja", special_tokens=special_tokens or {}, **settings)


def rendered(source: str, prompt: ChatPrompt | None = None, **settings: Any) -> str:
    return template(source, **settings).render(prompt or chat("hi"))


def refusal(source: str, prompt: ChatPrompt | None = None, **settings: Any) -> Uncountable:
    """How a rendering is refused."""
    with pytest.raises(Uncountable) as refused:
        rendered(source, prompt, **settings)
    return refused.value


def test_tojson_is_hugging_faces() -> None:
    """No HTML escapes, no ASCII escapes, spaces after commas and colons; and the options templates use."""
    prompt = chat("hi", tools=[TOOL])
    assert rendered("{{ tools[0] | tojson }}", prompt) == json.dumps(TOOL, ensure_ascii=False)
    assert rendered("{{ tools[0] | tojson(indent=2) }}", prompt) == json.dumps(
        TOOL, ensure_ascii=False, indent=2
    )
    assert (
        rendered("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True) }}")
        == '{"a": 1, "b": "\\u00e9"}'
    )
    assert rendered("{{ [1, 2] | tojson(separators=(',', ':')) }}") == "[1,2]"


def test_what_hugging_face_gives_to_templates_is_there() -> None:
    """Loop controls, generation marks, the clock, special tokens, stripped block lines, the request's variables."""
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"
    noon = datetime(2026, 11, 30, 12, tzinfo=UTC)
    assert rendered("{{ strftime_now('%d %b %Y') }}", now=lambda: noon) == "30 Nov 2026"
    assert rendered("{{ bos_token }}|{{ eos_token }}", special_tokens={"bos_token": "<s>"}) == "<s>|"
    assert rendered("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert rendered("{{ documents[0].t }}", chat("hi", documents=[{"t": "doc"}])) == "doc"
    assert (
        rendered(
            "{% if thinking is defined %}{{ thinking }}{% endif %}", chat("", template_kwargs={"thinking": 1})
        )
        == "1"
    )
    assert rendered("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


def test_a_requests_variable_wins_over_a_special_token_and_a_field_over_a_variable() -> None:
    """Precedence as in vLLM: `tools` among the variables is the one that wins over its field."""
    kwargs = {"bos_token": "X", "add_generation_prompt": False, "tools": [1], "documents": [2]}
    prompt = chat("hi", template_kwargs=kwargs, tools=[TOOL])
    source = "{{ bos_token }} {{ add_generation_prompt }} {{ tools }} {{ documents }}"
    assert rendered(source, prompt, special_tokens={"bos_token": "<s>"}) == "X True [1] [2]"


@pytest.mark.parametrize("name", ["messages", "chat_template", "tokenize", "conversation"])
def test_a_request_cannot_replace_the_conversation(name: str) -> None:
    """Variables that the engine refuses are refused here."""
    refused = refusal(TURNS, chat("hi", template_kwargs={name: "SECRET"}))
    assert refused.reason is Reason.INVALID_PARAMETER
    assert name in refused.detail
    assert "SECRET" not in refused.detail


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TURNS, "[user]one[assistant]tw o "),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<one><tw o"),
        (
            "{% for m in messages %}<{% for p in m.content %}{{ p.text }}{% endfor %}>{% endfor %}",
            "<one><tw o ",
        ),
    ],
)
def test_a_final_message_can_be_left_open(source: str, expected: str) -> None:
    """The prompt ends where the final message does, with its spaces if the template keeps them."""
    prompt = chat("one", "tw o ", add_generation_prompt=False, continue_final_message=True)
    assert rendered(source, prompt) == expected


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (TURNS, {"add_generation_prompt": True}),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", {}),
        ("{% for m in messages %}{{ m.content[:1] }}{% endfor %}", {}),
        ("{% for m in messages %}{{ m.content | replace('n', '') }}{% endfor %}", {}),
    ],
)
def test_a_final_message_that_cannot_be_left_open_is_refused(source: str, settings: dict[str, Any]) -> None:
    """With a generation prompt, or when the template shows the message otherwise than it is."""
    prompt = chat("one", **{"add_generation_prompt": False, "continue_final_message": True, **settings})
    assert "continue_final_message" in refusal(source, prompt).detail


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ raise_exception('Bad: ' ~ messages[0].content) }}", "refuses this conversation"),
        ("{{ messages[0].content.nothing.more }}", "line 1"),
        ("\n\n{{ messages[0].content + 1 }}", "(TypeError) (line 3)"),
        ("{{ messages[0][messages[0].content].x }}", "does not have"),
        ("{% set d = {} %}{{ d.update({messages[0].content: 1}) }}", "must not do"),
        ("{{ messages[0].content | int('x', 'y', 'z') }}", "TypeError"),
    ],
)
def test_an_error_names_its_cause_and_not_the_prompt(source: str, told: str) -> None:
    """The template's own words are shown if they are nothing but that; of other errors only kind and line."""
    refused = refusal(source, chat("SECRET"))
    assert refused.reason is Reason.INVALID_PARAMETER
    assert told in refused.detail
    assert "SECRET" not in refused.detail


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ messages[0]['__class__'].__name__ }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a.__class__.__init__}'.format_map({'a': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['sys'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(x=1) %}{{ ns.__class__.__init__.__globals__ }}",
        "{% for m in messages %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
        "{% for m in messages %}{{ loop._iterable }}{{ loop._iterator.__class__.x }}{% endfor %}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].pop('content') }}",
        "{% import 'os' as os %}{{ os }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    """Neither Python's internals, nor the conversation's mutation, nor files: refused, or nothing to see."""
    prompt = chat("hi")
    try:
        shown = rendered(source, prompt)
    except Uncountable:
        shown = ""
    assert (shown, prompt) == ("", chat("hi"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content * 1000000000 }}",
        "{{ 1000000000 * messages[0].content }}",
        "{{ [1] * 1000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{% for i in range(99999) %}{{ '' ~ '' }}{% endfor %}",
        LONG_LOOP.format("messages[0].role == 'x'"),
        LONG_LOOP.format("messages[0]['role'] == 'x'"),
    ],
)
def test_a_rendering_is_bounded(source: str) -> None:
    """Output, repetition, powers and processor time have limits, whatever the template does."""
    refused = refusal(source, chat("x" * 100), output_limit_chars=1_000_000, render_limit_ms=50)
    assert refused.reason is Reason.INVALID_PARAMETER


def test_ordinary_arithmetic_is_not_bounded() -> None:
    """Repetition and powers that stay small work as ever."""
    assert rendered("{{ 2 * 3 }} {{ 'ab' * 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1.5 * 2 }} {{ [1] * 2 }}") == (
        "6 abab 1024 0.5 3.0 [1, 1]"
    )


def test_a_conversation_that_nests_too_deeply_is_malformed() -> None:
    """Deep values end the rendering, not the process."""
    deep: Any = "x"
    for _ in range(sys.getrecursionlimit() * 10):
        deep = [deep]
    refused = refusal("{{ documents | tojson }}", chat("hi", documents=deep))
    assert refused.reason is Reason.MALFORMED_REQUEST


def test_an_empty_conversation_is_malformed() -> None:
    """There is nothing to render."""
    assert refusal(TURNS, ChatPrompt(messages=[])).reason is Reason.MALFORMED_REQUEST


def test_every_thread_renders_for_itself() -> None:
    """Budgets belong to one rendering: many threads at once do not use up each other's."""
    shared = template(TURNS)
    texts: list[str] = []
    prompt = chat(*(["word"] * 2_000))
    threads = [Thread(target=lambda: texts.append(shared.render(prompt))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [shared.render(prompt)] * 8


def test_a_broken_template_names_file_line_and_remedy() -> None:
    """A template that does not parse is no template."""
    with pytest.raises(TokenizerUnusable, match=r"t\.jinja: line 2 .*correct the file"):
        template("ok\n{% if %}")


def test_tools_get_the_template_for_tools() -> None:
    """Of several templates, `tool_use` is for requests with tools and `default` for the others."""
    both = ChatTemplates({"default": template("D"), "tool_use": template("T")})
    assert both.render(chat("hi")) == "D"
    assert both.render(chat("hi", tools=[TOOL])) == "T"
    assert ChatTemplates({"default": template("D")}).render(chat("hi", tools=[TOOL])) == "D"
    with pytest.raises(Uncountable, match="no chat template"):
        ChatTemplates({}).render(chat("hi"))
    with pytest.raises(Uncountable, match="no chat template"):
        ChatTemplates({"tool_use": template("T")}).render(chat("hi"))


def test_where_templates_are_found(tmp_path: Path) -> None:
    """The operator's file first, then the file beside the tokenizer, then the tokenizer's configuration."""
    named = [{"name": "default", "template": "cd"}, {"name": "tool_use", "template": "ct"}]

    def texts(config: Mapping[str, Any], explicit: Path | None = None) -> dict[str, str]:
        return {name: text for name, (text, _) in read_template_sources(tmp_path, config, explicit).items()}

    assert texts({}) == {}
    assert texts({"chat_template": "c"}) == {"default": "c"}
    assert texts({"chat_template": named}) == {"default": "cd", "tool_use": "ct"}
    (tmp_path / "chat_template.jinja").write_text("b")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("bt")
    assert texts({"chat_template": named}) == {"default": "b", "tool_use": "bt"}
    (tmp_path / "mine.jinja").write_text("m")
    assert texts({"chat_template": named}, tmp_path / "mine.jinja") == {"default": "m"}
    with pytest.raises(TokenizerUnusable, match=r"none\.jinja: .*check the path"):
        texts({}, tmp_path / "none.jinja")


@pytest.mark.parametrize("configured", [7, [7], ["x"], [{"name": "x"}], {"default": "x"}])
def test_a_configured_template_of_another_form_names_file_and_remedy(
    tmp_path: Path, configured: object
) -> None:
    """The message says where and what to do."""
    with pytest.raises(TokenizerUnusable, match=r"tokenizer_config\.json: chat_template .*correct the file"):
        read_template_sources(tmp_path, {"chat_template": configured}, None)


def test_special_tokens_are_texts_or_objects_with_a_text() -> None:
    """Both forms of `tokenizer_config.json`, and nothing that is no token."""
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": True}
    assert special_token_texts(config) == {"bos_token": "<s>", "eos_token": "</s>"}


WORDS = st.sampled_from(
    ["", " ", "a", "<think>\nx\n</think>\n\ny", "é", "<tool_response>", "\n", "</think>", "items", "b c"]
)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"items": [1, "é"], "n": None}}}
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": WORDS}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": WORDS},
            optional={"tool_calls": st.just([CALL]), "reasoning_content": WORDS},
        ),
    ),
    min_size=1,
    max_size=7,
)  # fmt: skip
ODD = (
    "{% set ns = namespace(n=0, items=messages) %}{% for m in ns.items %}{{ loop.index }}{{ loop.cycle('x', 'y') }}"
    "{{ loop.previtem.role if loop.previtem else '-' }}{{ m.get('content') }}{{ m.items() | list | length }}"
    "{{ m.nothing }}{{ m['nothing'] }}{{ m.keys() | list }}{{ m.content.split(' ')[-1].upper() }}{{ ns.absent }}"
    "{{ m.content.format(1) }}{{ messages[99] }}{{ messages[-1].role }}{{ loop.nothing }}{{ m.content.nothing }}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.__class__ }}{{ messages.copy() | length }}"
)


@settings(deadline=None)
@given(messages=MESSAGES, tools=st.sampled_from([None, [], [TOOL]]), add=st.booleans())
def test_the_shorter_way_to_attributes_gives_what_the_sandbox_gives(
    qwen3_dir: Path, messages: list[dict[str, Any]], tools: list[Any] | None, add: bool
) -> None:
    """The same text, or an error in both, as from the plain sandbox: for a real template and for an odd one."""
    for source in (None, ODD):
        plain = _plain(qwen3_dir, source)
        ours = _ours(qwen3_dir, source)
        try:
            expected = plain.render(messages, tools=tools, add_generation_prompt=add)
        except Exception:
            expected = None
        try:
            text = ours.render(ChatPrompt(messages=messages, tools=tools, add_generation_prompt=add))
        except Uncountable:
            text = None
        assert text == expected


_LOADED: dict[object, Any] = {}


def _plain(directory: Path, source: str | None) -> ReferenceCount:
    if ("plain", source) not in _LOADED:
        _LOADED["plain", source] = ReferenceCount(directory, chat_template=source)
    found: ReferenceCount = _LOADED["plain", source]
    return found


def _ours(directory: Path, source: str | None) -> ChatTemplate:
    if ("ours", source) not in _LOADED:
        config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        special = {"bos_token": config["bos_token"], "eos_token": config["eos_token"]}
        _LOADED["ours", source] = template(source or config["chat_template"], special)
    found: ChatTemplate = _LOADED["ours", source]
    return found
