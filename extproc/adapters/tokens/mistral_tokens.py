"""Counting for Mistral's own tokenizer files, which have no chat template: `mistral-common` encodes conversations.

An optional extra (`extproc[mistral]`), for `tekken.json`, `tokenizer.model.v3` and the like, as vLLM serves them with
`--tokenizer-mode mistral`. What is encoded are tokens, not a text, so nothing is cut or counted in pieces; whole
prompts are remembered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from extproc.adapters.tokens.count_cache import CountCache
from extproc.adapters.tokens.engine_shape import is_media
from extproc.adapters.tokens.errors import TokenizerUnusable, Uncountable
from extproc.adapters.tokens.model_tokens import ModelTokens, Steps
from extproc.adapters.tokens.system_blocks import joined
from extproc.domain.outcome import Reason
from extproc.domain.prompt import AtLeast, ChatPrompt, Counted, TextPrompt

_FILE = re.compile(r"tekken.*\.json|.*\.model(\.v[0-9a-z]+)?")

CALL_ID_CHARS = 9
"""Mistral's ids of calls have nine characters; vLLM keeps the last nine of longer ones."""

_CHAT_US = 400
_CHARS_PER_US = 4


def is_mistral_file(path: Path) -> bool:
    """Is this one of Mistral's own files, by its name?"""
    return _FILE.fullmatch(path.name) is not None


class MistralTokens:
    """Counts prompts for one model. Shared by all requests; every method may be called from any thread."""

    encoder_name = "mistral-common"
    why_reference = "mistral-common encodes conversations itself"
    why_whole = why_reference
    piecewise = False
    sliced = False

    def __init__(
        self,
        *,
        chat: Callable[[dict[str, Any]], int],
        text: Callable[[str, bool], int],
        cache_bytes: int,
    ) -> None:
        """`chat` counts a request of `mistral-common`; `text` counts a text, with or without BOS."""
        self._chat = chat
        self._text = text
        self.pieces = CountCache(0)
        self.prompts = CountCache(cache_bytes)
        self.bytes_encoded = 0

    def steps(self, prompt: ChatPrompt | TextPrompt, limit_tokens: int) -> Steps:
        """Count `prompt`: see `ModelTokens.steps`. Each sequence is one step."""
        counts: list[int] = []
        if isinstance(prompt, ChatPrompt):
            request = _request(prompt)
            body = orjson.dumps(request)
            key = self.prompts.key(body)
            (count,) = self.prompts.known((key,))
            if count is None:
                yield _CHAT_US + len(body) // _CHARS_PER_US
                count = self._count_chat(request)
                self.prompts.remember(key, count)
            counts.append(count)
        else:
            for text in prompt.texts:
                yield _CHAT_US + len(text) // _CHARS_PER_US
                counts.append(self._text(text, prompt.add_special_tokens))
                if counts[-1] > limit_tokens:
                    break
        if counts[-1] > limit_tokens:
            return AtLeast(input_tokens=counts[-1])
        return Counted(per_sequence_tokens=tuple(counts))

    def work_us(self, prompt: ChatPrompt | TextPrompt) -> int:
        """About how long counting takes altogether if the prompt is not known."""
        if isinstance(prompt, ChatPrompt):
            return _CHAT_US + len(orjson.dumps(_request(prompt))) // _CHARS_PER_US
        return sum(_CHAT_US + len(text) // _CHARS_PER_US for text in prompt.texts)

    def plain(self, prompt: ChatPrompt | TextPrompt) -> tuple[int, ...]:
        """The same without the cache: see `ModelTokens.plain`."""
        if isinstance(prompt, ChatPrompt):
            return (self._count_chat(_request(prompt)),)
        return tuple(self._text(text, prompt.add_special_tokens) for text in prompt.texts)

    def _count_chat(self, request: dict[str, Any]) -> int:
        try:
            return self._chat(request)
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise _refused(error) from None
        except Exception as error:
            if type(error).__module__.startswith("mistral_common"):
                raise _refused(error) from None
            raise


PromptTokens = ModelTokens | MistralTokens
"""What counts for a model."""


def load_mistral_tokens(path: Path, *, cache_bytes: int) -> MistralTokens:
    """The counting of the tokenizer at `path`. Raises `TokenizerUnusable`."""
    try:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: PLC0415 - optional
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: PLC0415 - optional

        tokenizer = MistralTokenizer.from_file(str(path))
    except ImportError as missing:
        raise TokenizerUnusable(
            f"{path} needs a package that is not installed ({missing.name or 'sentencepiece'}): "
            "pip install 'extproc[mistral]'"
        ) from None
    except Exception as error:
        raise TokenizerUnusable(
            f"{path} cannot be loaded by mistral-common ({type(error).__name__}); name the model's own file, "
            "such as tekken.json"
        ) from error
    inner = tokenizer.instruct_tokenizer.tokenizer

    def chat(request: dict[str, Any]) -> int:
        return len(tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(**request)).tokens)

    def text(value: str, special: bool) -> int:
        return len(inner.encode(value, bos=special, eos=False))

    return MistralTokens(chat=chat, text=text, cache_bytes=cache_bytes)


def _refused(error: Exception) -> Uncountable:
    # The error's own words may hold the prompt.
    return Uncountable(
        Reason.INVALID_PARAMETER,
        f"the model's encoding does not take this conversation ({type(error).__name__}); check the order of roles "
        "and that every call has its answer",
    )


def _request(prompt: ChatPrompt) -> dict[str, Any]:
    """The conversation as vLLM hands it to `mistral-common`."""
    if prompt.system_in_blocks:
        prompt = joined(prompt, drops_attribution=True, in_front=True)
    request: dict[str, Any] = {
        "messages": [_message(message) for message in prompt.messages],
        "continue_final_message": prompt.continue_final_message,
    }
    if prompt.tools:
        request["tools"] = [_tool(tool["function"]) for tool in prompt.tools]
    return request


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else part["text"] for part in content if not is_media(part)]
        content = "\n".join(parts) if message["role"] == "assistant" else _chunks(parts)
    read: dict[str, Any] = {"role": message["role"], "content": content}
    if message.get("tool_calls"):
        read["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        read["tool_call_id"] = message["tool_call_id"][-CALL_ID_CHARS:]
    return read


def _chunks(parts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": call.get("id", "")[-CALL_ID_CHARS:],
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {},
        },
    }
