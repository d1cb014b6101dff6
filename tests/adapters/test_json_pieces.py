"""A body read in pieces is what it is when read whole: the same value, or refused as well."""

from __future__ import annotations

import itertools
import json
from collections import deque
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.adapters import json_pieces
from extproc.adapters.json_pieces import (
    LARGEST_CONTAINERS,
    LARGEST_NUMBER_BYTES,
    LARGEST_VALUES,
    NotJson,
    TooMuch,
    is_deeper,
    read_pieces,
)

DEPTH = 12


def in_pieces(text: bytes, *, piece_bytes: int = json_pieces.PIECE_BYTES, depth: int = DEPTH) -> Any:
    """The value, or the exception that refuses it."""
    steps = read_pieces(text, depth=depth, piece_bytes=piece_bytes)
    try:
        while True:
            assert next(steps) > 0
    except StopIteration as end:
        return end.value
    except (NotJson, TooMuch) as refused:
        return type(refused)


def whole(text: bytes, *, depth: int = DEPTH) -> Any:
    """What the parser makes of it at once."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return NotJson
    if type(value) is not dict:
        return NotJson
    return TooMuch if is_deeper(value, depth) else value


def shown(value: Any) -> str:
    """A value with the types and the order of all that is in it."""
    return repr(value)


TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet='a",:[]{}\\ \t\n', max_size=60),
    st.text(alphabet="é河😀\ud83d\ude00\\", max_size=40),
)
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=8), st.dictionaries(TEXTS, inner, max_size=6)),
    max_leaves=40,
)


@st.composite
def json_texts(draw: st.DrawFn) -> bytes:
    """A JSON object as somebody might write it, or something close to one."""
    value = draw(st.dictionaries(TEXTS, VALUES, max_size=6))
    separators = draw(
        st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: "), ("," + " " * 70, ":" + " " * 70)])
    )
    text = json.dumps(
        value,
        ensure_ascii=draw(st.booleans()),
        separators=separators,
        indent=draw(st.sampled_from([None, None, 1, 40])),
    ).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        patch = draw(
            st.one_of(
                st.sampled_from(
                    [
                        b",",
                        b"[",
                        b"]",
                        b"{",
                        b"}",
                        b'"',
                        b":",
                        b"\\",
                        b" " * 50,
                        b"NaN",
                        b"\\ud83d",
                        b"\xe6",
                        b"1e400",
                    ]
                ),
                st.binary(max_size=3),
            )
        )
        text = text[:at] + patch + text[at + draw(st.integers(0, 3)) :]
    return text


@given(text=json_texts(), piece_bytes=st.integers(1, 64))
@example(text=b'{"a":[1,2],"b":3,"a":{"c":"d"}}', piece_bytes=4)
@example(text=b'{"a":[,1]}', piece_bytes=4)
@example(text=b'{"a":[1,]}', piece_bytes=4)
@example(text=b'{"a":[1,      ]}', piece_bytes=4)
@example(text=b'{"a":[       ]}', piece_bytes=4)
@example(text=b'{"a":[1}}', piece_bytes=4)
@example(text=b'{,"a":1}', piece_bytes=8)
@example(text=b'{"a":1,}', piece_bytes=4)
@example(text=b'{"a":["],[",2],[3]}', piece_bytes=9)
@example(text=b'{"a":1],"b":[2}', piece_bytes=20)
@example(text=b'{"a":"' + b"\\ud83d\\ude00" * 30 + b'"}', piece_bytes=1)
@example(text=b'{"a":"' + b"\\ud83d" * 30 + b'"}', piece_bytes=1)
@example(text='{"a":"%s"}'.replace("%s", "河😀" * 30).encode(), piece_bytes=1)
@example(text=b'{"a":"' + b"\\" * 31 + b'"}', piece_bytes=1)
@example(text=b'{"a":"' + b'\\"' * 31 + b'"}', piece_bytes=1)
@example(text=b'{"a":"' + b"\x80" * 60 + b'"}', piece_bytes=1)
@example(text=b'{"' + b"long key " * 20 + b'":1,"b":2}', piece_bytes=4)
@example(text=b'{"a":1.' + b"0" * 200 + b',"b":[-0.0,1e5,12345678901234567890123]}', piece_bytes=2)
@example(text=b'{"a":1}' + b" " * 90, piece_bytes=2)
@example(text=b'{"a":1} {}', piece_bytes=2)
@example(text=b'{"a":1}\0', piece_bytes=2)
@example(text=b'{"a" "b"}', piece_bytes=1)
@example(text=b'{"a":1 2}', piece_bytes=1)
@example(text=b'{"a":[1 2]}', piece_bytes=1)
@example(text=b'{"a":[[[[[[[1],2]]]]],[[[[[[1],2]]]]]]}', piece_bytes=20)
@example(text=b'{"a":' + b"[" * 12 + b"]" * 12 + b"}", piece_bytes=3)
@example(text=b'{"a":' + b"[" * 12 + b"]" * 12 + b"}", piece_bytes=64)
@example(text=b"[1,2]", piece_bytes=2)
@example(text=b"", piece_bytes=2)
def test_in_pieces_as_whole(text: bytes, piece_bytes: int) -> None:
    """Whatever the text and the size of a piece: the same value, in the same order, or refused for the same."""
    expected = whole(text)
    found = in_pieces(text, piece_bytes=piece_bytes)
    if expected is TooMuch or found is TooMuch:
        # Whoever reads from the front sees the depth before what is wrong behind it.
        assert found is not dict
        assert expected in (TooMuch, NotJson)
        assert found in (TooMuch, NotJson)
        return
    assert shown(found) == shown(expected)


def refusal_of(text: bytes) -> str:
    """What the text is refused for."""
    with pytest.raises(TooMuch) as caught:
        deque(read_pieces(text, depth=DEPTH), maxlen=0)
    message: str = caught.value.args[0]
    return message


@pytest.mark.parametrize("digits", [b"1" * 300, b"0." + b"1" * 65_533])
def test_long_numbers_are_read(digits: bytes) -> None:
    """A number may have many more digits than a piece has bytes."""
    text = b'{"a":' + digits + b"}"
    assert in_pieces(text, piece_bytes=16) == whole(text)


def test_numbers_of_too_many_digits_are_refused() -> None:
    """A number is parsed in one piece, so there is a limit to it."""
    assert in_pieces(b'{"a":0.' + b"1" * (LARGEST_NUMBER_BYTES - 2) + b"}") is not TooMuch
    assert "digits" in refusal_of(b'{"a":0.' + b"1" * (LARGEST_NUMBER_BYTES - 1) + b"}")


@pytest.mark.parametrize("text", [b'",[{"', b'\\",[{', b"\\\\", b'","'], ids=repr)
def test_what_is_in_texts_is_not_counted(text: bytes) -> None:
    """Texts full of commas and brackets, in as many pieces as it takes, are as few values as any others."""
    one = orjson.dumps(text.decode() * 2_000)
    body = b'{"a":[' + b",".join([one] * 120) + b"]}"
    assert in_pieces(body) == json.loads(body)


@pytest.mark.parametrize("value", [b"[]", b'{"a":"[{"}', b'["\\\\",1]'], ids=repr)
def test_too_many_containers_are_refused_exactly(value: bytes) -> None:
    """The limit is the same however they are spread over pieces."""
    for count, accepted in ((LARGEST_CONTAINERS - 2, True), (LARGEST_CONTAINERS - 1, False)):
        body = b'{"a":[' + b",".join([value] * count) + b"]}"
        if accepted:
            assert in_pieces(body) == json.loads(body)
        else:
            assert "lists and objects" in refusal_of(body)


def test_too_many_values_are_refused_before_they_are_read() -> None:
    """Nobody reads to the end of what is refused anyway."""
    steps = read_pieces(b'{"a":[' + b"1," * 4_000_000 + b"1]}", depth=DEPTH)
    taken = itertools.count()
    with pytest.raises(TooMuch, match="values"):
        deque((next(taken) for _ in steps), maxlen=0)
    assert next(taken) < 2 * LARGEST_VALUES // (json_pieces.PIECE_BYTES // 2)


MANY_MESSAGES = [{"role": "user", "content": [{"type": "text", "text": f"turn, {n}"}]} for n in range(10_000)]
MANY_TOOLS = [{"function": {"parameters": {"properties": {f"p{n}": {"type": ["x"]}}}}} for n in range(5_000)]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": list(range(262_144))},
        {"messages": MANY_MESSAGES},
        {"prompt": "one, long; text. " * 300_000},
        {"tools": MANY_TOOLS},
    ],
    ids=["token ids", "messages", "a text", "tools"],
)
def test_no_step_parses_more_than_a_piece(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest that the interpreter is held is what the parser does in one go: never more than one piece."""
    text = orjson.dumps(body)
    parsed: list[int] = []

    class Watched:
        @staticmethod
        def loads(part: bytes) -> Any:
            parsed.append(len(part))
            return orjson.loads(part)

    monkeypatch.setattr(json_pieces, "orjson", Watched)
    assert in_pieces(text) == body
    assert max(parsed) <= json_pieces.TEXT_PIECE_BYTES + 2
    # And little of it is parsed twice.
    assert sum(parsed) <= 1.5 * len(text)


