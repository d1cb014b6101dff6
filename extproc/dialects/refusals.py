"""How a refusal is worded in each family of APIs: the body that its client libraries already parse.

All families carry the same facts: the reason, the accepted maximums, what was counted, how the request
waited, when to come back, and the request id. Nothing that a client typed is in them, and a message has at
most 200 characters.
"""

from __future__ import annotations

from typing import Any

from extproc.domain.contract import Refusal

LONGEST_MESSAGE = 200


def openai_error(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """OpenAI's error object. Its libraries expose `type`, `code` and `param`."""
    return {
        "error": {
            "message": _message(refusal),
            "type": refusal.row.openai_type,
            "param": refusal.param,
            "code": str(refusal.reason),
            **_facts(refusal, request_id),
        }
    }


def anthropic_error(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """Anthropic's error object. Its libraries expose `type`, `details.error_code` and the request id."""
    return {
        "type": "error",
        "error": {
            "type": refusal.row.anthropic_type,
            "message": _message(refusal),
            "details": {
                "error_code": str(refusal.reason),
                "param": refusal.param,
                **_facts(refusal, request_id),
            },
        },
        "request_id": request_id,
    }


def tgi_error(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """Text Generation Inference's flat error: a sentence and a type, and the facts beside them."""
    return {
        "error": _message(refusal),
        "error_type": refusal.row.tgi_type,
        "param": refusal.param,
        **_facts(refusal, request_id),
    }


def _message(refusal: Refusal) -> str:
    return refusal.message[:LONGEST_MESSAGE]


def _facts(refusal: Refusal, request_id: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"reason": str(refusal.reason)}
    if refusal.maximums is not None:
        facts["maximums"] = dict(refusal.maximums)
    if refusal.input_tokens is not None or refusal.output_tokens is not None:
        facts["counted"] = {"input_tokens": refusal.input_tokens, "output_tokens": refusal.output_tokens}
    if refusal.waited_ms is not None:
        facts["waited_ms"] = refusal.waited_ms
    if refusal.ahead_requests is not None:
        facts["ahead_requests"] = refusal.ahead_requests
    if refusal.retry_after_ms is not None:
        facts["retry_after"] = max(1, -(-refusal.retry_after_ms // 1000))
        facts["retry_after_ms"] = max(1, refusal.retry_after_ms)
    facts["request_id"] = request_id
    return facts
