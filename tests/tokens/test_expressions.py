"""Expressions that are written otherwise mean the same, and character searches find what they are for."""

from __future__ import annotations

import random
import unicodedata

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from extproc.adapters.tokens import expressions
from extproc.adapters.tokens.encoder import _composing, _unsettled
from extproc.adapters.tokens.expressions import (
    CUT,
    CharacterSearch,
    character_class,
    grouped,
    splittings,
)
from extproc.adapters.tokens.self_test import self_test_texts
from extproc.adapters.tokens.tokenizer_file import GPT2_SPLIT
from tests.tokens.family import SPLIT

QWEN = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (r"a|b|c(?!d)|e", r"(?:a|b)|c(?!d)|e"),
        (r"a(?=b)|c|[|(]d|(e|f)", r"a(?=b)|(?:c|[|(]d|(e|f))"),
        (r"\||\(a|(?<!b)c|[\]|]|x", r"(?:\||\(a)|(?<!b)c|(?:[\]|]|x)"),
        (r"a|(?:b|c(?!d))|e|f", r"a|(?:b|c(?!d))|(?:e|f)"),
        (r"a|b", "a|b"),
        (r"a|(?i)b|c(?!d)", r"a|(?i)b|c(?!d)"),
        ("", ""),
    ],
)
def test_alternatives_are_grouped_where_they_stand(expression: str, expected: str) -> None:
    """Neighbours without look-around become one alternative; bars that are no alternatives of the top stay."""
    assert grouped(expression) == expected


@pytest.mark.parametrize("expression", [SPLIT, GPT2_SPLIT, QWEN])
def test_a_grouped_expression_splits_the_same(expression: str) -> None:
    """Every text of the self-test falls into the same parts."""
    assert grouped(expression) != expression
    before, after = (Split(Regex(text), "isolated") for text in (expression, grouped(expression)))
    for text in self_test_texts(["<|end|>"]):
        assert after.pre_tokenize_str(text) == before.pre_tokenize_str(text)


@pytest.mark.parametrize("expression", [SPLIT, GPT2_SPLIT, QWEN])
def test_marks_do_what_the_look_around_did(expression: str) -> None:
    """Split at the marks and then without look-around, every text of the self-test falls into the same parts."""
    fastest, plainest = splittings(expression)
    assert "(?!" not in fastest.expression
    assert plainest.expression == grouped(expression)
    search = CharacterSearch(fastest.places)
    before = Split(Regex(expression), "isolated")
    after = Split(Regex(fastest.expression), "isolated")
    with_marks = 0
    for text in self_test_texts([]):
        marked = fastest.marked(text)
        assert marked is not None
        parts = [part for piece in marked[0].split(CUT) for part, _ in after.pre_tokenize_str(piece)]
        assert parts == [part for part, _ in before.pre_tokenize_str(text)]
        assert search.finds_in(text) or not marked[1]
        assert fastest.hinted_in(text) or not (marked[1] and text.isascii())
        with_marks += marked[1] > 0
    assert with_marks > 600


@pytest.mark.parametrize(
    "expression",
    [
        r"a|\s+(?!\S)",
        r"a|\s+",
        r"a(?=b)|\s+(?!\S)|\s+",
        r"(?i)a|\s+(?!\S)|\s+",
        r"\s+(?!\S)|\s+",
        r"a|\s+(?!\S)|\s+|b",
        r"a\b|\s+(?!\S)|\s+",
        r"\s+$|a|\s+(?!\S)|\s+",
        r"^a|\s+(?!\S)|\s+",
        r"\w+",
    ],
)
def test_other_expressions_are_used_as_they_are(expression: str) -> None:
    """Marks replace one look-around at the end, and nothing else."""
    (only,) = splittings(expression)
    assert only.expression == grouped(expression)
    assert only.marked("a  b") == ("a  b", 0)


