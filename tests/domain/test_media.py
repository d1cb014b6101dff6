"""What a policy's rules make of images, recordings and files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.media import MediaKind, MediaPart, MediaRule, Tile, media_tokens, part_tokens

GRID = MediaRule(max_tokens=1_000, base_tokens=2, tile=Tile(width_px=28, height_px=28, tokens=1))
TILES = MediaRule(max_tokens=3_000, base_tokens=85, tile=Tile(width_px=512, height_px=512, tokens=170))
TALL = MediaRule(max_tokens=3_000, tile=Tile(width_px=100, height_px=200, tokens=10))
SOUND = MediaRule(max_tokens=500, base_tokens=3, tokens_per_s=25)
FIXED = MediaRule(max_tokens=576)


def image(width_px: int | None, height_px: int | None) -> MediaPart:
    return MediaPart(kind=MediaKind.IMAGE, param="x", width_px=width_px, height_px=height_px)


def sound(duration_ms: int | None) -> MediaPart:
    return MediaPart(kind=MediaKind.AUDIO, param="x", duration_ms=duration_ms)


@pytest.mark.parametrize(
    ("rule", "part", "tokens"),
    [
        (FIXED, image(10, 10), 576),
        (FIXED, image(None, None), 576),
        (TILES, image(512, 512), 85 + 170),
        (TILES, image(513, 512), 85 + 2 * 170),
        (TILES, image(1024, 1024), 85 + 4 * 170),
        (TILES, image(60_000, 60_000), 3_000),
        (TILES, image(None, None), 3_000),
        (GRID, image(280, 281), 2 + 10 * 11),
        (TALL, image(200, 200), 20),
        (TALL, image(200, 100), 20),
        (TALL, image(100, 400), 40),
        (TALL, image(400, 100), 40),
        (SOUND, sound(1), 4),
        (SOUND, sound(1_000), 28),
        (SOUND, sound(1_001), 29),
        (SOUND, sound(60_000), 500),
        (SOUND, sound(None), 500),
        (SOUND, image(10, 10), 500),
    ],
)
def test_a_part_costs_what_its_rule_says(rule: MediaRule, part: MediaPart, tokens: int) -> None:
    """Tiles and seconds are rounded up, turned images are no cheaper, and the unknown counts the maximum."""
    assert part_tokens(rule, part) == tokens


def test_parts_add_up_and_one_without_a_rule_is_named() -> None:
    """Nothing is left out: every part is counted, or the request has no count."""
    rules = {MediaKind.IMAGE: FIXED}
    assert media_tokens(rules, [image(1, 1), image(None, None)]) == 2 * 576
    assert media_tokens(rules, []) == 0
    assert media_tokens(rules, [image(1, 1), sound(5), sound(6)]) == sound(5)


@given(
    width_px=st.integers(1, 70_000),
    height_px=st.integers(1, 70_000),
    wider_px=st.integers(0, 5_000),
    rule=st.sampled_from([GRID, TILES, TALL, FIXED]),
)
def test_a_larger_image_is_never_cheaper(
    width_px: int, height_px: int, wider_px: int, rule: MediaRule
) -> None:
    """And none costs more than one of unknown size."""
    smaller = part_tokens(rule, image(width_px, height_px))
    assert smaller <= part_tokens(rule, image(width_px + wider_px, height_px)) <= rule.max_tokens
