"""From a conversation to the text that the engine will encode: the model's own chat template, rendered here.

What a template sees follows transformers (5.x): the conversation, `tools`, `documents`, `add_generation_prompt`,
the tokenizer's special tokens (`bos_token`, ...) and the request's own variables, which win over special tokens.
A model may have several named templates; `tool_use` is taken for requests with tools, else `default`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError

from extproc.adapters.tokens import last_turn, llama_cpp_shape, system_blocks
from extproc.adapters.tokens.content_format import content_format
from extproc.adapters.tokens.engine_rules import RULES
from extproc.adapters.tokens.engine_shape import ContentFormat, as_engine_sees
from extproc.adapters.tokens.errors import TokenizerUnusable, Uncountable
from extproc.adapters.tokens.sandbox import RefusedByTemplate, TemplateEnvironment
from extproc.domain.outcome import Reason
from extproc.domain.policy import Engine
from extproc.domain.prompt import ChatPrompt

OUTPUT_LIMIT_CHARS = 32_000_000
RENDER_LIMIT_MS = 2_000

_FIXED_VARIABLES = frozenset({"messages", "conversation", "chat_template", "tokenize"})
"""What a request may not set through its template variables, because the engine refuses it too."""

_CONTINUE_HERE = "\x02continue-here\x03 "
"""Stands at the end of the final message while it is rendered; the prompt ends where this comes out.
The space at its end shows whether the template strips what it prints."""


class ChatTemplate:
    """One template, compiled once and rendered by any thread."""

    def __init__(
        self,
        source: str,
        *,
        name: str,
        special_tokens: Mapping[str, str],
        content: ContentFormat | None = None,
        engine: Engine = Engine.VLLM,
        output_limit_chars: int = OUTPUT_LIMIT_CHARS,
        render_limit_ms: int = RENDER_LIMIT_MS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `name` is what messages call it. `content` overrides the detected content format.

        `engine` decides what the template is given.

        Raises `TokenizerUnusable` if it is no valid template.
        """
        self._new_environment: Callable[[], TemplateEnvironment] = lambda: TemplateEnvironment(
            now=now, output_limit_chars=output_limit_chars, render_limit_ms=render_limit_ms
        )
        environment = self._new_environment()
        try:
            tree = environment.parse(source)
            self._code: CodeType = environment.compile(tree)
        except TemplateSyntaxError as error:
            raise TokenizerUnusable(
                f"{name}: line {error.lineno} is not a valid chat template ({error.message}); correct the file or "
                "name another one as the model's chat template"
            ) from error
        self.name = name
        self.content_format: ContentFormat = content or content_format(tree)
        self.constants = frozenset(_constants(tree))
        """Every text that is written in the template itself; a message made of one quotes no prompt."""
        self._knows_developer = "'developer'" in source or '"developer"' in source
        self._reads_content = "content" in source
        clocks = ("strftime_now", "date_string", "datetime") if RULES[engine].rewrites else ("strftime_now",)
        self.reads_clock = any(clock in source for clock in clocks)
        """May the same conversation come out differently later?"""
        self.drops_attribution = RULES[engine].drops_attribution
        self._now = now
        self._special_tokens = dict(special_tokens)
        self._of_thread = threading.local()
        self._rules = RULES[engine]
        self.moves_system = self._rules.moves_system and self._wants_system_in_front(source)
        """Do system messages in blocks go to the front?"""
        self._abilities = (
            llama_cpp_shape.try_out(source, self._tried, parts=self.content_format == "openai")
            if self._rules.rewrites
            else None
        )

    def render(self, prompt: ChatPrompt) -> str:
        """The text of `prompt`, as the engine will encode it. Raises `Uncountable`."""
        thinking = None if self._abilities is None else self._abilities.thinking
        return last_turn.rendered(prompt, self._rules, self._rendered, thinking)

    def _rendered(self, prompt: ChatPrompt) -> str:
        environment, template, variables = self._compiled()
        variables = {**variables, **self._variables(prompt)}
        try:
            # The globals are in the variables already: a context of its own would copy them once more.
            text = environment.render(template.root_render_func, template.new_context(variables, shared=True))
        except Uncountable:
            raise
        except RefusedByTemplate as error:
            told = str(error)
            because = f": {told}" if told in self.constants else ""
            raise Uncountable(
                Reason.INVALID_PARAMETER, f"the model's chat template refuses this conversation{because}"
            ) from None
        except RecursionError:
            raise Uncountable(
                Reason.MALFORMED_REQUEST, "the conversation nests too deeply for the model's chat template"
            ) from None
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            line = _template_line(error, template)
            raise Uncountable(
                Reason.INVALID_PARAMETER,
                f"the model's chat template cannot render this conversation: {_cause(error)} (line {line})",
            ) from None
        return text if not prompt.continue_final_message else _until_continuation(text, variables["messages"])

    def _compiled(self) -> tuple[TemplateEnvironment, Template, dict[str, Any]]:
        try:
            compiled: tuple[TemplateEnvironment, Template, dict[str, Any]] = self._of_thread.compiled
        except AttributeError:
            environment = self._new_environment()
            template = environment.template_class.from_code(environment, self._code, {})
            compiled = (environment, template, {**environment.globals, **self._special_tokens})
            self._of_thread.compiled = compiled
        return compiled

    def _wants_system_in_front(self, source: str) -> bool:
        environment, template, _ = self._compiled()
        return system_blocks.wants_system_in_front(environment, template, source)

    def _tried(self, messages: list[dict[str, Any]]) -> str:
        """What the template makes of `messages` as they are; nothing if it fails."""
        environment, template, variables = self._compiled()
        given = {"messages": messages, "add_generation_prompt": True}
        variables = {**variables, **llama_cpp_shape.dates(self._now()), **given}
        try:
            return environment.render(template.root_render_func, template.new_context(variables, shared=True))
        except Exception:  # noqa: BLE001 - templates fail in every way
            return ""

    def _variables(self, prompt: ChatPrompt) -> dict[str, Any]:
        if self._abilities is not None:
            return llama_cpp_shape.variables_for(
                prompt, self._abilities, self._now(), without=_FIXED_VARIABLES
            )
        messages = as_engine_sees(
            prompt.messages,
            self.content_format,
            knows_developer=self._knows_developer or not self._rules.one_system_message,
            parts_joined_by=self._rules.parts_joined_by,
            skips_empty_parts=self._rules.skips_empty_parts,
            drops_attribution=self._rules.drops_attribution,
        )
        if not messages:
            raise Uncountable(Reason.MALFORMED_REQUEST, "messages must have at least one message")
        if prompt.continue_final_message:
            messages = self._to_be_continued(messages, prompt)
        variables: dict[str, Any] = {
            "tools": prompt.tools,
            "documents": prompt.documents,
            "add_generation_prompt": prompt.add_generation_prompt,
            "messages": messages,
        }
        if prompt.template_kwargs:
            fixed = _FIXED_VARIABLES & prompt.template_kwargs.keys()
            if fixed:
                raise Uncountable(
                    Reason.INVALID_PARAMETER, f"chat_template_kwargs must not set {', '.join(sorted(fixed))}"
                )
            # A request's field wins over its variable, except `tools`: there vLLM has it the other way round.
            given = {key: value for key, value in prompt.template_kwargs.items() if value is not None}
            fields = {key: value for key, value in variables.items() if value is not None}
            variables |= given | fields
            variables["tools"] = given.get("tools", prompt.tools)
        return variables

    def _to_be_continued(self, messages: list[dict[str, Any]], prompt: ChatPrompt) -> list[dict[str, Any]]:
        if prompt.add_generation_prompt:
            raise Uncountable(
                Reason.INVALID_PARAMETER,
                "continue_final_message and add_generation_prompt exclude each other; set the latter to false",
            )
        content = messages[-1]["content"]
        ends_in_text = isinstance(content, str) or (content and "text" in content[-1])
        if not ends_in_text or not self._reads_content:
            raise Uncountable(
                Reason.INVALID_PARAMETER, "continue_final_message needs a final message that has content"
            )
        if isinstance(content, str):
            marked: str | list[dict[str, str]] = content + _CONTINUE_HERE
        else:
            marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_HERE}]
        return [*messages[:-1], {**messages[-1], "content": marked}]


