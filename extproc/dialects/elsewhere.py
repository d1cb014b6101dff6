"""Fields by which an engine takes a prompt, or a limit, from another place than the API's own fields.

Ignoring such a field would make a gate of no use: a request that reads as ten tokens is answered from a hundred
thousand. A hidden prompt is refused. A second limit is read, and counts where it is the larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.reading import BadRequest

HIDDEN_PROMPTS = ("session_params", "prompt_token_ids", "input_ids", "prompt_embeds", "input_embeds")
"""SGLang's sessions go on from what the engine holds; the others replace the conversation by ids or vectors."""

NO_LIMIT = -1
"""llama.cpp's word for "until the window is full"."""


def refuse_hidden_prompts(body: Mapping[str, Any]) -> None:
    """Raise `BadRequest` if the engine would read another prompt than the one in the API's own fields."""
    for name in HIDDEN_PROMPTS:
        if body.get(name) is not None:
            raise _refusal(name)
    # vLLM takes these ids for the prompt and never renders the messages (disaggregated prefill).
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, Mapping) and transfer.get("prompt_token_ids") is not None:
        raise _refusal("kv_transfer_params.prompt_token_ids")


def larger_limit(body: Mapping[str, Any], limit_tokens: int | None) -> int | None:
    """`limit_tokens`, or what `n_predict` makes of it: llama.cpp heeds that before the API's own limit."""
    if type(body.get("n_predict")) is int and body["n_predict"] == NO_LIMIT:
        return None
    predicted_tokens = fields.bounded_integer(body, "n_predict")
    if predicted_tokens is None or limit_tokens is None:
        return limit_tokens
    return max(predicted_tokens, limit_tokens)


def _refusal(param: str) -> BadRequest:
    return BadRequest(
        f"`{param}` is not accepted: the prompt that it stands for cannot be counted here; send it as text",
        param=param,
    )
