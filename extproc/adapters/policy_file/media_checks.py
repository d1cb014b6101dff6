"""Contradictions in what media cost: rules that say half, and rules that no request could meet."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.adapters.policy_file.problems import ABSENT, Finding, Path
from extproc.adapters.policy_file.schema import ImageRuleSpec, PolicySpec, RecordingRuleSpec
from extproc.adapters.policy_file.serving_checks import Check

_TILE_KEYS = ("tile_width_px", "tile_height_px", "tokens_per_tile")


def media(spec: PolicySpec) -> Iterator[Finding]:
    """Tiles have all their measures, and a part fits into the window and into its own maximum."""
    for name, model in spec.models.items():
        for kind, rule in model.media.rules().items():
            path: Path = ("models", name, "media", str(kind))
            most: Path = (*path, "max_tokens")
            if isinstance(rule, ImageRuleSpec):
                yield from _tiles(rule, path)
            if rule.max_tokens >= model.context_tokens:
                yield Finding(
                    path=most,
                    message=f"leaves no room for anything else in a window of {model.context_tokens} tokens; "
                    "lower it to what the engine makes of one part at most",
                    value=rule.max_tokens,
                    about=(most, ("models", name, "context_tokens")),
                )
            if isinstance(rule, ImageRuleSpec | RecordingRuleSpec) and rule.base_tokens > rule.max_tokens:
                yield Finding(
                    path=(*path, "base_tokens"),
                    message=f"is more than max_tokens ({rule.max_tokens}); lower it or raise that",
                    value=rule.base_tokens,
                    about=((*path, "base_tokens"), most),
                )


def _tiles(rule: ImageRuleSpec, path: Path) -> Iterator[Finding]:
    given = [key for key in _TILE_KEYS if getattr(rule, key) is not None]
    if not given:
        return
    for key in _TILE_KEYS:
        if key not in given:
            yield Finding(
                path=(*path, key),
                message=f"is needed with {' and '.join(given)}; give it, or leave out all three",
                value=ABSENT,
                about=tuple((*path, each) for each in _TILE_KEYS),
            )


MEDIA_CHECKS: tuple[Check, ...] = (media,)