def _until_continuation(text: str, messages: list[dict[str, Any]]) -> str:
    marker = _CONTINUE_HERE.strip()
    content = messages[-1]["content"]
    last = content if isinstance(content, str) else content[-1]["text"]
    at = text.rfind(marker)
    if at < 0 or last.removesuffix(_CONTINUE_HERE).strip() not in text:
        raise Uncountable(
            Reason.INVALID_PARAMETER,
            "continue_final_message cannot be used: the model's chat template drops part of the final message",
        )
    kept = text[:at]
    return kept if text.startswith(_CONTINUE_HERE, at) else kept.rstrip()


def _constants(tree: nodes.Template) -> set[str]:
    printed = {str(data.data) for data in tree.find_all(nodes.TemplateData)}
    return printed | {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}


def _cause(error: Exception) -> str:
    """What went wrong, by its kind: the error's own words may hold the prompt."""
    if isinstance(error, UndefinedError):
        return "it needs a field that a message or tool does not have"
    if isinstance(error, SecurityError):
        return "it attempts what a template must not do"
    if isinstance(error, TemplateError):
        return "it stops with an error"
    return f"a value has a type or form that it does not expect ({type(error).__name__})"


def _template_line(error: Exception, template: Template) -> int:
    """The template's line that was being rendered, for its author. 0 if the error came from elsewhere."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == (template.filename or "<template>"):
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line


class ChatTemplates:
    """A model's templates by name, and which of them a request gets."""

    def __init__(self, by_name: Mapping[str, ChatTemplate]) -> None:
        self.by_name = dict(by_name)
        self._drops_attribution = any(template.drops_attribution for template in by_name.values())
        self._moves_system = any(template.moves_system for template in by_name.values())

    def render(self, prompt: ChatPrompt) -> str:
        """The text of `prompt` by the template that fits it. Raises `Uncountable`."""
        if prompt.system_in_blocks:
            prompt = system_blocks.joined(
                prompt, drops_attribution=self._drops_attribution, in_front=self._moves_system
            )
        return self._for(prompt).render(prompt)

    @property
    def reads_clock(self) -> bool:
        """May the same conversation come out differently later?"""
        return any(template.reads_clock for template in self.by_name.values())

    @property
    def constants(self) -> frozenset[str]:
        """Every text that is written in a template."""
        return frozenset(text for template in self.by_name.values() for text in template.constants)

    def _for(self, prompt: ChatPrompt) -> ChatTemplate:
        names = ("default",) if prompt.tools is None else ("tool_use", "default")
        for name in names:
            if name in self.by_name:
                return self.by_name[name]
        raise Uncountable(
            Reason.INVALID_PARAMETER,
            "the model has no chat template; send a completion request, or ask the operator to name a template",
        )


