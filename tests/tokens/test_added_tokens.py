"""Where added tokens cut a text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from extproc.adapters.tokens import slices as slicing
from extproc.adapters.tokens.added_tokens import (
    AT_ONCE_BYTES,
    WHITE_SPACE,
    AddedTokenSplitter,
    longest_of,
)
from extproc.adapters.tokens.slices import slices, tokens_respect_cuts
from extproc.adapters.tokens.tokenizer_file import AddedToken


def token(content: str, **flags: bool) -> AddedToken:
    none = AddedToken(content=content, single_word=False, lstrip=False, rstrip=False, normalized=False)
    return replace(none, **flags)  # type: ignore[arg-type]


def split(text: str, *tokens: AddedToken, normalizes: bool = False) -> tuple[list[str], int]:
    pieces, added = AddedTokenSplitter(tokens, normalizes=normalizes).split(text.encode())
    return [piece.decode() for piece in pieces], added


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("", ["<a>"], ([], 0)),
        ("plain", ["<a>"], (["plain"], 0)),
        ("plain", [], (["plain"], 0)),
        ("<a>", ["<a>"], ([], 1)),
        ("x<a>y<a><a>z", ["<a>"], (["x", "y", "z"], 3)),
        ("<ab><a<a>", ["<a", "<a>", "<ab>"], ([], 3)),
        ("aab", ["a", "ab"], ([], 2)),
        ("\n\n\n", ["\n", "\n\n"], ([], 2)),
        ("你<é>好", ["<é>"], (["你", "好"], 1)),
        ("a.c", ["a.", "(", "[c", "^", ".*"], (["c"], 1)),
    ],
)
def test_the_leftmost_and_then_longest_token_cuts(
    text: str, tokens: list[str], expected: tuple[list[str], int]
) -> None:
    """Tokens are plain texts; of those that begin at one place the longest counts."""
    assert split(text, *map(token, tokens)) == expected


def test_stripping_tokens_swallow_the_white_space_beside_them() -> None:
    """Unicode's white space, on the sides that the token says."""
    left, right = token("<l>", lstrip=True), token("<r>", rstrip=True)
    assert split("a \u3000<l> b", left, right) == (["a", " b"], 1)
    assert split("a <r>\n\x85b", left, right) == (["a ", "b"], 1)
    assert split("a <r> <l> b", left, right) == (["a ", " b"], 2)
    assert split("a \x1f<l>", left, right) == (["a \x1f"], 1)
    assert split("<r>\x1f b", left, right) == (["\x1f b"], 1)


def test_normalized_tokens_are_looked_for_in_what_the_others_leave() -> None:
    """Even where they would begin further left; and not at all in text that is to be normalized first."""
    raw, normalized = token("b>"), token("<ab", normalized=True)
    assert split("<ab>", raw, normalized) == (["<a"], 1)
    assert split("<ab <ab>", raw, normalized) == ([" <a"], 2)
    assert split("<ab <ab>", raw, normalized, normalizes=True) == (["<ab <a"], 1)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([token("a")], ""),
        ([token("a", rstrip=True), token("b")], ""),
        ([token("a b")], ""),
        ([token("a", single_word=True)], "single word"),
        ([token("a", rstrip=True), token("b ")], "white space"),
    ],
)
def test_tokens_that_cannot_be_found_by_these_rules_are_told(tokens: list[AddedToken], why: str) -> None:
    """Whoever cuts is warned if a token is looked for by other rules."""
    told = AddedTokenSplitter(tokens, normalizes=False).why_not
    assert (why in told) if why else (told == "")


def test_long_texts_are_cut_like_short_ones() -> None:
    """However long a text is, and wherever its tokens are."""
    splitter = AddedTokenSplitter([token("<a>")], normalizes=False)
    text = ("x<a>y" * AT_ONCE_BYTES).encode()
    assert splitter.split(text) == ([b"x", *([b"yx"] * (AT_ONCE_BYTES - 1)), b"y"], AT_ONCE_BYTES)
    assert splitter.split(b"xy" * AT_ONCE_BYTES) == ([b"xy" * AT_ONCE_BYTES], 0)
    assert splitter.split(b"<a>" * AT_ONCE_BYTES) == ([], AT_ONCE_BYTES)


@pytest.mark.parametrize("before", range(-6, 3))
def test_a_token_at_a_windows_edge_is_found_whole(before: int) -> None:
    """The longest of the tokens that fit, where one long text is looked at in several goes."""
    splitter = AddedTokenSplitter([token("<a"), token("<abcd>"), token("abcd>")], normalizes=False)
    head, tail = b"x" * (AT_ONCE_BYTES + before), b"y" * AT_ONCE_BYTES
    assert splitter.split(head + b"<abcd>" + tail) == ([head, tail], 1)
    assert splitter.split(head + b"<abcd" + tail) == ([head, b"bcd" + tail], 1)


def test_the_tree_of_texts_finds_what_a_list_of_them_finds() -> None:
    """At every place the longest text that fits, for any texts."""
    texts = [bytes(letters) for length in (1, 2, 3) for letters in product(b"ab.", repeat=length)]
    for chosen in (texts[:3], texts[1::4], texts[::7], texts[5:6], texts):
        tree = re.compile(longest_of(chosen))
        listed = re.compile(b"|".join(map(re.escape, sorted(chosen, key=len, reverse=True))))
        for text in (b"abab.a.bbb.ab", b"...", b"", b"a.b.a.b", b"bbbbaaaa"):
            assert tree.findall(text) == listed.findall(text)


def test_stripped_white_space_is_unicodes() -> None:
    """Python's idea of space has four control characters more."""
    spaces = {chr(code) for code in range(0x110000) if chr(code).isspace()}
    assert set(WHITE_SPACE) == spaces - set("\x1c\x1d\x1e\x1f")


@pytest.mark.parametrize("size_chars", [1, 5, 100])
def test_slices_are_the_text(size_chars: int) -> None:
    """Nothing is lost between slices, each but the last has the size asked for, and each begins at a break."""
    text = "The river, the road and 一条\uff0c路。x " + "a" * 50 + " then 12 more, b,c d"
    parts = list(slices(text, size_chars))
    assert "".join(parts) == text
    assert all(len(part) >= size_chars for part in parts[:-1])
    assert all(part[0] in " ,\uff0c\u3002" for part in parts[1:])
    assert list(slices("", size_chars)) == [""]


@pytest.mark.parametrize("text", ["ab, cd, ef " * 40, "x" * 150 + " y" + "z" * 99, "a" * 300, "a b"], ids=len)
@pytest.mark.parametrize("searched_chars", [1, 2, 7, 64])
def test_where_a_cut_is_looked_for_bit_by_bit_does_not_move_it(
    text: str, searched_chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same slices, wherever the bits of the search end: also between a letter and the break after it."""
    for size_chars in (1, 2, 50):
        monkeypatch.undo()
        whole = list(slices(text, size_chars))
        monkeypatch.setattr(slicing, "_SEARCHED_CHARS", searched_chars)
        assert list(slices(text, size_chars)) == whole


@pytest.mark.parametrize(
    ("texts", "respected"),
    [
        (["a", " a", ", b", ". ", "。\uff0c"], True),
        (["a b"], False),
        (["的\uff0c"], False),
        (["\ufffd "], False),
        (["a", ""], True),
    ],
)
def test_a_vocabulary_with_a_token_across_a_cut_is_noticed(texts: list[str], respected: bool) -> None:
    """Also if the token's first bytes are the end of some character."""
    assert tokens_respect_cuts("\0".join(texts)) is respected
