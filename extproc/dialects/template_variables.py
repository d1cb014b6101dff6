"""What a request may hand to the chat template besides the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects import fields
from extproc.dialects.reading import BadRequest

NAME = "chat_template_kwargs"

REFUSED = frozenset({"messages", "conversation", "tokenize"})
"""Names that the engine itself gives to the renderer: a request that gives them too fails there."""

OVERRULED = frozenset({"add_generation_prompt", "continue_final_message"})
"""Names that are request fields of their own; in vLLM the field always wins, as it has a default."""


def template_variables(body: Mapping[str, Any], *, effort: str | None) -> dict[str, Any]:
    """The variables, as vLLM merges them. `effort` is how much the client wants the model to reason.

    The template itself is the policy's: a request cannot bring its own, for it would choose its own count.
    """
    variables = dict(fields.mapping(body, NAME) or {})
    for holder, param in ((body, "chat_template"), (variables, f"{NAME}.chat_template")):
        if holder.get("chat_template") is not None:
            raise BadRequest(
                f"`{param}` is not accepted: the policy of this gateway sets the chat template", param=param
            )
    for name in REFUSED:
        if name in variables:
            raise BadRequest(
                f"`{NAME}.{name}` is not a template variable; leave it out", param=f"{NAME}.{name}"
            )
    for name in OVERRULED | {"chat_template"}:
        variables.pop(name, None)
    if effort is not None:
        variables["reasoning_effort"] = effort
        # An effort switches thinking on in templates that ask for that, unless the request says otherwise.
        variables.setdefault("enable_thinking", effort != "none")
    return variables
