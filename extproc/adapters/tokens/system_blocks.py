"""System text that comes in blocks, as in Anthropic's API: what an engine makes of it before its template sees it.

The blocks of one system message are one text, with nothing between them. vLLM (0.32) leaves out blocks by which a
coding agent attributes its requests, and if the model's template accepts a system turn only in front, it moves
system messages that stand between the turns to the first one. It finds that out by trying, and so do we.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jinja2 import Environment, Template, TemplateError
from jinja2.defaults import DEFAULT_NAMESPACE

from extproc.adapters.tokens.sandbox import TemplateEnvironment
from extproc.dialects.anthropic_messages import ATTRIBUTION
from extproc.domain.prompt import ChatPrompt

_PLAIN_JINJA = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701 - it only reads, and renders nothing
_TURNS = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


def joined(prompt: ChatPrompt, *, drops_attribution: bool, in_front: bool) -> ChatPrompt:
    """The conversation with each system message as one text; with `in_front`, all of them as the first message."""
    messages: list[Mapping[str, Any]] = []
    moved: list[str] = []
    for message in prompt.messages:
        if message["role"] != "system":
            messages.append(message)
            continue
        text = _joined(message["content"], drops_attribution=drops_attribution)
        if in_front:
            moved.append(text)
        elif text:
            messages.append({**message, "content": text})
    front = "".join(moved)
    if front:
        messages.insert(0, {"role": "system", "content": front})
    return replace(prompt, messages=messages, system_in_blocks=False)


def _joined(content: str | list[dict[str, str]], *, drops_attribution: bool) -> str:
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content]
    return "".join(text for text in texts if not (drops_attribution and text.startswith(ATTRIBUTION)))


def wants_system_in_front(environment: TemplateEnvironment, template: Template, source: str) -> bool:
    """Does this template fail on a system message between turns? Tried as vLLM does: without globals."""
    try:
        _PLAIN_JINJA.parse(source)
        jinja = {name: value for name, value in environment.globals.items() if name in DEFAULT_NAMESPACE}
        given = {**jinja, "messages": _TURNS, "add_generation_prompt": False}
        environment.render(template.root_render_func, template.new_context(given, shared=True))
    except TemplateError:
        return True
    except Exception:  # noqa: BLE001 - a template may raise anything, and vLLM does not start with such a one
        return False
    return False
