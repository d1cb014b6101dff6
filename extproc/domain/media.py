"""What an image, a recording or a file costs: by a rule of the policy, because no tokenizer can say.

A rule never makes a part cheaper than the engine may make it: what is not known counts as the rule's maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class MediaKind(StrEnum):
    """What a part of a message is if it is not text."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Images are cut into tiles of this size, the last ones filled up, each of so many tokens."""

    width_px: int
    height_px: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRule:
    """`base_tokens`, plus what tiles or seconds cost, and never more than `max_tokens`.

    `max_tokens` is also what a part counts whose size or length is not known; without tiles and seconds,
    every part does.
    """

    max_tokens: int
    base_tokens: int = 0
    tile: Tile | None = None
    tokens_per_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """One part of a request. `param` says where it stands; size and length are None where they are not known."""

    kind: MediaKind
    param: str
    width_px: int | None = None
    height_px: int | None = None
    duration_ms: int | None = None


def part_tokens(rule: MediaRule, part: MediaPart) -> int:
    """What one part counts."""
    if rule.tile is not None and part.width_px is not None and part.height_px is not None:
        # A camera's note in the file may turn the image; whichever way it is turned, it is not cheaper than this.
        tiles = max(
            _tiles(rule.tile, part.width_px, part.height_px), _tiles(rule.tile, part.height_px, part.width_px)
        )
        return min(rule.base_tokens + tiles * rule.tile.tokens, rule.max_tokens)
    if rule.tokens_per_s is not None and part.duration_ms is not None:
        return min(rule.base_tokens - (-part.duration_ms * rule.tokens_per_s // 1000), rule.max_tokens)
    return rule.max_tokens


def _tiles(tile: Tile, width_px: int, height_px: int) -> int:
    return -(-width_px // tile.width_px) * -(-height_px // tile.height_px)


def media_tokens(rules: Mapping[MediaKind, MediaRule], parts: Iterable[MediaPart]) -> int | MediaPart:
    """What all parts count together; or the first one that no rule is for."""
    tokens = 0
    for part in parts:
        rule = rules.get(part.kind)
        if rule is None:
            return part
        tokens += part_tokens(rule, part)
    return tokens
