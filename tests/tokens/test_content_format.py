"""Which templates want content in parts."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from extproc.adapters.tokens.content_format import content_format

LOOP = "{% for message in messages %}"
PARTS = "{% for p in c %}{{ p }}{% endfor %}"
END = "{% endfor %}"

WANTS_PARTS = [
    LOOP + "{% for part in message.content %}{{ part.text }}{% endfor %}" + END,
    LOOP + "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}" + END,
    LOOP + "{% for p in message['content'] | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %}" + END,
    LOOP + "{% for p in message.content[1:] %}{{ p.text }}{% endfor %}" + END,
    "{% set ms = messages %}{% for m in ms[1:] %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
    "{% set a = messages %}{% set b = a | list %}{% for m in b %}{% for p in m.content %}{% endfor %}{% endfor %}",
    LOOP + "{% set content = message.content %}{% for p in content %}{{ p.text }}{% endfor %}" + END,
    "{% macro show(c) %}" + PARTS + "{% endmacro %}" + LOOP + "{{ show(message.content) }}" + END,
    "{% macro show(x, c) %}" + PARTS + "{% endmacro %}" + LOOP + "{{ show(1, c=message.content) }}" + END,
    LOOP + "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for p in message.content %}{{ p.text }}{% endfor %}{% endif %}" + END,
]  # fmt: skip

WANTS_TEXT = [
    LOOP + "{{ message.content }}" + END,
    LOOP + "{% for call in message.tool_calls %}{{ call }}{% endfor %}{{ message['content'] | trim }}" + END,
    LOOP + "{% for c in message.role %}{{ c }}{% endfor %}{{ message.content }}" + END,
    "{% for tool in tools %}{% for p in tool.content %}{{ p }}{% endfor %}{% endfor %}",
    "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ show(tools) }}" + LOOP + END,
    "{% set others = tools %}{% for m in others %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
    "{{ messages[0].content }}",
    "",
]  # fmt: skip


@pytest.mark.parametrize("template", WANTS_PARTS)
def test_a_template_that_loops_over_content_wants_parts(template: str) -> None:
    """Directly, through filters, slices, tests, other names, or a macro's parameter."""
    assert content_format(Environment(autoescape=True).parse(template)) == "openai"


@pytest.mark.parametrize("template", WANTS_TEXT)
def test_a_template_that_loops_over_anything_else_wants_text(template: str) -> None:
    """Loops over other fields, over other lists, or over a macro's parameter that never gets content."""
    assert content_format(Environment(autoescape=True).parse(template)) == "string"
