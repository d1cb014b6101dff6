"""Counting in pieces, in slices and by another program gives what the model's own tokenizer gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from extproc.adapters.tokens.load import load_model_tokens
from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.adapters.tokens.self_test import self_test_texts
from extproc.adapters.tokens.slices import slices
from extproc.domain.prompt import ChatPrompt
from tests.tokens.counting import count, count_text
from tests.tokens.family import corpus, of_merges, plain, save

SHORTCUTS = {
    # name: counted by, in pieces, in slices
    "gpt2": ("tiktoken", True, True),
    "llama3": ("tiktoken", True, True),
    "qwen": ("tiktoken", True, True),
    "deepseek": ("tokenizers", True, True),
    "roberta": ("tokenizers", True, False),
    "phi3": ("tiktoken", True, True),
    "single_word": ("tokenizers", False, False),
    "normalized_under_nfc": ("tokenizers", True, True),
    "llama2": ("tokenizers", True, False),
    "llama2_first": ("tokenizers", False, False),
    "gemma": ("tokenizers", True, False),
    "t5": ("tokenizers", True, False),
    "bert": ("tokenizers", True, True),
}


def mixed_texts(tokenizer: Tokenizer, number: int) -> list[str]:
    """Random texts of words, spaces and added tokens."""
    chance = random.Random(11)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    words = [
        *added,
        *added,
        " ",
        "  ",
        "\n",
        "\t",
        "\u3000",
        "\x1f",
        "\x85",
        "river",
        "rivers",
        "é!",
        "e\u0301!",
    ]
    words += [
        "the quick",
        " brown",
        "fox.",
        "12345",
        "你好",
        "🤖",
        "<",
        "|>",
        "s",
        "<|us",
        "A",
        "-",
        ",b",
        "IT'S",
    ]
    return ["".join(chance.choice(words) for _ in range(chance.randrange(1, 14))) for _ in range(number)]


def test_every_construction_takes_the_shortcuts_that_hold_for_it(
    family_dir: Path, family_member: ModelTokens
) -> None:
    """A shortcut is taken exactly where it can be trusted, and a reason is given where it is not."""
    member = family_member
    assert (member.encoder_name, member.piecewise, member.sliced) == SHORTCUTS[family_dir.name]
    assert bool(member.why_reference) == (member.encoder_name == "tokenizers")
    assert bool(member.why_whole) == (not member.piecewise)


def test_every_construction_counts_as_the_whole_text_does(
    family_dir: Path, family_member: ModelTokens
) -> None:
    """The count of a text is the number of ids that the model's own tokenizer gives for the whole of it."""
    tokenizer = plain(family_dir)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for text in (*self_test_texts(added), *mixed_texts(tokenizer, 3_000)):
        assert count_text(family_member, text) == len(tokenizer.encode(text, add_special_tokens=False)), repr(
            text
        )


def test_tokens_around_a_text_are_counted_once(family_dir: Path, family_member: ModelTokens) -> None:
    """What the tokenizer puts around a text by itself is in the count if asked for, else not."""
    tokenizer = plain(family_dir)
    for text in ("", "one", "<s>one", "one <|user|> two"):
        for asked in (True, False):
            expected = len(tokenizer.encode(text, add_special_tokens=asked))
            assert count_text(family_member, text, add_special_tokens=asked) == expected


def test_a_conversation_counts_as_its_rendered_text_does(
    family_dir: Path, family_member: ModelTokens
) -> None:
    """A chat is counted without the tokenizer's own additions: the template prints what belongs in front."""
    tokenizer = plain(family_dir)
    chance = random.Random(5)
    for _ in range(100):
        contents = [
            " ".join(chance.choices(mixed_texts(tokenizer, 20), k=3)) for _ in range(chance.randrange(1, 6))
        ]
        messages = [{"role": "user", "content": content} for content in contents]
        text = "".join(f"<|user|>user\n{content}</s>\n" for content in contents) + "<|assistant|>"
        expected = len(tokenizer.encode(text, add_special_tokens=False))
        assert count(family_member, ChatPrompt(messages=messages)) == expected


@pytest.mark.parametrize("name", ["qwen3", "tiny"])
def test_a_shipped_tokenizer_counts_as_the_whole_text_does(
    name: str, request: pytest.FixtureRequest, qwen3_dir: Path, tokenizer_dir: Path
) -> None:
    """The same for the tokenizer of a real model family, and for the package's own."""
    model: ModelTokens = request.getfixturevalue(name)
    tokenizer = plain({"qwen3": qwen3_dir, "tiny": tokenizer_dir}[name])
    assert (model.encoder_name, model.piecewise, model.sliced) == ("tiktoken", True, True)
    for text in mixed_texts(tokenizer, 5_000):
        assert count_text(model, text) == len(tokenizer.encode(text, add_special_tokens=False)), repr(text)


@pytest.mark.parametrize("size_chars", [1, 7, 64])
def test_a_long_text_counts_the_same_in_slices_of_any_size(
    qwen3: ModelTokens, qwen3_dir: Path, size_chars: int
) -> None:
    """Where a long text is cut does not show in its count."""
    text = "".join(corpus())
    parts = list(slices(text, size_chars))
    assert len(parts) > 200
    assert sum(count_text(qwen3, part) for part in parts) == len(plain(qwen3_dir).encode(text))


def test_a_token_across_a_cut_forbids_slices(tmp_path: Path) -> None:
    """Even one that no text of the self-test shows: the vocabulary is asked, not only examples."""
    spanning = of_merges(("z", "q"), ("zq", "Ġ"), ("zqĠ", "zq"))
    apart = of_merges(("z", "q"), ("Ġ", "zq"))
    assert not load_model_tokens(save(spanning, tmp_path / "spanning")).sliced
    assert load_model_tokens(save(apart, tmp_path / "apart")).sliced


def test_half_characters_of_json_are_counted_as_replacement_characters(qwen3: ModelTokens) -> None:
    """A lone surrogate neither fails nor vanishes, and two halves are one character."""
    assert count_text(qwen3, "a\ud800b") == count_text(qwen3, "a\ufffdb")
    assert count_text(qwen3, "\ud83e\udd16") == count_text(qwen3, "🤖")
    assert count_text(qwen3, "\udd16\ud83e") == count_text(qwen3, "\ufffd\ufffd")
