from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from random import Random

import brotli
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.json_body import BLOCK_BYTES, read_json
from extproc.adapters.json_pieces import LARGEST_CONTAINERS, LARGEST_VALUES
from extproc.dialects.reading import BadRequest
from extproc.domain.outcome import Reason
from extproc.domain.policy import Limits

CANARY = "canary-7f3a"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": f"grüße {CANARY}"}]}).encode()
CHAT_VALUE = json.loads(CHAT)


def limits(*, body_bytes: int = 1 << 20, json_depth: int = 100) -> Limits:
    return Limits(
        body_bytes=body_bytes,
        json_depth=json_depth,
        prefill_weight_permille=100,
        lease_ttl_ms=1000,
        orphan_grace_ms=1000,
    )


def read(
    raw: bytes, encoding: str | None = None, content_type: str | None = "application/json", **bounds: int
) -> object:
    return read_json(raw, content_encoding=encoding, content_type=content_type, limits=limits(**bounds))


def refusal(
    raw: bytes, encoding: str | None = None, content_type: str | None = "application/json", **bounds: int
) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(raw, encoding, content_type, **bounds)
    shown = f"{caught.value.message} {caught.value.__cause__} {caught.value.args}"
    assert CANARY not in shown
    assert len(caught.value.message) <= 200
    return caught.value


def outcome_of(raw: bytes, encoding: str | None, content_type: str | None) -> object:
    try:
        return read(raw, encoding, content_type)
    except BadRequest as caught:
        return caught.reason


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def zstd_stream(data: bytes) -> bytes:
    """A frame that does not announce its size, as streaming clients write it."""
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return compressor.compress(data) + compressor.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "gzip in capitals with spaces": ("  GZIP ", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "zlib deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", raw_deflate),
    "brotli": ("br", brotli.compress),
    "zstd": ("zstd", zstd),
    "zstd without a size": ("zstd", zstd_stream),
    "identity": ("identity", bytes),
    "identity and gzip": ("identity, gzip", gzip.compress),
    "empty": ("", bytes),
}


