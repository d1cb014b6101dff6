"""How large is an image, how long is a recording? Read from a few header bytes of base64 text, nothing decoded.

Base64 without line breaks can be read at any place, so a header behind a large preview costs no more than one in
front. Whatever is not understood has no size: the rule's maximum then counts. The sizes are those that decoders go
by, so a header that lies makes an image of the size it tells.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass

MOST_SEGMENTS = 256
"""A JPEG or WAV file with more parts before the one that tells its size is not looked at any further."""

LARGEST_SIDE_PX = 1 << 24
"""WebP's largest; what is larger is no image that an engine opens."""

_PCM = frozenset({1, 3})
"""WAV formats in which every sample takes the same room: integers and floating point."""

_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Base64Text:
    """Bytes as base64 text from `start` on."""

    text: str
    start: int = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes it stands for."""
        chars = len(self.text) - self.start
        return chars // 4 * 3 - self.text.endswith("=") - self.text.endswith("==")

    def read(self, at: int, length: int) -> bytes:
        """`length` bytes from `at` on; fewer at the end, none where it is not base64."""
        first = self.start + at // 3 * 4
        last = self.start + (at + length + 2) // 3 * 4
        try:
            data = binascii.a2b_base64(self.text[first:last], strict_mode=True)
        except ValueError:  # characters beyond ASCII, line breaks, a broken end
            return b""
        return data[at % 3 : at % 3 + length]


def inline_data(url: str) -> Base64Text | None:
    """The bytes of a `data:` URL in base64; None for every other URL."""
    if url[:5].lower() != "data:":
        return None
    comma = url.find(",", 0, 512)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        return None
    return Base64Text(text=url, start=comma + 1)


def image_size_px(data: Base64Text) -> tuple[int, int] | None:
    """Width and height of a PNG, JPEG, GIF or WebP image."""
    head = data.read(0, 30)
    size = None
    if head[:8] == b"\x89PNG\r\n\x1a\n" and head[12:16] == b"IHDR":
        size = _big(head[16:20]), _big(head[20:24])
    elif head[:6] in (b"GIF87a", b"GIF89a"):
        size = _little(head[6:8]), _little(head[8:10])
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) == 30:
        size = _webp(head)
    elif head[:2] == b"\xff\xd8":
        size = _jpeg(data)
    if size is None or not all(1 <= side <= LARGEST_SIDE_PX for side in size):
        return None
    return size


def wav_duration_ms(data: Base64Text) -> int | None:
    """How long a WAV recording without compression plays, rounded up. All that follows its header counts as sound."""
    head = data.read(0, 12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return None
    at = 12
    for _ in range(MOST_SEGMENTS):
        chunk = data.read(at, 24)
        if len(chunk) < 24:
            return None
        if chunk[:4] == b"fmt ":
            bits_per_s = _little(chunk[12:16]) * _little(chunk[10:12]) * _little(chunk[22:24])
            if _little(chunk[8:10]) not in _PCM or bits_per_s == 0:
                return None
            return -(-data.size_bytes * 8 * 1000 // bits_per_s)
        size_bytes = _little(chunk[4:8])
        at += 8 + size_bytes + size_bytes % 2
    return None


def _jpeg(data: Base64Text) -> tuple[int, int] | None:
    at = 2
    for _ in range(MOST_SEGMENTS):
        segment = data.read(at, 9)
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        marker = segment[1]
        if marker == 0xFF:  # filling
            at += 1
        elif marker in _JPEG_ALONE:
            at += 2
        elif marker in _JPEG_SIZES:
            return _big(segment[7:9]), _big(segment[5:7])
        else:
            at += 2 + max(2, _big(segment[2:4]))
    return None


def _webp(head: bytes) -> tuple[int, int] | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return _little(head[24:27]) + 1, _little(head[27:30]) + 1
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        return _little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF
    if kind == b"VP8L" and head[20] == 0x2F:
        bits = _little(head[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return None


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
