"""Parts that are not text: how large they are, by a few bytes of their headers, and where they go."""

from __future__ import annotations

import base64
import io
import struct
import wave
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects import anthropic_messages, openai_chat, openai_responses
from extproc.dialects.media_headers import Base64Text, image_size_px, inline_data, wav_duration_ms
from extproc.dialects.reading import BadRequest, InferenceRequest
from extproc.domain.media import MediaKind, MediaPart, MediaRule
from extproc.domain.prompt import ChatPrompt

# Seventeen by nine pixels, each made by an image library.
PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAABEAAAAJCAIAAABbilBbAAAAF0lEQVR4nGM8wSXHQCJgIlXDqB666gEAx+EBAhJ/SEwAAAAASUVORK5C"
    "YII="
)
GIF = (
    "R0lGODdhEQAJAIIAAJkAAMwAAJkzAMwzAJkAM8wAM5kzM8wzMywAAAAAEQAJAAAISAALBBBIcKDBggUEHlDIMMBChwgPEpx4cEBCiw4H"
    "YjwwMOFAAAlBFgAZgIBGjw8XWrTI8aHHiC8pFmB5smYBAQhFDjRg0EDBgAA7"
)
WEBP_LOSSY = (
    "UklGRkYAAABXRUJQVlA4IDoAAADwAgCdASoRAAkAPm0skUWkIqGYBABABsSgC7LoAAgbAAD+8ZWP0Jse1Ff/3Bx/2cD/ucD93E7cAAAA"
)
WEBP_LOSSLESS = "UklGRh4AAABXRUJQVlA4TBEAAAAvEAACAAdQhSLXo/+BiOh/AAA="
WEBP_ALPHA = (
    "UklGRmoAAABXRUJQVlA4WAoAAAAQAAAAEAAACAAAQUxQSAoAAAABB1CtiAhERP8DVlA4IDoAAADwAgCdASoRAAkAPm0skUWkIqGYBABA"
    "BsSgC7LoAAgbAAD+8ZWP0Jse1Ff/3Bx/2cD/ucD93E7cAAAA"
)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def jpeg(*segments: tuple[int, bytes]) -> str:
    """A JPEG file with these segments, up to where its picture would begin."""
    parts = [struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data for marker, data in segments]
    return b64(b"\xff\xd8" + b"".join(parts) + b"\xff\xda\x00\x02")


def frame(width_px: int, height_px: int) -> bytes:
    return struct.pack(">BHHB", 8, height_px, width_px, 3) + b"\x01\x22\x00" * 3


EXIF = (0xE1, b"Exif\0\0" + b"x" * 65_000)
TABLES = (0xC4, b"\0" * 40)
JPEGS = {
    "baseline": jpeg((0xE0, b"JFIF\0"), (0xC0, frame(17, 9))),
    "progressive, after tables": jpeg((0xDB, b"\0" * 65), TABLES, (0xC2, frame(17, 9))),
    "behind large previews": jpeg(EXIF, EXIF, EXIF, EXIF, (0xC0, frame(17, 9))),
}


