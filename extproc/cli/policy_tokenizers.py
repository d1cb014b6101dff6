"""Can the tokenizers of a policy be used, and how fast will they count? Found by loading them as the service does."""

from __future__ import annotations

from extproc.adapters.policy_file import PolicyError, Problem
from extproc.adapters.policy_file.problems import path_text
from extproc.adapters.tokens.errors import TokenizerUnusable
from extproc.adapters.tokens.load import load_tokens
from extproc.domain.policy import Engine, Policy


def load(policy: Policy, *, source: str) -> dict[str, str]:
    """For each model, how its tokens are counted. Raises `PolicyError` for all that cannot be loaded."""
    known: dict[tuple[str, str | None, Engine], str | TokenizerUnusable] = {}
    counted: dict[str, str] = {}
    problems: list[Problem] = []
    for model in policy.models.values():
        files = (model.tokenizer, model.chat_template, model.engine)
        if files not in known:
            known[files] = _load(*files)
        result = known[files]
        if isinstance(result, TokenizerUnusable):
            problems.append(Problem(path=path_text(("models", model.name, "tokenizer")), message=str(result)))
        else:
            counted[model.name] = result
    if problems:
        raise PolicyError(problems, source=source)
    return counted


def _load(tokenizer: str, chat_template: str | None, engine: Engine) -> str | TokenizerUnusable:
    try:
        tokens = load_tokens(tokenizer, chat_template, engine=engine, cache_bytes=1024)
    except TokenizerUnusable as unusable:
        return unusable
    how = "whole" if tokens.why_whole else "piece by piece"
    because = f" ({tokens.why_reference})" if tokens.why_reference else ""
    speed = f"with `{tokens.encoder_name}`{because}"
    return f"{how} {speed}"