def test_a_long_text_is_marked_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the bits end, the marks stand where they stand in the whole."""
    chance = random.Random(8)
    for expression in (QWEN, GPT2_SPLIT):
        splitting = next(splittings(expression))
        for _ in range(2_000):
            text = "".join(chance.choice(" \n\ta.") for _ in range(chance.randrange(40)))
            monkeypatch.setattr(expressions, "WINDOW_CHARS", 1_000)
            whole = splitting.marked(text)
            monkeypatch.setattr(expressions, "WINDOW_CHARS", chance.randrange(1, 7))
            assert splitting.marked(text) == whole


def test_no_bit_is_much_longer_than_the_others() -> None:
    """Bits end after the next character that is no white space, and together they are the text."""
    text = "a  " * 30_000 + " " * 20_000 + "b"
    bits = list(expressions._windows(text))
    assert "".join(bits) == text
    assert max(map(len, bits[:10])) <= expressions.WINDOW_CHARS + 3
    assert len(bits) == 12


def test_a_text_that_holds_the_mark_is_not_marked() -> None:
    """Its count would be wrong, so somebody else has to count it."""
    assert next(splittings(QWEN)).marked(f"a  b{CUT}") is None


def test_a_search_finds_its_characters_and_no_others() -> None:
    """Ranges begin and end where they should, and special characters stand for themselves."""
    search = CharacterSearch(character_class([*map(ord, "-[]^"), 0xE9, 0xEA, 0xD800, 0x1F600]))
    assert all(search.finds_in(f"some text {found} goes on") for found in "-[]^éê😀")
    assert not any(search.finds_in(f"some text {other} goes on") for other in ("", "\\", "è", "ë", "😁", "("))


def test_what_normalization_changes_is_found() -> None:
    """A text in which the search finds nothing is its own NFC, whatever it is made of."""
    chance = random.Random(5)
    search = CharacterSearch(_composing())
    marks = [chr(code) for code in range(0x3100) if unicodedata.combining(chr(code))]
    letters = [
        chr(code)
        for code in (
            *range(0x41, 0x2100, 3),
            *range(0x900, 0x1100),
            *range(0x1100, 0x1200),
            *range(0x1E00, 0x2000),
            *range(0xAC00, 0xAD00),
        )
    ]
    changed = untouched = 0
    for _ in range(100_000):
        text = "".join(
            chance.choice(chance.choice((marks, letters, letters))) for _ in range(chance.randrange(6))
        )
        if search.finds_in(text):
            changed += unicodedata.normalize("NFC", text) != text
        else:
            assert unicodedata.normalize("NFC", text) == text
            untouched += 1
    assert changed > 1_000
    assert untouched > 1_000


def test_every_character_alone_and_after_a_letter_is_its_own_nfc_or_found() -> None:
    """The same for every character there is, alone and behind a letter, a mark and a Hangul syllable."""
    search = CharacterSearch(_composing())
    for code in (*range(0xD800), *range(0xE000, 0x10000), *range(0x20000, 0x30000)):
        text = f"{chr(code)} a{chr(code)} a\u0323{chr(code)} 가{chr(code)}"
        assert unicodedata.normalize("NFC", text) == text or search.finds_in(text)


def test_neighbours_that_normalization_changes_are_found() -> None:
    """All pairs whose second may join or pass the first: NFC leaves them as they are, or the search finds them."""
    search = CharacterSearch(_composing())
    every = [chr(code) for code in (*range(0xD800), *range(0xF900, 0x10000), *range(0x20000, 0x30000, 97))]
    inner = {part for character in every for part in unicodedata.normalize("NFD", character)[1:]}
    seconds = [one for one in every if one in inner or unicodedata.combining(one)]
    parts = {part for one in every for part in unicodedata.normalize("NFD", one)}
    firsts = [
        one
        for one in every
        if (one in parts or unicodedata.normalize("NFD", one) != one or unicodedata.combining(one))
        and not "\uac20" < one < "\ud788"
    ]
    changed = missed = 0
    for second in seconds:
        text = "\n".join(first + second for first in firsts)
        if unicodedata.is_normalized("NFC", text):
            continue
        for pair in text.split("\n"):
            if not unicodedata.is_normalized("NFC", pair):
                changed += 1
                missed += not search.finds_in(pair)
    assert changed > 100_000
    assert missed == 0


@pytest.mark.parametrize(
    "text",
    ["বাংলা ভাষা", "தமிழ் மொழி", "ಕನ್ನಡ", "ที่ผู้นี้", "हिन्दी में", "Tiếng Việt", "မြန်မာ", "한국어", "日本語のガ"],
)
def test_ordinary_writing_is_not_taken_for_decomposed(text: str) -> None:
    """Composed texts of scripts with many signs are left alone: normalizing costs as much as encoding."""
    assert unicodedata.normalize("NFC", text) == text
    assert not CharacterSearch(_composing()).finds_in(text)


@pytest.mark.parametrize("nfc", [True, False])
def test_unsettled_are_unassigned_characters_and_new_planes(nfc: bool) -> None:
    """And with NFC marks that the other program does not know."""
    search = CharacterSearch(_unsettled(nfc=nfc))
    assert all(
        search.finds_in(f"a{chr(code)}") for code in (0x378, 0x10000, 0x1EFFF, 0x1FB00, 0xE0001, 0x10FFFF)
    )
    assert not any(search.finds_in(f"a{text}") for text in ("é", "你好", "😀", "नमस्ते", "\u0301", "𠀀"))
    assert search.finds_in("a\u0898") is nfc