@pytest.mark.parametrize(
    "text", [PNG, GIF, WEBP_LOSSY, WEBP_LOSSLESS, WEBP_ALPHA, *JPEGS.values()], ids=lambda text: text[:12]
)
def test_the_size_of_an_image_is_in_its_header(text: str) -> None:
    """For every format, alone or in a `data:` URL."""
    assert image_size_px(Base64Text(text=text)) == (17, 9)
    inline = inline_data(f"DATA:image/x;charset=x;BASE64,{text}")
    assert inline is not None
    assert image_size_px(inline) == (17, 9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "====",
        "é" * 100,
        PNG[:20],
        PNG[:10] + "\n" + PNG[10:],
        b64(b"<svg width='1' height='1'/>" * 3),
        b64(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\0" * 8 + b"x" * 20),
        b64(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\xff" * 8 + b"x" * 20),
        jpeg((0xE0, b"x"), (0xD9, b"")),
        jpeg(*[(0xE1, b"")] * 300, (0xC0, frame(17, 9))),
        b64(b"\xff\xd8" + b"\xff" * 1_000),
        b64(b"RIFF____WEBPVP8 " + b"\0" * 20),
    ],
)
def test_what_is_not_understood_has_no_size(text: str) -> None:
    """Cut, broken, endless or foreign data is an image of unknown size, never an error."""
    assert image_size_px(Base64Text(text=text)) is None


@given(st.binary(max_size=200), st.sampled_from([PNG, GIF, WEBP_LOSSY, WEBP_LOSSLESS, *JPEGS.values()]))
def test_no_header_raises(noise: bytes, text: str) -> None:
    """Whatever follows a good beginning, there is a size or none."""
    for head in range(0, 40, 4):
        mixed = text[:head] + b64(noise)
        for found in (image_size_px(Base64Text(text=mixed)), wav_duration_ms(Base64Text(text=mixed))):
            assert found is None or isinstance(found, tuple | int)


def test_only_a_few_bytes_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large inline image costs no more than a small one."""
    decoded = 0
    real: Callable[..., bytes] = base64.binascii.a2b_base64  # type: ignore[attr-defined]

    def counted(text: str, **options: bool) -> bytes:
        nonlocal decoded
        decoded += len(text)
        return real(text, **options)

    monkeypatch.setattr("binascii.a2b_base64", counted)
    assert image_size_px(Base64Text(text=PNG + "A" * 4_000_000)) == (17, 9)
    assert image_size_px(Base64Text(text=JPEGS["behind large previews"])) == (17, 9)
    assert decoded < 300


def recording(seconds: float, *, channels: int = 1, rate: int = 8_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(b"\0" * (int(seconds * rate) * channels * 2))
    return file.getvalue()


@pytest.mark.parametrize("seconds", [0.5, 1, 2.25])
def test_a_recordings_length_is_that_of_its_data(seconds: float) -> None:
    """Counted from what is there, not from what the header says there is; never too short."""
    data = recording(seconds, channels=2, rate=16_000)
    found = wav_duration_ms(Base64Text(text=b64(data)))
    assert found is not None
    assert seconds * 1000 <= found <= seconds * 1000 + 1
    lying = data[:40] + b"\0\0\0\0" + data[44:]
    assert wav_duration_ms(Base64Text(text=b64(lying))) == found


@pytest.mark.parametrize(
    "data", [b"", b"ID3", recording(1)[:30], recording(1).replace(b"\x01\0\x01\0", b"\x55\0\x01\0", 1)]
)
def test_other_recordings_have_no_length(data: bytes) -> None:
    """Compressed sound and what is no sound at all."""
    assert wav_duration_ms(Base64Text(text=b64(data))) is None


IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
REMOTE = {"type": "image_url", "image_url": {"url": "https://example.org/large.png"}}
SOUND = {"type": "input_audio", "input_audio": {"data": b64(recording(1)), "format": "wav"}}
FILE = {"type": "file", "file": {"file_data": "JVBERi0="}}
RULES = {
    MediaKind.IMAGE: MediaRule(max_tokens=700),
    MediaKind.AUDIO: MediaRule(max_tokens=500, tokens_per_s=10),
}


def chat(*parts: dict[str, Any]) -> InferenceRequest:
    content = [{"type": "text", "text": "See:"}, *parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return openai_chat.read(body, "/v1/chat/completions")


def test_a_chats_media_are_found_and_leave_their_type() -> None:
    """The template sees that something is there; size and length go to the rules."""
    request = chat(IMAGE, REMOTE, SOUND, FILE)
    image, remote, sound, file = request.media
    assert (image.width_px, image.height_px) == (17, 9)
    assert remote == MediaPart(kind=MediaKind.IMAGE, param="messages[0].content[2]")
    assert sound.kind is MediaKind.AUDIO
    assert 1_000 <= (sound.duration_ms or 0) <= 1_006
    assert file.kind is MediaKind.FILE
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages[0]["content"] == [
        {"type": "text", "text": "See:"},
        {"type": "image"},
        {"type": "image"},
        {"type": "audio"},
        {"type": "file"},
    ]


def test_rules_count_media_or_refuse_them() -> None:
    """What a rule counts is input on top of the text; what has none is refused where it stands."""
    priced = chat(IMAGE, SOUND).priced(RULES)
    assert priced.extra_input_tokens == 700 + 11
    assert priced.priced({}) == priced
    assert priced.input_tokens((5,), context_tokens=99) == (716,)
    with pytest.raises(BadRequest) as refused:
        chat(IMAGE, FILE).priced(RULES)
    assert refused.value.param == "messages[0].content[2]"
    assert "files" in refused.value.message
    assert chat().priced({}).extra_input_tokens == 0


def test_other_apis_find_media_too() -> None:
    """Responses and Anthropic's messages, inside a tool's result as well."""
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ok"}, block]}
    remote = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
    document = {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}
    messages = [{"role": "user", "content": [result, block, remote, document]}]
    body = {"model": "m", "max_tokens": 1, "messages": messages}
    request = anthropic_messages.read(body, "/v1/messages")
    kinds = [(part.kind, part.width_px) for part in request.media]
    assert kinds == [
        (MediaKind.IMAGE, 17),
        (MediaKind.IMAGE, 17),
        (MediaKind.IMAGE, None),
        (MediaKind.FILE, None),
    ]
    inline = {"type": "input_image", "image_url": f"data:image/gif;base64,{GIF}"}
    items = [{"role": "user", "content": [inline, {"type": "input_file", "file_id": "f"}]}]
    request = openai_responses.read({"model": "m", "input": items}, "/v1/responses")
    assert [(part.kind, part.width_px) for part in request.media] == [
        (MediaKind.IMAGE, 17),
        (MediaKind.FILE, None),
    ]
