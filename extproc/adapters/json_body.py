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
from collections.abc import Callable, Generator, Iterator
from typing import Any

import brotli
import orjson
import zstandard

from extproc.adapters.json_pieces import NotJson, Steps, TooMuch, is_deeper, read_pieces
from extproc.dialects.reading import BadRequest
from extproc.domain.outcome import Reason
from extproc.domain.policy import Limits

BLOCK_BYTES = 64 * 1024
"""How much is decoded between two looks at the limit."""

LARGEST_ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
"""What RFC 8878 (3.1.1.1.2) asks every decoder to support and advises not to exceed for untrusted input."""

SHORT_BYTES = 128 * 1024
SHORT_VALUES = 8_000
SHORT_CONTAINERS = 1_000
"""What may be read at once: within 2 ms, with what a dialect makes of it. Anything more is read in steps."""

_BLOCK_US = 200
"""About how long a block takes to decode."""

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
    steps = read_steps(raw, content_encoding=content_encoding, content_type=content_type, limits=limits)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        value: dict[str, Any] = end.value
        return value


def read_short(
    raw: bytes, *, content_encoding: str | None, content_type: str | None, limits: Limits
) -> dict[str, Any] | None:
    """The JSON object in `raw` if it is read within 2 ms; `None` if it takes longer or might: then `read_steps`.

    Raises `BadRequest` as `read_json` does.
    """
    if len(raw) > SHORT_BYTES:
        return None
    decode = _decoder(content_encoding)
    data: bytes | bytearray = raw
    if decode is not None:
        decoded = _short(_bounded(decode(raw), limits))
        if decoded is None:
            return None
        data = decoded
    elif len(raw) > limits.body_bytes:
        raise _too_large(limits)
    start = _utf8_start(data, content_type)
    return _whole(data, start, limits) if _is_short(data) else None


def read_steps(
    raw: bytes, *, content_encoding: str | None, content_type: str | None, limits: Limits
) -> Steps:
    """Read as `read_json` does, in steps of at most 2 ms, however large the body is.

    Yields about how many microseconds the next step takes. The steps raise `BadRequest`.
    """
    if len(raw) > limits.body_bytes:
        raise _too_large(limits)
    decode = _decoder(content_encoding)
    data: bytes | bytearray = raw
    if decode is not None:
        data = yield from _decoded(_bounded(decode(raw), limits))
    start = _utf8_start(data, content_type)
    if _is_short(data):
        return _whole(data, start, limits)
    try:
        return (yield from read_pieces(data, start=start, depth=limits.json_depth))
    except NotJson:
        raise _malformed(_likely_mistake(data)) from None
    except TooMuch as too_much:
        raise _malformed(too_much.args[0]) from None


def _is_short(data: bytes | bytearray) -> bool:
    size = len(data)
    return size <= SHORT_CONTAINERS or (
        size <= SHORT_BYTES
        and data.count(b",") <= SHORT_VALUES
        and data.count(b"[") + data.count(b"{") <= SHORT_CONTAINERS
    )


def _whole(data: bytes | bytearray, start: int, limits: Limits) -> dict[str, Any]:
    try:
        value = orjson.loads(memoryview(data)[start:] if start else data)
    except ValueError:
        # Python's own exception would carry the body along; the message says nothing about it either.
        raise _malformed(_likely_mistake(data)) from None
    if type(value) is not dict:
        raise _malformed("the body must be a JSON object")
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > limits.json_depth and is_deeper(value, limits.json_depth):
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


def _bounded(blocks: Iterator[bytes], limits: Limits) -> Iterator[bytes]:
    """The blocks, as long as they are together within the limit."""
    size = 0
    try:
        for block in blocks:
            size += len(block)
            if size > limits.body_bytes:
                raise _too_large(limits)
            yield block
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError):
        raise _malformed("the body is not what its content-encoding says, or it is incomplete") from None


def _decoded(blocks: Iterator[bytes]) -> Generator[int, None, bytearray]:
    decoded = bytearray()
    for block in blocks:
        decoded += block
        yield _BLOCK_US
    return decoded


def _short(blocks: Iterator[bytes]) -> bytearray | None:
    """What is decoded if it is short."""
    decoded = bytearray()
    for block in blocks:
        decoded += block
        if len(decoded) > SHORT_BYTES:
            return None
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


def _utf8_start(data: bytes | bytearray, content_type: str | None) -> int:
    """Where the text begins: some clients put a byte order mark before UTF-8. Other charsets are refused."""
    for parameter in (content_type or "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in {"utf-8", "utf8", "us-ascii"}:
            raise _malformed("the body must be UTF-8, and content-type must not say otherwise")
    return 3 if data.startswith(b"\xef\xbb\xbf") else 0


def _likely_mistake(data: bytes | bytearray) -> str:
    if not data:
        return "the body is empty; it must be a JSON object"
    if data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return "the body is compressed but has no content-encoding"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in data[:4]:
        return "the body must be JSON in UTF-8, not in another charset"
    return "the body is not valid JSON in UTF-8 (RFC 8259)"
