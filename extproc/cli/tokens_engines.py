"""What an engine itself says about a request: by its tokenizer routes, or by the usage of a real answer.

vLLM's `/tokenize` takes the conversation or the prompt and answers a `count`. llama.cpp renders in
`/apply-template` and encodes in `/tokenize`. Both have `/v1/messages/count_tokens` for Anthropic's API. What an
engine says in words is never shown: it may quote the prompt.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Literal

import orjson

from extproc.cli.tokens_counting import Read
from extproc.cli.tokens_source import SourceRequest
from extproc.dialects.reading import JsonPath, UsageField
from extproc.domain.prompt import ChatPrompt, TextPrompt, TokenIdPrompt

MOST_BYTES = 256 * 1024 * 1024

EngineKind = Literal["vllm", "llama.cpp"]

_CHAT_FIELDS = ("model", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens")
"""What vLLM's `/tokenize` takes of a chat request as it is."""

_ONE_TOKEN: Mapping[str, Mapping[str, Any]] = {
    "openai_chat": {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "best_of": None, "n_predict": None},
    "openai_completions": {"max_tokens": 1, "n": 1, "best_of": None, "n_predict": None, "echo": None},
    "openai_responses": {"max_output_tokens": 1},
    "anthropic_messages": {"max_tokens": 1},
    "llama_cpp": {"n_predict": 1, "max_tokens": None, "n": None, "n_cmpl": None},
    "vllm_tokens": {"sampling_params": {"max_tokens": 1}},
    "kserve": {"max_tokens": 1, "parameters": {"max_tokens": 1}, "sampling_parameters": None},
}
"""How to ask each API for one token only; a null takes the field away."""

_ONE_NEW_TOKEN: Mapping[str, Any] = {"max_new_tokens": 1}


class NoAnswer(Exception):
    """The engine gave no count. The text names address, status and remedy, and quotes nothing of a request."""


