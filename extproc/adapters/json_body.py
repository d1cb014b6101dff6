"""From the bytes of a request body to one JSON object, within bounds that hold for hostile bodies too.

The order is: size, content coding, charset, syntax, depth. Every failure is a `BadRequest` that says what to
change and quotes nothing of the body. Work and memory are bounded by the size limit, which counts the decoded
bytes: a body is refused as soon as it has grown one block beyond it, however large it would become.

Choices that readers may differ in: of duplicate keys the last one counts, as it does in the engines' parsers;
a body has at most one coding, for no client stacks them and every layer multiplies a bomb; and gzip has one
member, for members may be so small that only starting them takes minutes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import brotli
import orjson
import zstandard

from extproc.dialects.reading import BadRequest
from extproc.domain.outcome import Reason
from extproc.domain.policy import Limits

BLOCK_BYTES = 64 * 1024
"""How much is decoded between two looks at the limit."""

LARGEST_ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
"""What RFC 8878 (3.1.1.1.2) asks every decoder to support and advises not to exceed for untrusted input."""

LARGEST_CONTAINERS = 50_000
"""How many lists and objects a body may hold. An empty list takes three bytes of a body and sixty of memory, and
millions of them keep Python's garbage collector busy for seconds; conversations have some thousands."""

LARGEST_VALUES = 300_000
"""How many values lists and objects may hold together. Reading one holds the interpreter lock for some 50 ns, and
nobody else is served meanwhile; a prompt of token ids as long as a context of 262,144 has to pass."""

_ZSTD_END = zstandard.ZstdCompressor().compress(b"\0")
"""A frame put behind the client's own: it decodes to its one byte only if the frames before it are whole.
The decoder itself reports a truncated frame as an ordinary end."""


def read_json(
    raw: bytes, *, content_encoding: str | None, content_type: str | None, limits: Limits
) -> dict[str, Any]:
    """The JSON object in `raw`.

    The headers are as received, `None` where absent. Raises `BadRequest`, and nothing else, with the reason
    body_too_large, unsupported_encoding or malformed_request.
    """
    if len(raw) > limits.body_bytes:
        raise _too_large(limits)
    decode = _decoder(content_encoding)
    data: bytes | bytearray = raw if decode is None else _bounded(decode(raw), limits)
    text = _utf8_json(data, content_type)
    brackets = data.count(b"[") + data.count(b"{")
    commas = 0 if len(data) <= LARGEST_VALUES else data.count(b",")
    if brackets > LARGEST_CONTAINERS or commas >= LARGEST_VALUES:
        _check_numbers(data)
    try:
        value = orjson.loads(text)
    except ValueError:
        # Python's own exception would carry the body along; the message says nothing about it either.
        raise _malformed(_likely_mistake(data)) from None
    if type(value) is not dict:
        raise _malformed("the body must be a JSON object")
    if brackets > limits.json_depth and _is_deeper(value, limits.json_depth):
        raise _malformed(f"the body is nested more than {limits.json_depth} levels deep")
    return value


def _too_large(limits: Limits) -> BadRequest:
    return BadRequest(
        f"the body exceeds the accepted {limits.body_bytes} bytes (decoded)", reason=Reason.BODY_TOO_LARGE
    )


def _malformed(message: str) -> BadRequest:
    return BadRequest(message, reason=Reason.MALFORMED_REQUEST)


_Decode = Callable[[bytes], Iterator[bytes]]


def _decoder(content_encoding: str | None) -> _Decode | None:
    names = [name.strip().lower() for name in (content_encoding or "").split(",")]
    codings = [name for name in names if name not in {"", "identity"}]
    if not codings:
        return None
    decode = _DECODERS.get(codings[0]) if len(codings) == 1 else None
    if decode is None:
        raise BadRequest(
            "content-encoding must be one of gzip, deflate, br, zstd or identity, and only one of them",
            reason=Reason.UNSUPPORTED_ENCODING,
        )
    return decode


def _bounded(blocks: Iterator[bytes], limits: Limits) -> bytearray:
    decoded = bytearray()
    try:
        for block in blocks:
            if len(decoded) + len(block) > limits.body_bytes:
                raise _too_large(limits)
            decoded += block
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError):
        raise _malformed("the body is not what its content-encoding says, or it is incomplete") from None
    return decoded