def read_template_sources(
    directory: Path, config: Mapping[str, Any], explicit: Path | None
) -> dict[str, tuple[str, str]]:
    """A model's template texts as `{name: (text, where it was found)}`; empty if it has none.

    In order: the file that the operator names; `chat_template.jinja` beside the tokenizer, with
    `additional_chat_templates/*.jinja`; `chat_template` in `tokenizer_config.json`, a text or a list of named ones.
    Raises `TokenizerUnusable` for files that cannot be read or have another form.
    """
    if explicit is not None:
        return {"default": (_read(explicit), str(explicit))}
    beside = directory / "chat_template.jinja"
    if beside.exists():
        found = {"default": (_read(beside), str(beside))}
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            found[path.stem] = (_read(path), str(path))
        return found
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    configured = config.get("chat_template")
    if configured is None:
        return {}
    if isinstance(configured, str):
        return {"default": (configured, where)}
    try:
        return {entry["name"]: (entry["template"], f"{where} {entry['name']}") for entry in configured}
    except (TypeError, KeyError):
        raise TokenizerUnusable(
            f"{where} must be a text or a list of {json.dumps({'name': '...', 'template': '...'})}; "
            "correct the file or name a template file for the model"
        ) from None


def special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on from `tokenizer_config.json`, as a template may print them."""
    texts: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            texts[key] = text
    return texts


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerUnusable(
            f"{path}: the chat template cannot be read ({type(error).__name__}); "
            "check the path in the policy and the file's permissions"
        ) from error
