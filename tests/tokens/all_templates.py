"""Does every chat template of a collection render, and as the plain sandbox and a real engine render it?

    python -m tests.tokens.all_templates DIRECTORY [--engine] [--only NAME]

DIRECTORY holds `*.jinja` files, such as the seventy that llama.cpp collects (MIT), which a package of its bindings
brings along (they are not kept here):

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz --wildcards '*/vendor/llama.cpp/models/templates/*.jinja'

Each template is given conversations of eight kinds. A template that refuses one, as plain Jinja with Hugging Face's
settings does too, is right to. One that renders none, or renders one otherwise than plain Jinja, fails.
With `--engine`, llama.cpp's own rendering, through a tiny model with this template, is compared with ours as well.

Found on 2026-11-30, with the templates of llama-cpp-python 0.3.36: see `README.md` beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.error
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.adapters.tokens.chat_template import ChatTemplate
from extproc.adapters.tokens.engine_shape import as_engine_sees
from extproc.adapters.tokens.errors import TokenizerUnusable, Uncountable
from extproc.adapters.tokens.sandbox import GenerationTag
from extproc.dialects import openai_chat
from extproc.domain.policy import Engine
from extproc.domain.prompt import ChatPrompt
from tests.support.llama_cpp import LlamaServer
from tests.support.test_llama_facts import post
from tests.support.tiny_model import tiny_model
from tests.support.train_tokenizer import TOKENIZER_DIR

Json = dict[str, Any]

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
USER: Json = {"role": "user", "content": "How deep is the Rhine?"}
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_depth",
        "description": "Return the depth of a river in metres.",
        "parameters": {
            "type": "object",
            "properties": {"river": {"type": "string", "description": "Its name"}},
            "required": ["river"],
        },
    },
}
CALL: Json = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_depth", "arguments": '{"river": "Rhine"}'},
}
CALLS: list[Json] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "12"},
]
ANSWER: Json = {"role": "assistant", "content": "Twelve metres."}
KINDS: Mapping[str, Json] = {
    "one turn": {"messages": [USER]},
    "turns": {"messages": [USER, ANSWER, {"role": "user", "content": "And the Elbe?"}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "How deep?"}]}]},
    "tools": {"messages": [USER], "tools": [TOOL]},
    "calls": {"messages": [*CALLS, ANSWER, USER], "tools": [TOOL]},
    "thoughts": {"messages": [USER, {**ANSWER, "reasoning_content": "Hm."}, USER]},
    "prefill": {
        "messages": [USER, {"role": "assistant", "content": "It is"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}
LISTED = {
    "fireworks-ai-llama-3-firefunction-v2": "prints `functions` and `datetime`, which chat APIs do not give",
}
"""Templates that render nothing, and why that is right."""
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    failed = 0
    totals: Counter[str] = Counter()
    paths = sorted(path for path in arguments.directory.glob("*.jinja") if arguments.only in path.name)
    for path in paths:
        source = path.read_text("utf-8")
        found = checked(source)
        if arguments.engine:
            found |= {f"llama.cpp {kind}": what for kind, what in beside_the_engine(source).items()}
        good = [kind for kind, what in found.items() if what == "ok"]
        bad = {kind: what for kind, what in found.items() if not what.startswith(("ok", "refuses"))}
        totals.update(what.partition(":")[0] for what in found.values())
        is_bad = bool(bad) or (not good and path.stem not in LISTED)
        failed += is_bad
        refused = [kind for kind, what in found.items() if what.startswith("refuses")]
        print(f"{'BAD ' if is_bad else 'good'} {path.stem}: {len(good)} render; refuses {refused}")
        if not good:
            print(f"       {LISTED.get(path.stem, 'renders nothing')}")
        for kind, what in bad.items():
            print(f"       {kind}: {what}")
    print(f"{len(paths)} templates, {failed} bad; {dict(totals)}")
    sys.exit(1 if failed or not paths else 0)


def checked(source: str) -> dict[str, str]:
    """For every kind of conversation: `ok`, `refuses: ...`, or what is wrong."""
    try:
        ours = ChatTemplate(source, name="t", special_tokens=SPECIAL, now=lambda: NOW)
    except TokenizerUnusable as unusable:
        return {"compile": f"fails: {unusable}"}
    return {kind: _one(source, ours, body) for kind, body in KINDS.items()}


def _one(source: str, ours: ChatTemplate, body: Json) -> str:
    prompt = openai_chat.read({"model": "m", **body}, "/v1/chat/completions").prompt
    assert isinstance(prompt, ChatPrompt)
    messages = as_engine_sees(prompt.messages, ours.content_format, knows_developer="developer" in source)
    try:
        text = ours.render(prompt)
    except Uncountable as uncountable:
        what = uncountable.detail
        try:
            plain(source, messages, prompt)
        except (TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
            return f"refuses: {what}" if "refuses" in what else f"refuses ({type(error).__name__}): {what}"
        return f"refuses: {what}" if prompt.continue_final_message else f"only ours fails: {what}"
    if prompt.continue_final_message:
        return "ok" if text.rstrip().endswith("It is") else "continued otherwise"
    return "ok" if text == plain(source, messages, prompt) else "differs from plain Jinja"


def plain(source: str, messages: list[Json], prompt: ChatPrompt) -> str:
    """What Jinja's own sandbox prints with Hugging Face's settings."""

    def stop(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = stop
    environment.globals["strftime_now"] = NOW.strftime
    return environment.from_string(source).render(
        messages=messages,
        tools=prompt.tools,
        documents=None,
        add_generation_prompt=prompt.add_generation_prompt,
        **SPECIAL,
    )


def beside_the_engine(source: str) -> dict[str, str]:
    """The same, held to a real llama.cpp that renders this template."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = json.loads((TOKENIZER_DIR / "tokenizer_config.json").read_text("utf-8"))
        config["chat_template"] = source
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        (folder / "tokenizer.json").write_bytes((TOKENIZER_DIR / "tokenizer.json").read_bytes())
        special = {key: config[key] for key in ("bos_token", "eos_token")}
        ours = ChatTemplate(source, name="t", special_tokens=special, engine=Engine.LLAMA_CPP)
        try:
            with LlamaServer(model=tiny_model(folder, folder), log=folder / "log") as server:
                return {kind: _beside(server, ours, body) for kind, body in KINDS.items()}
        except RuntimeError:
            return {"start": "refuses: the server does not start with this template"}


def _beside(server: LlamaServer, ours: ChatTemplate, body: Json) -> str:
    prompt = openai_chat.read({"model": "m", **body}, "/v1/chat/completions").prompt
    assert isinstance(prompt, ChatPrompt)
    try:
        theirs = str(post(server, "/apply-template", body)["prompt"])
    except urllib.error.HTTPError as error:
        return f"refuses: the engine answers {error.code}"
    try:
        text = ours.render(prompt)
    except Uncountable as uncountable:
        return f"only ours fails: {uncountable.detail}"
    if text == theirs:
        return "ok"
    at = next(
        (at for at, (a, b) in enumerate(zip(text, theirs, strict=False)) if a != b),
        min(len(text), len(theirs)),
    )
    around = slice(max(0, at - 30), at + 50)
    return f"differs at {at}: ours {text[around]!r}, theirs {theirs[around]!r}"


if __name__ == "__main__":
    main()
