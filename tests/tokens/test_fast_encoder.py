"""tiktoken against the model's own tokenizer, on very many texts."""

# ruff: noqa: RUF001 - look-alikes are what these texts are about

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.adapters.tokens import load
from extproc.adapters.tokens.added_tokens import WHITE_SPACE
from extproc.adapters.tokens.encoder import LONG_RUN_CHARS, ReferenceEncoder, TiktokenEncoder
from extproc.adapters.tokens.expressions import CUT, splittings
from extproc.adapters.tokens.load import _fast_encoder
from extproc.adapters.tokens.self_test import self_test_texts
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
    fast = _fast_encoder(file, tokenizer, reference, self_test_texts([]))
    assert isinstance(fast, TiktokenEncoder)
    return fast, reference


@pytest.fixture(scope="module")
def qwen3_encoders(qwen3_dir: Path) -> tuple[TiktokenEncoder, ReferenceEncoder]:
    return encoders(qwen3_dir)


def test_a_splitting_that_is_wrong_is_not_used(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be read or differs in one text of the self-test makes room for the next, and then for none."""
    split = read_tokenizer_file(qwen3_dir / "tokenizer.json").fast_bpe
    assert split is not None
    right, plainest = splittings(split.split)
    wrong = replace(right, before_cut=re.compile(r"(\n)(?=\n\S)"))  # where no line end is left to cut at
    unreadable = replace(right, expression="(")
    monkeypatch.setattr(load, "splittings", lambda _: iter((wrong, unreadable, plainest)))
    assert encoders(qwen3_dir)[0]._splitting is plainest
    monkeypatch.setattr(load, "splittings", lambda _: iter((wrong,)))
    model = load.load_model_tokens(qwen3_dir)
    assert (model.encoder_name, model.why_reference) == (
        "tokenizers",
        "tiktoken splits a text of the self-test otherwise",
    )
    monkeypatch.undo()
    assert load.load_model_tokens(qwen3_dir)._encoder._splitting == right  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("text", ["", "a", "  a", "\n\n  b"])
def test_the_mark_is_plain_text(qwen3_encoders: tuple[TiktokenEncoder, ReferenceEncoder], text: str) -> None:
    """Nobody can write the one special token that tiktoken is given: the text for it is counted like any other."""
    fast, reference = qwen3_encoders
    for written in (f"{text}{CUT}{text}", f"{CUT}{CUT[:2]} {CUT} x{text}"):
        assert fast.ids(written) == reference.ids(written)
        assert fast.count(written) == reference.count(written)


def test_places_to_cut_are_counted_right(qwen3_encoders: tuple[TiktokenEncoder, ReferenceEncoder]) -> None:
    """Texts in which every other character is white space of some kind."""
    chance = random.Random(3)
    for _ in range(10_000):
        text = "".join(
            chance.choice(WHITE_SPACE if chance.random() < 0.6 else "aé1.'s你\u0301\x1c")
            for _ in range(chance.randrange(1, 24))
        )
        assert fast_count_of(qwen3_encoders, text) == qwen3_encoders[1].count(text)


def fast_count_of(pair: tuple[TiktokenEncoder, ReferenceEncoder], text: str) -> int:
    """The fast count; its ids must be as many."""
    counted = pair[0].count(text)
    assert len(pair[0].ids(text)) == counted
    return counted
