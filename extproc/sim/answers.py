"""What the simulated engine's answers look like on the wire: vLLM's for OpenAI paths, TGI's for its own.

The text is made of a few fixed words, one per token, so that a client can count tokens by counting words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from extproc.sim.asked import Api, Asked, Refused

_WORDS = ("tokens", "are", "admitted", "one", "by", "one", "while", "the", "queue", "drains")
_FINGERPRINT = "extproc-sim"
_TGI_ERROR_TYPES = {400: "validation", 503: "overloaded"}
_TGI_STATUS = {400: 422, 503: 429}  # TGI's numbers for what vLLM calls 400 and 503


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One output sequence: how long it will be, and how far the engine has come with it.

    `sent_tokens` is how far the stream has come; `finish_reason` is vLLM's word, told when it has ended.
    """

    index: int
    request_id: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    submitted_at_us: int = 0
    generated_tokens: int = 0
    sent_tokens: int = 0

    @property
    def is_complete(self) -> bool:
        return self.generated_tokens == self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What all parts of one answer have in common. `prompt_tokens` counts every prompt once."""

    asked: Asked
    id: str
    model: str
    created_at_s: int
    prompt_tokens: int
    choices: tuple[Choice, ...]


def token_text(number: int) -> str:
    """The text of output token `number`, counted from 0; all but the first begin with their space."""
    word = _WORDS[number % len(_WORDS)]
    return word if number == 0 else f" {word}"


def whole(answer: Answer) -> bytes:
    """The non-streaming answer."""
    if answer.asked.api.is_tgi:
        (choice,) = answer.choices
        body: dict[str, Any] = {"generated_text": _text(choice.output_tokens)}
        if answer.asked.details:
            body["details"] = _tgi_details(choice, prefill=answer.asked.prefill_details)
        return orjson.dumps(body)
    is_chat = answer.asked.api is Api.CHAT
    choices = [
        {
            "index": choice.index,
            **(
                {"message": {"role": "assistant", "content": _text(choice.output_tokens), "refusal": None}}
                if is_chat
                else {"text": _text(choice.output_tokens)}
            ),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
        }
        for choice in answer.choices
    ]
    return orjson.dumps(
        {
            **_head(answer, "chat.completion" if is_chat else "text_completion"),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": _FINGERPRINT,
            "usage": _usage(answer),
        }
    )


def headers(answer: Answer) -> dict[str, str]:
    """Headers of the non-streaming answer; TGI tells the usage here, whether asked to or not."""
    if not answer.asked.api.is_tgi:
        return {}
    (choice,) = answer.choices
    return {
        "x-prompt-tokens": str(choice.prompt_tokens),
        "x-generated-tokens": str(choice.output_tokens),
    }


def events(answer: Answer) -> bytes:
    """The stream's next part: an event for every token that has appeared since the last call, maybe none.

    Marks those tokens as sent. When the last sequence is complete, the stream's end is included.
    """
    parts = []
    for choice in answer.choices:
        fresh = range(choice.sent_tokens, choice.generated_tokens)
        choice.sent_tokens = choice.generated_tokens
        parts += [_event(answer, choice, number) for number in fresh]
    if all(choice.is_complete for choice in answer.choices) and not answer.asked.api.is_tgi:
        parts += _openai_end(answer)
    return b"".join(parts)


def error_body(api: Api, refused: Refused) -> tuple[int, bytes]:
    """Status and body of an error, in the caller's dialect."""
    if api.is_tgi:
        status = _TGI_STATUS.get(refused.status, refused.status)
        kind = _TGI_ERROR_TYPES.get(refused.status, "generation")
        return status, orjson.dumps({"error": refused.message, "error_type": kind})
    error = {
        "message": refused.message,
        "type": refused.kind,
        "param": refused.param,
        "code": refused.status,
    }
    return refused.status, orjson.dumps({"error": error})


def _event(answer: Answer, choice: Choice, number: int) -> bytes:
    is_last = number + 1 == choice.output_tokens
    if answer.asked.api.is_tgi:
        return _tgi_event(answer, choice, number, is_last=is_last)
    if answer.asked.api is Api.COMPLETIONS:
        return _chunk(answer, choice, {"text": token_text(number)}, number + 1, is_last=is_last)
    piece = _chunk(answer, choice, {"delta": {"content": token_text(number)}}, number + 1, is_last=is_last)
    if number > 0:
        return piece
    opening = {"delta": {"role": "assistant", "content": ""}}
    return _chunk(answer, choice, opening, 0, is_last=False) + piece


def _chunk(answer: Answer, choice: Choice, content: dict[str, Any], done: int, *, is_last: bool) -> bytes:
    body = {
        **_head(answer, "chat.completion.chunk" if answer.asked.api is Api.CHAT else "text_completion"),
        "choices": [
            {
                "index": choice.index,
                **content,
                "logprobs": None,
                "finish_reason": choice.finish_reason if is_last else None,
            }
        ],
    }
    if answer.asked.running_usage:
        body["usage"] = {
            "prompt_tokens": choice.prompt_tokens,
            "total_tokens": choice.prompt_tokens + done,
            "completion_tokens": done,
        }
    return _data(body)


def _openai_end(answer: Answer) -> list[bytes]:
    end = [b"data: [DONE]\n\n"]
    if not answer.asked.final_usage:
        return end
    kind = "chat.completion.chunk" if answer.asked.api is Api.CHAT else "text_completion"
    final = {**_head(answer, kind), "choices": [], "usage": _usage(answer)}
    return [_data({**final, "system_fingerprint": _FINGERPRINT}), *end]


def _tgi_event(answer: Answer, choice: Choice, number: int, *, is_last: bool) -> bytes:
    details = None
    if is_last and answer.asked.details:
        details = {
            "finish_reason": _tgi_finish_reason(choice),
            "generated_tokens": choice.output_tokens,
            "seed": None,
            "input_length": choice.prompt_tokens,
        }
    body = {
        "index": number + 1,
        "token": _tgi_token(number),
        "top_tokens": [],
        "generated_text": _text(choice.output_tokens) if is_last else None,
        "details": details,
    }
    return b"data:" + orjson.dumps(body) + b"\n\n"


def _tgi_details(choice: Choice, *, prefill: bool) -> dict[str, Any]:
    return {
        "finish_reason": _tgi_finish_reason(choice),
        "generated_tokens": choice.output_tokens,
        "seed": None,
        # TGI names the prompt's tokens here; how many they are is all that is true of ours.
        "prefill": [{"id": 0, "text": "", "logprob": None}] * (choice.prompt_tokens if prefill else 0),
        "tokens": [_tgi_token(number) for number in range(choice.output_tokens)],
    }


def _tgi_token(number: int) -> dict[str, Any]:
    return {"id": number % len(_WORDS), "text": token_text(number), "logprob": 0.0, "special": False}


def _tgi_finish_reason(choice: Choice) -> str:
    return "eos_token" if choice.finish_reason == "stop" else choice.finish_reason


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created_at_s, "model": answer.model}


def _usage(answer: Answer) -> dict[str, int]:
    completion = sum(choice.output_tokens for choice in answer.choices)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "total_tokens": answer.prompt_tokens + completion,
        "completion_tokens": completion,
    }


def _text(tokens: int) -> str:
    return "".join(token_text(number) for number in range(tokens))


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
