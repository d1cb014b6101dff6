"""What a prompt costs according to Hugging Face's own rules, written as plainly as possible.

This is what the product's counter is held to where no engine is at hand: the chat template rendered with the
settings that `transformers` uses, and the whole text encoded by `tokenizers`, without shortcuts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


class ReferenceCount:
    """Renders and counts for the tokenizer in a directory in Hugging Face form."""

    def __init__(self, tokenizer_dir: Path, *, chat_template: str | None = None) -> None:
        self.config: dict[str, Any] = json.loads((tokenizer_dir / "tokenizer_config.json").read_text("utf-8"))
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self.template = environment.from_string(chat_template or self.config["chat_template"])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The text that the model reads for a conversation."""
        return self.template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.config["bos_token"],
            eos_token=self.config["eos_token"],
            **template_kwargs,
        )

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, nothing added; markers of special tokens in it count as such."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        """Tokens of a text, nothing added."""
        return len(self.ids(text))

    def count_chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> int:
        """Tokens of a rendered conversation; `settings` are those of `render`."""
        return self.count(self.render(messages, **settings))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
