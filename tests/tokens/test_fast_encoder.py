"""tiktoken against the model's own tokenizer, on very many texts."""

# ruff: noqa: RUF001 - look-alikes are what these texts are about

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from extproc.adapters.tokens.encoder import LONG_RUN_CHARS, ReferenceEncoder, TiktokenEncoder
from extproc.adapters.tokens.expressions import NONE_SPECIAL
from extproc.adapters.tokens.load import _fast_encoder
from extproc.adapters.tokens.tokenizer_file import read_tokenizer_file
from tests.tokens.family import FAMILY, plain, save

ALPHABETS = (
    "abcdefg ABC",
    "ab1 2,.\n-",
    " \t\n\r\x0b\u00a0\u3000x!",
    "aé\u0301ß\u0327 \u0345q\u0323",
    "'sStTdDmMlLrReEvV ’aſ",
    "0123456789٣३½ a.",
    "你好世界，。 a1\n",
    "あア漢ー々한글 \u1100\u1161\u11a8",
    "🤖👍🏽\u200d\ufe0f🇩🇪a ",
    "नदीแม่הנהאلنهر 1",
    "{}[]()<>|/\\\"'`~!@#$%^&*_=+;:?, a0\n",
)
RANDOM_STRINGS = 100_000


def encoders(directory: Path) -> tuple[TiktokenEncoder, ReferenceEncoder]:
    """Both programs for the tokenizer in `directory`."""
    file = read_tokenizer_file(directory / "tokenizer.json")
    tokenizer = plain(directory)
    reference = ReferenceEncoder(tokenizer)
    fast = _fast_encoder(file, tokenizer, reference)
    assert isinstance(fast, TiktokenEncoder)
    return fast, reference


@pytest.fixture(scope="module")
def qwen3_encoders(qwen3_dir: Path) -> tuple[TiktokenEncoder, ReferenceEncoder]:
    return encoders(qwen3_dir)


def disagreements(pair: tuple[TiktokenEncoder, ReferenceEncoder], texts: list[str]) -> list[str]:
    """The texts for which the two programs give different ids."""
    fast, reference = pair
    encodings = reference._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [text for text, encoding in zip(texts, encodings, strict=True) if fast.ids(text) != encoding.ids]


def fuzz(number: int, seed: int) -> list[str]:
    """Random strings: of one alphabet, of several, of any characters at all."""
    chance = random.Random(seed)
    texts: list[str] = []
    for _ in range(number):
        kind = chance.randrange(4)
        length = chance.randrange(1, 24)
        if kind < 2:
            alphabet = chance.choice(ALPHABETS)
        elif kind == 2:
            alphabet = "".join(chance.choices(ALPHABETS, k=3))
        else:
            alphabet = "".join(
                chr(code)
                for code in chance.choices(range(0x20, 0x33000), k=12)
                if not 0xD800 <= code < 0xE000
            )
        texts.append("".join(chance.choice(alphabet or "a") for _ in range(length)))
    return texts


def test_a_hundred_thousand_random_strings(qwen3_encoders: tuple[TiktokenEncoder, ReferenceEncoder]) -> None:
    """Both programs give the same ids for random strings from eleven kinds of text and from all of Unicode."""
    for seed in range(10):
        assert disagreements(qwen3_encoders, fuzz(RANDOM_STRINGS // 10, seed)) == []


@pytest.mark.parametrize("name", ["gpt2", "llama3", "phi3"])
def test_other_splitting_expressions(name: str, tmp_path: Path) -> None:
    """The same for other expressions and without NFC."""
    assert disagreements(encoders(save(FAMILY[name](), tmp_path)), fuzz(10_000, 77)) == []


def test_every_character_means_the_same_to_both(
    qwen3_encoders: tuple[TiktokenEncoder, ReferenceEncoder],
) -> None:
    """Each character, beside letters, digits, spaces and marks, is split and composed alike by both programs."""
    singles = (*range(0x20, 0x3400), *range(0xA000, 0xABFF), *range(0xD7B0, 0xD800), *range(0xF900, 0x11000))
    samples = (*range(0x3400, 0xA000, 31), *range(0xAC00, 0xD7B0, 31), *range(0x11000, 0x33000, 17))
    texts = [f"a{chr(c)} {chr(c)}b1{chr(c)}\u0323!{chr(c)}\u0345A" for c in (*singles, *samples)]
    assert disagreements(qwen3_encoders, texts) == []


def test_texts_that_tiktoken_cannot_take_are_counted_all_the_same(
    qwen3_encoders: tuple[TiktokenEncoder, ReferenceEncoder], capfd: pytest.CaptureFixture[str]
) -> None:
    """A run that exhausts its expression's stack, or that is longer than is good for others, has its exact count."""
    fast, reference = qwen3_encoders
    for text in (" " * (LONG_RUN_CHARS - 1), "\n" * (LONG_RUN_CHARS + 1)):
        assert fast.count(text) == reference.count(text)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [29, 30, 31, 100_000])
def test_piles_of_marks_take_no_quadratic_time(
    qwen3_encoders: tuple[TiktokenEncoder, ReferenceEncoder], number: int
) -> None:
    """Marks that stand in the wrong order are sorted, however many they are, and never by Python's NFC if many.

    That took 10 s and more for so many; the bound is for a busy machine.
    """
    fast, reference = qwen3_encoders
    text = "a" + ("\u0301\u0323" * number)[:number] + " b"
    begun_s = time.thread_time()
    counted = fast.count(text)
    assert time.thread_time() - begun_s < 4
    assert counted == reference.count(text)


def test_the_unused_marker_is_plain_text(qwen3_encoders: tuple[TiktokenEncoder, ReferenceEncoder]) -> None:
    """Nobody can write the one special token that tiktoken is given: the text for it is counted like any other."""
    fast, reference = qwen3_encoders
    text = "a\U0010fffe\U0010ffff\U0010fffe\U0010ffffb"
    assert fast.ids(text) == reference.ids(text)
    ranks = memoryview(fast._core.encode_to_tiktoken_buffer(text, NONE_SPECIAL)).cast("B").cast("I")
    assert list(ranks) == fast._core.encode_ordinary(text)
