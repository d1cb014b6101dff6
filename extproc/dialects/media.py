"""Parts of a message that are not text: which kinds there are, and what a request says about their size.

The template sees such a part as vLLM shows it, `{"type": "image"}` and so on, if it reads parts, and not at all if it
wants text. So a rule says what a part adds to what the template prints: the image itself, and for templates that
want text the placeholder too. URLs of other machines are never fetched: their size is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects.media_headers import Base64Text, image_size_px, inline_data, wav_duration_ms
from extproc.domain.media import MediaKind, MediaPart

KINDS: Mapping[str, MediaKind] = {
    "image_url": MediaKind.IMAGE,
    "input_image": MediaKind.IMAGE,
    "image": MediaKind.IMAGE,
    "input_audio": MediaKind.AUDIO,
    "audio_url": MediaKind.AUDIO,
    "video_url": MediaKind.VIDEO,
    "input_video": MediaKind.VIDEO,
    "file": MediaKind.FILE,
    "input_file": MediaKind.FILE,
    "document": MediaKind.FILE,
}
"""Types of part in all APIs; whatever is not here is refused."""

_PLACES: Mapping[str, tuple[str, ...]] = {
    "image_url": ("image_url", "url"),
    "input_image": ("image_url", "url"),
    "image": ("source", "data"),
    "input_audio": ("input_audio", "data"),
    "audio_url": ("audio_url", "url"),
}
"""Where a part has its data or its URL; the last key is left out by some clients."""


def media_part(part: Mapping[str, Any], param: str) -> MediaPart | None:
    """What `part` is if it is not text; None for a type that is not known."""
    name = part.get("type")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not isinstance(name, str):
        return None
    data = _inline(part, _PLACES.get(name, ()))
    if data is not None and kind is MediaKind.IMAGE:
        size = image_size_px(data)
        if size is not None:
            return MediaPart(kind=kind, param=param, width_px=size[0], height_px=size[1])
    if data is not None and kind is MediaKind.AUDIO:
        return MediaPart(kind=kind, param=param, duration_ms=wav_duration_ms(data))
    return MediaPart(kind=kind, param=param)


def placeholder(part: MediaPart) -> dict[str, str]:
    """What a template that reads parts sees of it."""
    return {"type": str(part.kind)}


def _inline(part: Mapping[str, Any], place: tuple[str, ...]) -> Base64Text | None:
    value: Any = part
    for key in place:
        value = value.get(key) if isinstance(value, Mapping) else value
    if not place or not isinstance(value, str):
        return None
    if place[-1] == "url":
        return inline_data(value)
    return inline_data(value) or Base64Text(text=value)
