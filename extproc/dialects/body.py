"""From a body's JSON object to what it asks of a policy: whoever reads it and wherever.

Short bodies are read where they arrive, long ones elsewhere; this is what both make of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects.reading import BadRequest, Dialect, InferenceRequest
from extproc.domain.contract import Refusal
from extproc.domain.frozen import frozen
from extproc.domain.policy import Model, ModelFallback, Policy
from extproc.domain.prompt import Prompt, TextPrompt, TokenIdPrompt

MOST_PROMPTS = 8_192
"""How many texts or lists of token ids one request may hold. Each is a number in the decision, which is made on the
event loop; the hosted APIs take 2,048 at most."""


@frozen
class Body:
    """A request's body, whole and as it came, with what it takes to understand it.

    `renamable`: another model may be put into it. Header names are lower-case; `path` is the `:path` as it came.
    """

    raw: bytes
    headers: Mapping[str, str]
    path: str
    dialect: Dialect
    policy: Policy
    renamable: bool


@frozen
class BodyRead:
    """What the body asks for: `request`, of `model`. `instead` has it for the models of the fallbacks that the
    body may be sent to with their name in it.
    """

    model: Model
    request: InferenceRequest
    instead: Mapping[str, InferenceRequest]


@frozen
class BodyRefused:
    """The body is no request that is served here."""

    refusal: Refusal


def understood(body: Body, value: Mapping[str, Any]) -> BodyRead | BodyRefused:
    """What `body` asks for, whose JSON object is `value`."""
    try:
        request = body.dialect.read(value, body.path)
        _check_number(request.prompt)
        model = _model_named(body.policy, request.model)
        return BodyRead(
            model=model,
            request=request.priced(model.media),
            instead=_instead(body, value, model, request),
        )
    except BadRequest as bad:
        return refused(bad)


def _check_number(prompt: Prompt) -> None:
    number = 1
    if isinstance(prompt, TextPrompt):
        number = len(prompt.texts)
    elif isinstance(prompt, TokenIdPrompt):
        number = len(prompt.lengths_tokens)
    if number > MOST_PROMPTS:
        raise BadRequest(f"the request holds {number} prompts; the most that one may hold is {MOST_PROMPTS}")


def refused(bad: BadRequest) -> BodyRefused:
    """The refusal that `bad` means."""
    return BodyRefused(refusal=Refusal(reason=bad.reason, message=bad.message, param=bad.param))


def _model_named(policy: Policy, name: str | None) -> Model:
    """The model a body names; where the API has no such field, the only model there is."""
    if name is not None:
        model = policy.names.get(name)
    else:
        model = next(iter(policy.models.values())) if len(policy.models) == 1 else None
    if model is None:
        raise BadRequest(
            "The model is not served here; use a name that the gateway's operator gave you.", param="model"
        )
    return model


def _instead(
    body: Body, value: Mapping[str, Any], model: Model, request: InferenceRequest
) -> dict[str, InferenceRequest]:
    names = [one.model for one in model.fallbacks if isinstance(one, ModelFallback)]
    if not names or not body.renamable or not isinstance(value.get("model"), str):
        return {}
    # Would the name in the body be the one that counts? Some APIs name the model in the path.
    if body.dialect.read({**value, "model": names[0]}, body.path).model != names[0]:
        return {}
    instead: dict[str, InferenceRequest] = {}
    for name in names:
        try:
            instead[name] = request.priced(body.policy.models[name].media)
        except BadRequest:  # no rule says what its media cost this model
            continue
    return instead