@pytest.mark.parametrize(("encoding", "compress"), CODINGS.values(), ids=CODINGS)
def test_a_coded_body_reads_like_the_plain_one(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    """BODY-01: whatever supported coding a body comes in, the value is the same."""
    assert read(compress(CHAT), encoding) == CHAT_VALUE == read(CHAT)


@pytest.mark.parametrize(("encoding", "compress"), CODINGS.values(), ids=CODINGS)
def test_a_large_coded_body_reads_whole(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    """A body of many blocks, compressible or not, is read to its last byte."""
    noise = zlib.compress(json.dumps(list(range(100_000))).encode())
    body = json.dumps({"a": "x" * 300_000, "b": noise.hex()}).encode()
    assert read(compress(body), encoding, body_bytes=len(body)) == json.loads(body)


@pytest.mark.parametrize("encoding", ["compress", "gzip, gzip", "br,zstd", "aes128gcm", "gzip;q=1", "\x00"])
def test_unsupported_codings_are_415(encoding: str) -> None:
    """BODY-01: a coding that is unknown, or stacked on another, is named unsupported and never guessed at."""
    assert refusal(gzip.compress(CHAT), encoding).reason is Reason.UNSUPPORTED_ENCODING


BROKEN: dict[str, tuple[str | None, bytes]] = {
    "says gzip, is plain": ("gzip", CHAT),
    "says br, is plain": ("br", CHAT),
    "says zstd, is plain": ("zstd", CHAT),
    "says deflate, is plain": ("deflate", CHAT),
    "says nothing, is gzip": (None, gzip.compress(CHAT)),
    "says nothing, is zstd": (None, zstd(CHAT)),
    "says gzip, is empty": ("gzip", b""),
    "says br, is empty": ("br", b""),
    "says zstd, is empty": ("zstd", b""),
    "gzip twice, said once": ("gzip", gzip.compress(gzip.compress(CHAT))),
    "gzip of two members": ("gzip", gzip.compress(CHAT[:9]) + gzip.compress(CHAT[9:])),
    "gzip with a tail": ("gzip", gzip.compress(CHAT) + b"x"),
    "br with a tail": ("br", brotli.compress(CHAT) + b"x"),
    "zstd with a tail": ("zstd", zstd(CHAT) + b"x"),
    "gzip with a wrong checksum": ("gzip", gzip.compress(CHAT)[:-8] + b"\0" * 8),
}


@pytest.mark.parametrize(("encoding", "raw"), BROKEN.values(), ids=BROKEN)
def test_a_body_that_is_not_what_its_coding_says_is_400(encoding: str | None, raw: bytes) -> None:
    """BODY-01: mismatch and corruption are malformed_request, with nothing of the body in the answer."""
    assert refusal(raw, encoding).reason is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize(("encoding", "compress"), CODINGS.values(), ids=CODINGS)
def test_a_truncated_body_is_400_wherever_it_ends(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    """BODY-01: no prefix of a coded body passes for a whole one, not even one that lacks only its checksum."""
    whole = compress(CHAT)
    for length in range(len(whole)):
        assert refusal(whole[:length], encoding).reason is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize(
    "coding", ["gzip", "zlib deflate", "bare deflate", "brotli", "zstd", "zstd without a size"]
)
def test_a_truncated_body_is_400_even_if_the_rest_is_only_space(coding: str) -> None:
    """A coded body must be whole even where what is missing would not matter to JSON."""
    encoding, compress = CODINGS[coding]
    padding = "".join(Random(7).choices(" \t\n\r", k=200_000)).encode()
    whole = compress(CHAT + padding)
    assert read(whole, encoding) == CHAT_VALUE
    for share in range(1, 20):
        assert refusal(whole[: len(whole) * share // 20], encoding).reason is Reason.MALFORMED_REQUEST


UNPARSABLE: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"  \n",
    "an open brace": b"{",
    "a list": b"[]",
    "a string": json.dumps(CANARY).encode(),
    "null": b"null",
    "a number": b"1",
    "UTF-16 with a mark": CHAT.decode().encode("utf-16"),
    "UTF-16 without a mark": CHAT.decode().encode("utf-16-le"),
    "UTF-32": CHAT.decode().encode("utf-32"),
    "Latin-1": b'{"model":"gr\xfc\xdfe ' + CANARY.encode() + b'"}',
    "two marks": b"\xef\xbb\xbf" * 2 + CHAT,
    "a tail": b"{}x" + CANARY.encode(),
    "two values": b"{}{}",
    "bytes of ones": b"\xff" * (1 << 20),
    "NaN": b'{"max_tokens":NaN}',
    "Infinity": b'{"max_tokens":Infinity}',
    "minus Infinity": b'{"max_tokens":-Infinity}',
    "beyond a double": b'{"max_tokens":1e400}',
    "a lone surrogate": b'{"model":"\\ud800"}',
    "an encoded surrogate": b'{"model":"\xed\xa0\x80"}',
    "a comment": b'{"model":1 /* */}',
    "a trailing comma": b'{"model":1,}',
    "single quotes": b"{'model':1}",
    "a control character": b'{"model":"\n"}',
    "a zero byte": b'{"model":"m"}\0',
}


@pytest.mark.parametrize("raw", UNPARSABLE.values(), ids=UNPARSABLE)
def test_what_is_not_a_json_object_in_utf8_is_400(raw: bytes) -> None:
    """BODY-02: everything else than one JSON object in UTF-8 is malformed_request."""
    assert refusal(raw).reason is Reason.MALFORMED_REQUEST


def test_a_byte_order_mark_is_accepted() -> None:
    """BODY-02: a mark before UTF-8 is skipped, plain or coded, as the engines' JSON readers do."""
    marked = b"\xef\xbb\xbf" + CHAT
    assert read(marked) == CHAT_VALUE == read(gzip.compress(marked), "gzip")


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json",
        "application/json; charset=UTF-8",
        'application/json;CHARSET="utf-8"',
        ";;=",
    ],
)
def test_content_types_that_mean_utf8_are_accepted(content_type: str | None) -> None:
    """A missing or odd media type does not matter; engines decide about it themselves."""
    assert read(CHAT, None, content_type) == CHAT_VALUE


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-16", "text/json;charset=latin1", "a;charset"]
)
def test_other_charsets_are_400(content_type: str) -> None:
    """A body that is said to be in another charset is refused, not guessed at."""
    assert refusal(CHAT, None, content_type).reason is Reason.MALFORMED_REQUEST


def test_of_duplicate_keys_the_last_one_counts() -> None:
    """The documented rule, which is that of the engines' parsers."""
    assert (
        read(b'{"max_tokens":1,"max_tokens":2}')
        == {"max_tokens": 2}
        == json.loads('{"max_tokens":1,"max_tokens":2}')
    )


NESTINGS: dict[str, Callable[[int], bytes]] = {
    "lists": lambda depth: b'{"messages":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}",
    "objects": lambda depth: b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1),
    "a schema beside others": lambda depth: (
        b'{"flat":['
        + b"{}," * 500
        + b'1],"tools":'
        + b'[{"properties":' * ((depth - 1) // 2)
        + (b"[]" if depth % 2 == 0 else b"1")
        + b"}]" * ((depth - 1) // 2)
        + b"}"
    ),
}


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
@pytest.mark.parametrize("limit", [10, 100])
def test_depth_is_limited_exactly(nest: Callable[[int], bytes], limit: int) -> None:
    """SEC-01: a body as deep as the limit is read and one level more is malformed_request."""
    assert read(nest(limit), json_depth=limit)
    for depth in (limit + 1, limit + 2):
        assert refusal(nest(depth), json_depth=limit).reason is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_no_depth_raises_anything_but_a_refusal(nest: Callable[[int], bytes]) -> None:
    """SEC-01: depths at which recursive parsers fail are ordinary refusals."""
    for depth in (500, 900, 999, 1000, 1001, 1023, 1024, 1025, 5000, 20_001, 200_000):
        assert refusal(nest(depth), body_bytes=1 << 22).reason is Reason.MALFORMED_REQUEST


def test_brackets_in_strings_are_not_depth() -> None:
    """A prompt full of brackets is as flat as any other."""
    body = {"messages": [{"role": "user", "content": "[{" * 5000}]}
    assert read(json.dumps(body).encode()) == body


@pytest.mark.parametrize("empty", [b"[]", b"{}", b'{"a":1}'])
def test_the_number_of_containers_is_limited_exactly(empty: bytes) -> None:
    """SEC-02: a body of nothing but empty lists is refused before they exist."""
    for count, accepted in ((LARGEST_CONTAINERS - 2, True), (LARGEST_CONTAINERS - 1, False)):
        body = b'{"a":[' + b",".join([empty] * count) + b"]}"
        if accepted:
            assert read(body) == json.loads(body)
        else:
            assert refusal(body).reason is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize("text", ['[{"', "[\\", '\\"[', '[{\n"]', "\u005c[{"], ids=repr)
def test_brackets_in_strings_are_not_containers(text: str) -> None:
    """A prompt of code is no crowd of lists, whatever it escapes."""
    body = {"before": ["\\"], "text": text * LARGEST_CONTAINERS}
    assert read(json.dumps(body).encode(), body_bytes=1 << 22) == body


@pytest.mark.parametrize("value", [b"1", b'"a,b"', b'"\\\\"', b"[]"], ids=repr)
def test_the_number_of_values_is_limited_exactly(value: bytes) -> None:
    """Reading values keeps everybody else waiting: a list of too many is refused before it exists."""
    most = LARGEST_VALUES if value != b"[]" else LARGEST_CONTAINERS - 2
    for count, accepted in ((most, True), (most + 1, False)):
        body = b'{"a":[' + b",".join([value] * count) + b"]}"
        if accepted:
            assert read(body, body_bytes=1 << 22) == json.loads(body)
        else:
            assert refusal(body, body_bytes=1 << 22).reason is Reason.MALFORMED_REQUEST


def test_names_count_with_their_values() -> None:
    """So many strings that they cannot all be values and their names are refused without cutting at each of them."""
    names = b",".join(b'"":""' for _ in range(LARGEST_VALUES + 1))
    assert refusal(b'{"a":{' + names + b"}}", body_bytes=1 << 22).reason is Reason.MALFORMED_REQUEST


def test_commas_in_strings_are_not_values() -> None:
    """A prompt that is a table has as few values as any other."""
    body = {"before": [1, 2], "text": 'a,"\\,' * LARGEST_VALUES, "after": {"b": 3, "c": 4}}
    assert read(json.dumps(body).encode(), body_bytes=1 << 22) == body


def test_the_limit_counts_plain_bytes_exactly() -> None:
    """A body as large as the limit is read, one byte more is body_too_large."""
    assert read(CHAT, body_bytes=len(CHAT)) == CHAT_VALUE
    assert refusal(CHAT, body_bytes=len(CHAT) - 1).reason is Reason.BODY_TOO_LARGE


@pytest.mark.parametrize(("encoding", "compress"), CODINGS.values(), ids=CODINGS)
def test_the_limit_counts_decoded_bytes_exactly(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    """SEC-02: a coded body has the same limit as the plain one, to the byte."""
    body = json.dumps({"a": "x" * 200_000}).encode()
    assert read(compress(body), encoding, body_bytes=len(body))
    assert refusal(compress(body), encoding, body_bytes=len(body) - 1).reason is Reason.BODY_TOO_LARGE


def deflated(megabytes: int) -> bytes:
    """A bare deflate stream without its end, made of one mebibyte repeated."""
    deflater = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    return (deflater.compress(b"a" * (1 << 20)) + deflater.flush(zlib.Z_FULL_FLUSH)) * megabytes


def gzip_bomb(megabytes: int) -> bytes:
    return gzip.compress(b"")[:10] + deflated(megabytes)


def deflate_bomb(megabytes: int) -> bytes:
    return zlib.compress(b"")[:2] + deflated(megabytes)


def brotli_bomb(megabytes: int) -> bytes:
    compressor = brotli.Compressor(quality=1)
    blocks: list[bytes] = [compressor.process(b"a" * (1 << 20)) for _ in range(megabytes)]
    blocks.append(compressor.finish())
    return b"".join(blocks)


def zstd_bomb(megabytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return b"".join(compressor.compress(b"a" * (1 << 20)) for _ in range(megabytes)) + compressor.flush()


BOMBS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "gzip": ("gzip", gzip_bomb),
    "deflate": ("deflate", deflate_bomb),
    "br": ("br", brotli_bomb),
    "zstd": ("zstd", zstd_bomb),
}


@pytest.mark.parametrize(("encoding", "bomb"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_after_the_limit_and_one_block(encoding: str, bomb: Callable[[int], bytes]) -> None:
    """SEC-02: 512 MiB in half a megabyte is 413 before more than the limit and a few blocks are in memory."""
    raw = bomb(512)
    tracemalloc.start()
    try:
        caught = refusal(raw, encoding, body_bytes=1 << 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.reason is Reason.BODY_TOO_LARGE
    # The growing buffer is copied once when it moves; the rest is the decoder's window and the blocks.
    assert peak_bytes < 2 * (1 << 20) + 2 * len(raw) + 8 * BLOCK_BYTES


def test_a_zstd_window_beyond_the_standard_is_refused() -> None:
    """SEC-02: a frame cannot make the decoder allocate a huge window."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    raw = compressor.compress(CHAT) + compressor.flush()
    assert refusal(raw, "zstd").reason is Reason.MALFORMED_REQUEST


@pytest.mark.parametrize(
    ("encoding", "raw"),
    [
        ("gzip", gzip.compress(b"") * 50_000),
        ("zstd", zstd(b"") * 100_000),
        ("zstd", b"\x50\x2a\x4d\x18\x00\x00\x00\x00" * 120_000),
    ],
    ids=["gzip members", "zstd frames", "zstd skippable frames"],
)
def test_a_swarm_of_empty_members_ends_quickly(encoding: str, raw: bytes) -> None:
    """Members or frames that decode to nothing cost no more than others: a quadratic reader needs minutes."""
    assert refusal(raw, encoding).reason is Reason.MALFORMED_REQUEST


@given(
    raw=st.binary(max_size=200),
    encoding=st.sampled_from([None, "gzip", "deflate", "br", "zstd", "identity", "gzip,br", "x"]),
    content_type=st.one_of(st.none(), st.text(max_size=40)),
)
def test_any_bytes_are_read_or_refused(raw: bytes, encoding: str | None, content_type: str | None) -> None:
    """Whatever arrives, the outcome is a JSON object or a `BadRequest`, and nothing else."""
    outcome = outcome_of(raw, encoding, content_type)
    assert type(outcome) is dict or outcome in {Reason.MALFORMED_REQUEST, Reason.UNSUPPORTED_ENCODING}


@given(
    st.sampled_from(sorted(CODINGS)),
    st.integers(min_value=0),
    st.binary(min_size=1, max_size=4),
)
def test_a_damaged_coded_body_is_read_or_refused(coding: str, position: int, patch: bytes) -> None:
    """Overwriting any bytes of a coded body never makes the reader fail in another way."""
    encoding, compress = CODINGS[coding]
    raw = bytearray(compress(CHAT))
    position %= len(raw)
    raw[position : position + len(patch)] = patch
    outcome = outcome_of(bytes(raw), encoding, None)
    assert type(outcome) is dict or outcome in {Reason.MALFORMED_REQUEST, Reason.BODY_TOO_LARGE}