def _inflated(raw: bytes, window_bits: int) -> Iterator[bytes]:
    inflater = zlib.decompressobj(window_bits)
    view = memoryview(raw)
    for start in range(0, len(view), BLOCK_BYTES):
        # Input goes in by blocks as well: what is left of it is copied at every call.
        waiting: bytes | memoryview = view[start : start + BLOCK_BYTES]
        while waiting:
            yield inflater.decompress(waiting, BLOCK_BYTES)
            waiting = inflater.unconsumed_tail
        if inflater.unused_data:
            raise EOFError
    yield inflater.flush()
    if not inflater.eof:
        raise EOFError


def _gzip(raw: bytes) -> Iterator[bytes]:
    return _inflated(raw, zlib.MAX_WBITS + 16)


def _deflate(raw: bytes) -> Iterator[bytes]:
    # RFC 9110 (8.4.1.2) means the zlib format; some clients send the bare stream, which cannot look like it.
    is_zlib = len(raw) > 1 and raw[0] & 0x0F == zlib.DEFLATED and int.from_bytes(raw[:2], "big") % 31 == 0
    return _inflated(raw, zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)


def _brotli(raw: bytes) -> Iterator[bytes]:
    decompressor = brotli.Decompressor()
    block = decompressor.process(raw, output_buffer_limit=BLOCK_BYTES)
    while not decompressor.is_finished():
        yield block
        block = decompressor.process(b"", output_buffer_limit=BLOCK_BYTES)
        if not block and not decompressor.is_finished():
            raise EOFError
    yield block


def _zstd(raw: bytes) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_ZSTD_WINDOW_BYTES)
    reader = decompressor.stream_reader(raw + _ZSTD_END, read_across_frames=True)
    held = b""
    while block := reader.read(BLOCK_BYTES):
        yield held
        held = block
    if not held.endswith(b"\0"):
        raise EOFError
    yield held[:-1]


_DECODERS: dict[str, _Decode] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}


def _utf8_json(data: bytes | bytearray, content_type: str | None) -> memoryview:
    """`data` without the byte order mark that some clients put before UTF-8; other charsets are refused."""
    for parameter in (content_type or "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in {"utf-8", "utf8", "us-ascii"}:
            raise _malformed("the body must be UTF-8, and content-type must not say otherwise")
    return memoryview(data)[3:] if data.startswith(b"\xef\xbb\xbf") else memoryview(data)


def _likely_mistake(data: bytes | bytearray) -> str:
    if not data:
        return "the body is empty; it must be a JSON object"
    if data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "the body is compressed but has no content-encoding"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:4]:
        return "the body must be JSON in UTF-8, not in another charset"
    return "the body is not valid JSON in UTF-8 (RFC 8259)"


_NO_MARKS = bytes(set(range(256)) - set(b'"[{,'))
_FEW_QUOTES_PER_BYTE = 64


def _check_numbers(data: bytes | bytearray) -> None:
    """Raise `BadRequest` if the JSON text `data` has too many containers or values: count what is not in strings."""
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = marks.count(b'"')
    # Each value takes at most four of them, for itself and its name. To cut at more would be work without end.
    too_many = quotes > 4 * LARGEST_VALUES
    if not too_many:
        if quotes * _FEW_QUOTES_PER_BYTE > len(marks):
            marks = marks.translate(None, _NO_MARKS)
        outside = b"".join(marks.split(b'"')[::2])
        if outside.count(b"[") + outside.count(b"{") > LARGEST_CONTAINERS:
            raise _malformed(f"the body holds more than {LARGEST_CONTAINERS} lists and objects")
        too_many = outside.count(b",") >= LARGEST_VALUES
    if too_many:
        raise _malformed(f"the body holds more than {LARGEST_VALUES} values")


def _is_deeper(value: dict[str, Any], depth: int) -> bool:
    """Whether containers are nested deeper than `depth`, level by level and without recursion."""
    level: list[Any] = [value]
    for _ in range(depth):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return False
    return True