class Engine:
    """Asks one engine. May be used by several threads at once."""

    def __init__(self, url: str, *, headers: Mapping[str, str], timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._headers = {**headers, "content-type": "application/json"}
        self._timeout_s = timeout_s

    def kind(self) -> EngineKind:
        """Whose `/tokenize` is it? Found by asking for one letter in both forms. Raises `NoAnswer`."""
        answer = self._post("/tokenize", {"prompt": "a", "content": "a"})
        if isinstance(answer, Mapping) and isinstance(answer.get("count"), int):
            return "vllm"
        if isinstance(answer, Mapping) and isinstance(answer.get("tokens"), list):
            return "llama.cpp"
        raise NoAnswer(
            f"{self._url}/tokenize answers in a form that is neither vLLM's nor llama.cpp's; compare with --usage"
        )

    def tokenized(self, kind: EngineKind) -> Callable[[SourceRequest, Read], int]:
        """A function that counts a request by the engine's tokenizer routes. It raises `NoAnswer`."""
        ask_text, ask_chat = (
            (self._vllm_text, self._vllm_chat) if kind == "vllm" else (self._llama_text, self._llama_chat)
        )

        def count(source: SourceRequest, read: Read) -> int:
            if read.dialect.name == "anthropic_messages":
                return _count(
                    self._post(f"{source.path}/count_tokens", orjson.loads(source.raw)), "input_tokens"
                )
            match read.request.prompt:
                case ChatPrompt() as prompt:
                    counts: tuple[int, ...] = (ask_chat(_chat_body(source, read, prompt), prompt),)
                case TextPrompt(texts=texts, add_special_tokens=special):
                    counts = tuple(ask_text(text, special=special) for text in texts)
                case TokenIdPrompt(lengths_tokens=counts):
                    pass
            # These routes know of no truncation.
            return sum(read.request.kept_tokens(counts, context_tokens=read.context_tokens))

        return count

    def used(self, source: SourceRequest, read: Read) -> int:
        """The input tokens in the usage of a real answer of one token. Raises `NoAnswer`."""
        body = orjson.loads(source.raw)
        body |= {"stream": False}
        body.pop("stream_options", None)
        for key, value in one_token(read.dialect.name, body).items():
            if value is None:
                body.pop(key, None)
            elif isinstance(value, Mapping):
                body[key] = {**(body.get(key) or {}), **value}
            else:
                body[key] = value
        answer, headers = self._ask(source.path, body)
        usage = read.dialect.usage
        in_header = "" if usage.input_header is None else headers.get(usage.input_header, "")
        counts = [_number_at(answer, field) for field in usage.input_fields]
        found = [count for count in counts if count is not None]
        if found:
            return sum(found)
        if in_header.isdecimal():
            return int(in_header)
        raise NoAnswer(f"{self._url}{source.path} tells no usage of input tokens in its answer")

    def _vllm_chat(self, body: Mapping[str, Any], prompt: ChatPrompt) -> int:
        asked = {key: body[key] for key in _CHAT_FIELDS if key in body}
        # It knows no documents, no efforts and no `reasoning_content`: the template gets them all the same.
        asked["messages"] = [_renamed(message) for message in body["messages"]]
        variables = {
            **prompt.template_kwargs,
            **({"documents": prompt.documents} if prompt.documents else {}),
        }
        if variables:
            asked["chat_template_kwargs"] = variables
        return _count(self._post("/tokenize", asked), "count")

    def _vllm_text(self, text: str, *, special: bool) -> int:
        return _count(self._post("/tokenize", {"prompt": text, "add_special_tokens": special}), "count")

    def _llama_chat(self, body: Mapping[str, Any], prompt: ChatPrompt) -> int:
        del prompt
        rendered = self._post("/apply-template", body)
        text = rendered.get("prompt") if isinstance(rendered, Mapping) else None
        if not isinstance(text, str):
            raise NoAnswer(f"{self._url}/apply-template tells no prompt; compare with --usage")
        return self._llama_text(text, special=True)

    def _llama_text(self, text: str, *, special: bool) -> int:
        # "Special" is BOS here; markers in the text are parsed as in a completion.
        body = {"content": text, "add_special": special, "parse_special": True}
        return _count(self._post("/tokenize", body), "tokens")

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask(path, body)[0]

    def _ask(self, path: str, body: Mapping[str, Any]) -> tuple[Any, Mapping[str, str]]:
        request = urllib.request.Request(  # noqa: S310 - the command takes http and https only
            self._url + path, data=orjson.dumps(body), headers=dict(self._headers), method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:  # noqa: S310 - as above
                return orjson.loads(answer.read(MOST_BYTES)), answer.headers
        except urllib.error.HTTPError as error:
            error.close()
            raise NoAnswer(f"{self._url}{path} answers with status {error.code}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or type(error).__name__
            raise NoAnswer(
                f"no answer from {self._url}{path} ({reason}); is the engine running, and is --against its address?"
            ) from None


def one_token(dialect: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that make a request of `dialect` one for a single token."""
    if dialect == "sagemaker":
        for name, other in (("messages", "openai_chat"), ("prompt", "openai_completions")):
            if body.get(name) is not None:
                return _ONE_TOKEN[other]
    if dialect in ("tgi", "generate", "sagemaker"):
        return {"parameters" if body.get("inputs") is not None else "sampling_params": _ONE_NEW_TOKEN}
    return _ONE_TOKEN.get(dialect, {})


def _chat_body(source: SourceRequest, read: Read, prompt: ChatPrompt) -> Mapping[str, Any]:
    """The chat request to ask about: the client's own, or what another API's request means as one."""
    if read.dialect.name == "openai_chat":
        body: Mapping[str, Any] = orjson.loads(source.raw)
        return body
    asked: dict[str, Any] = {
        "messages": [_sent(message) for message in prompt.messages],
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
    }
    if read.request.model is not None:
        asked["model"] = read.request.model
    if prompt.tools is not None:
        asked["tools"] = prompt.tools
    if prompt.template_kwargs:
        asked["chat_template_kwargs"] = prompt.template_kwargs
    return asked


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat clients write it: nothing that is null, and the arguments of calls as JSON text."""
    sent = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            for call in sent["tool_calls"]
        ]
    return sent


def _renamed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose thoughts have the name that vLLM gives them before it looks at a chat request."""
    renamed = dict(message)
    thoughts = renamed.pop("reasoning_content", None)
    if thoughts is not None and renamed.get("reasoning") is None:
        renamed["reasoning"] = thoughts
    return renamed


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()


def _count(answer: Any, name: str) -> int:
    value = answer.get(name) if isinstance(answer, Mapping) else None
    if isinstance(value, list):
        return len(value)
    if type(value) is int:
        return value
    raise NoAnswer(f"the engine's tokenizer route tells no `{name}`; compare with --usage")


def _number_at(answer: Any, field: UsageField) -> int | None:
    found = None
    for path in field.body:
        value = _at(answer, path)
        if type(value) is int:
            found = value
    return found


def _at(value: Any, path: JsonPath) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
