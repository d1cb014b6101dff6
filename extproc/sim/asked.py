"""What a request body asks of the simulated engine, and how the engine says no.

This is the engine's own reading, as independent of the service's dialects as a real engine's is: only
so can a test that puts the two together find a disagreement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

# What the engines grant a request that names no limit; a chat without one may fill the context.
_COMPLETION_DEFAULT_TOKENS = 16
_TGI_DEFAULT_TOKENS = 100
_MAX_COPIES = 128


class Api(StrEnum):
    """The inference endpoints, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    TGI = "/generate"
    TGI_STREAM = "/generate_stream"

    @property
    def is_tgi(self) -> bool:
        return self in {Api.TGI, Api.TGI_STREAM}


class Refused(Exception):
    """The engine answers with an error. `kind` is an OpenAI error type, translated for TGI callers."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body's demands. Every prompt is a body of its own, for a counter that expects just one prompt.

    `ceiling_tokens` is None where the caller leaves it to the context; it holds per sequence, and there are
    `copies` sequences of every prompt.
    """

    api: Api
    model: str | None
    prompts: tuple[Mapping[str, Any], ...]
    copies: int = 1
    ceiling_tokens: int | None
    ignore_eos: bool = False
    stream: bool = False
    final_usage: bool = False  # a chunk with the usage at the end of the stream
    running_usage: bool = False  # and the usage so far in every chunk
    details: bool = False  # TGI's word for usage
    prefill_details: bool = False  # and, in a whole answer, a list of the prompt's tokens


def read(api: Api, raw: bytes) -> Asked:
    """Parse a body; raises Refused (400) with the field's name for what the engine would not accept."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused("The body is not valid JSON.", param=None) from error
    if not isinstance(body, dict):
        raise Refused("The body must be a JSON object.", param=None)
    return _read_tgi(api, body) if api.is_tgi else _read_openai(api, body)


def _read_openai(api: Api, body: dict[str, Any]) -> Asked:
    prompts: tuple[Mapping[str, Any], ...] = (body,)
    if api is Api.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise Refused("messages must be a list of objects.", param="messages")
    else:
        prompts = tuple({**body, "prompt": prompt} for prompt in _prompts(body.get("prompt")))
    ceiling = _count(body, "max_completion_tokens") or _count(body, "max_tokens")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused("stream_options must be an object.", param="stream_options")
    stream = body.get("stream") is True
    final_usage = stream and options.get("include_usage") is True
    model = body.get("model")
    return Asked(
        api=api,
        model=model if isinstance(model, str) else None,
        prompts=prompts,
        copies=_count(body, "n", most=_MAX_COPIES) or 1,
        ceiling_tokens=ceiling or (_COMPLETION_DEFAULT_TOKENS if api is Api.COMPLETIONS else None),
        ignore_eos=body.get("ignore_eos") is True,
        stream=stream,
        final_usage=final_usage,
        running_usage=final_usage and options.get("continuous_usage_stats") is True,
    )


def _read_tgi(api: Api, body: dict[str, Any]) -> Asked:
    if not isinstance(body.get("inputs"), str):
        raise Refused("inputs must be a string.", param="inputs")
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise Refused("parameters must be an object.", param="parameters")
    prefill_details = parameters.get("decoder_input_details") is True
    return Asked(
        api=api,
        model=None,
        prompts=(body,),
        ceiling_tokens=_count(parameters, "max_new_tokens") or _TGI_DEFAULT_TOKENS,
        ignore_eos=parameters.get("ignore_eos") is True,
        stream=api is Api.TGI_STREAM,
        details=parameters.get("details") is True or prefill_details,
        prefill_details=prefill_details,
    )


def _prompts(prompt: object) -> list[Any]:
    """One prompt (text or token ids), or a list of prompts, as a list of prompts."""
    match prompt:
        case str() | [int(), *_]:
            return [prompt]
        case [str() | [int(), *_], *_] if all(isinstance(one, (str, list)) for one in prompt):
            return list(prompt)
        case _:
            raise Refused("prompt must be a text, a list of token ids, or a list of those.", param="prompt")


def _count(fields: Mapping[str, Any], name: str, *, most: int | None = None) -> int | None:
    """A positive whole number, or None where the field is absent or null."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most}"
        raise Refused(f"{name} must be a whole number of at least 1{bound}.", param=name)
    return value


def count_words(path: str, body: Mapping[str, Any]) -> int:
    """The default counter: words between white space in all the prompt's text, and at least 1.

    `body` holds one prompt; token ids count as they are.
    """
    match Api(path):
        case Api.CHAT:
            texts = [text for message in body["messages"] for text in _texts(message.get("content"))]
        case Api.COMPLETIONS:
            prompt = body["prompt"]
            if isinstance(prompt, list):
                return len(prompt)
            texts = [prompt]
        case _:
            texts = [body["inputs"]]
    return max(1, sum(len(text.split()) for text in texts))


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
    return []


def draw_tokens(raw: bytes, index: int, *, least: int, most: int) -> int:
    """The length at which sequence `index` of this body would end by itself: the same body, the same length."""
    digest = hashlib.sha256(raw + index.to_bytes(4, "big")).digest()
    return least + int.from_bytes(digest[:8], "big") % (most - least + 1)