def hostile_texts() -> dict[str, bytes]:
    """What might be made to find where guesses fail and the pattern looks again and again."""
    return {
        "deep elements": b"[[[[[[1],2]]]]]," * 4_000,
        "deep and wide": (b"[[[[[" + b"[1]," * 800 + b"1]]]]],") * 40,
        "open lists": b"[1," * 100,
        "open texts": b'["a,' * 60_000,
        "quotes": b'"' * 300_000,
        "escaped quotes": b'"' + b'\\"' * 150_000,
        "objects in objects": b'{"a":{"b":{"c":{"d":{"e":1},"f":2}}}},' * 5_000,
        "colons": b":" * 300_000,
        "spaces": b"1" + b" " * 300_000,
        "wrong guesses": b'{"a":[1],"b":["],"]},' * 8_000,
    }


@pytest.mark.parametrize("text", hostile_texts().values(), ids=hostile_texts())
def test_reading_takes_a_bounded_number_of_steps(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parsed altogether stays within a few times the text, whatever the text is."""
    body = b'{"a":[' + text + b"1]}"
    parsed = 0

    class Watched:
        @staticmethod
        def loads(part: bytes) -> Any:
            nonlocal parsed
            parsed += len(part)
            return orjson.loads(part)

    monkeypatch.setattr(json_pieces, "orjson", Watched)
    found = in_pieces(body, depth=200)
    expected = whole(body, depth=200)
    assert shown(found) == shown(expected)
    assert parsed <= 3 * len(body) + 20 * json_pieces.PIECE_BYTES


def test_no_group_is_possessive() -> None:
    """Python before 3.11.5 is accepted, and goes on at a wrong place after one: whole bodies would be refused."""
    for pattern in (json_pieces._RUN, json_pieces._LAST):
        assert b")*+" not in pattern.pattern
        assert b")++" not in pattern.pattern
        assert b")?+" not in pattern.pattern
