"""The Jinja environment of chat templates: Hugging Face's dialect of it, in a sandbox, with budgets.

A template is the operator's file, but what it loops over and multiplies is the client's. So a rendering has
a budget of characters, checked at every piece of output, and of processor time, checked every few thousand
reads of a message's field; repetition and powers are refused when their result could not be printed anyway, and
`range` keeps the sandbox's own limit of 100,000.

Most of a rendering's time goes into the sandbox's attribute checks: it tries the attribute, catches the error,
tries the item, and compares the type with half a dozen abstract classes. `getattr` and `getitem` here answer
the few cases that conversations consist of (a field of a plain dict, a public method of a plain string, a loop
variable, a namespace) without that, with the very result that the sandbox would give; everything else goes to
the sandbox. Measured on Qwen3's template with six messages: 2.6 times faster than the plain sandbox.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from extproc.adapters.tokens.errors import Uncountable
from extproc.domain.outcome import Reason

CHECK_EVERY_STEPS = 4096
"""Reading the processor clock costs as much as ten steps; a few thousand steps take about a millisecond."""

CHUNK_CHARS = 16
"""What a piece of output counts on top of its length, so that empty ones are bounded as well."""

_DICT_ATTRIBUTES = frozenset(dir(dict))
_DICT_READERS = frozenset({"get", "items", "keys", "values"})
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_LOOP_ATTRIBUTES = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


class RefusedByTemplate(TemplateError):
    """The template itself rejects the conversation (`raise_exception`)."""


class GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's words for training. It prints its body and has no other effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's protocol

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One thread's environment: budgets are spent without locks, so each thread has its own.

    Jinja is extended by subclassing; this is the one way to change how templates read attributes.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, *, now: Callable[[], datetime], output_limit_chars: int, render_limit_ms: int) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
        )
        self.output_limit_chars = output_limit_chars
        self._render_limit_ms = render_limit_ms
        self._steps_left = 0
        self._until_ns = 0
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        del self.globals["lipsum"]  # prints as much random text as it is asked for

    def _check_time(self) -> None:
        """Raise `Uncountable` if the rendering has used up its processor time."""
        self._steps_left = CHECK_EVERY_STEPS
        if time.thread_time_ns() > self._until_ns:
            raise Uncountable(
                Reason.INVALID_PARAMETER,
                f"the chat template needs more than {self._render_limit_ms} ms for this conversation; "
                "send fewer messages or fewer tools",
            )

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            self._steps_left -= 1
            if self._steps_left < 0:
                self._check_time()
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
            if attribute in _DICT_READERS:
                return getattr(obj, attribute)
        elif kind is str:
            if attribute in _STR_METHODS:
                return getattr(obj, attribute)
        elif kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        kind = type(obj)
        if kind is dict:
            self._steps_left -= 1
            if self._steps_left < 0:
                self._check_time()
        if kind is dict or kind is list:
            try:
                return obj[argument]
            except (TypeError, LookupError):
                pass
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    self._check_size(len(many) * times)
        elif isinstance(left, int) and isinstance(right, int):
            self._check_size(left.bit_length() * right // 3)
        return super().call_binop(context, operator, left, right)

    def _check_size(self, size_chars: int) -> None:
        if size_chars > self.output_limit_chars:
            raise Uncountable(
                Reason.INVALID_PARAMETER,
                f"the chat template makes more than {self.output_limit_chars} characters of this conversation",
            )

    def render(self, root: Callable[[Context], Any], context: Context) -> str:
        """What the template prints. Raises `Uncountable` beyond a budget, and whatever the template raises."""
        self._steps_left = CHECK_EVERY_STEPS
        self._until_ns = time.thread_time_ns() + self._render_limit_ms * 1_000_000
        chunks: list[str] = []
        room_chars = self.output_limit_chars
        for chunk in root(context):
            room_chars -= len(chunk) + CHUNK_CHARS
            if room_chars < 0:
                self._check_size(self.output_limit_chars + 1)
            chunks.append(chunk)
        return "".join(chunks)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: Jinja's own would escape HTML and so change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise RefusedByTemplate(str(message))
