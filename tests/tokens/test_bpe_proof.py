"""When tiktoken may stand in for a byte-level BPE tokenizer: the conditions, and that they are enough."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from extproc.adapters.tokens.bpe_proof import Ranks, prove
from extproc.adapters.tokens.tokenizer_file import BYTE_SYMBOLS, ByteLevelBpe

EVERYTHING = r"[\s\S]+"
TEXTS = ["".join(letters) for length in range(1, 9) for letters in product("ab", repeat=length)]


def bpe(
    merges: list[tuple[str, str]], *, ignore_merges: bool = False, extra: tuple[str, ...] = ()
) -> ByteLevelBpe:
    """A tokenizer of all bytes and the tokens that `merges` make, `extra` ones besides."""
    texts = dict.fromkeys([*BYTE_SYMBOLS, *(left + right for left, right in merges), *extra])
    return ByteLevelBpe(
        split=EVERYTHING,
        vocabulary={text: number for number, text in enumerate(texts)},
        merges=tuple(merges),
        ignore_merges=ignore_merges,
    )


def loaded(model: ByteLevelBpe) -> Tokenizer:
    """The same for the `tokenizers` library."""
    tokenizer = Tokenizer(
        models.BPE(dict(model.vocabulary), list(model.merges), ignore_merges=model.ignore_merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def same_ids(model: ByteLevelBpe, ranks: Ranks, tokenizer: Tokenizer) -> bool:
    """Do both programs give the same ids for every short text of two letters?"""
    fast = tiktoken.Encoding(
        "t", pat_str=EVERYTHING, mergeable_ranks=ranks.by_bytes, special_tokens={"none": len(ranks.by_bytes)}
    )
    encodings = tokenizer.encode_batch_fast(TEXTS, add_special_tokens=False)
    return all(
        [ranks.ids[rank] for rank in fast.encode_ordinary(text)] == encoding.ids
        for text, encoding in zip(TEXTS, encodings, strict=True)
    )


@st.composite
def merge_lists(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Merges over two letters: each joins two tokens that there are; the order is now and then disturbed."""
    tokens = ["a", "b"]
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(1, 8))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if pair not in merges:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    if draw(st.integers(0, 3)) == 0:
        merges = draw(st.permutations(merges))
    return merges


def completed(merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The merge list that conversion from tiktoken makes: for each token in order every pair that joins to it."""
    order = list(dict.fromkeys(left + right for left, right in merges))
    tokens = {"a", "b", *order}
    cuts = ((text[:at], text[at:]) for text in order for at in range(1, len(text)))
    return [pair for pair in cuts if set(pair) <= tokens]


@settings(max_examples=300, deadline=None)
@given(merges=merge_lists(), ignore_merges=st.booleans(), complete=st.booleans())
def test_what_is_accepted_gives_the_same_ids_for_every_text(
    merges: list[tuple[str, str]], ignore_merges: bool, complete: bool
) -> None:
    """If the conditions hold, the programs agree on all texts; all short ones over two letters are tried."""
    model = bpe(completed(merges) if complete else merges, ignore_merges=ignore_merges)
    tokenizer = loaded(model)
    ranks = prove(model, tokenizer)
    if isinstance(ranks, Ranks):
        assert same_ids(model, ranks, tokenizer)


def test_conversions_from_tiktoken_are_accepted() -> None:
    """A merge list that has every pair is accepted although some tokens are not made by their own merges."""
    merges = completed([("a", "b"), ("b", "a"), ("ab", "a"), ("aba", "ba"), ("b", "b")])
    model = bpe(merges, ignore_merges=True)
    assert isinstance(prove(model, loaded(model)), Ranks)


ONE_MERGE = bpe([("a", "b")])
WITHOUT_RESULT = replace(ONE_MERGE, vocabulary={symbol: at for at, symbol in enumerate(BYTE_SYMBOLS)})


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (bpe([("a", "b")], extra=("x!",)), "not made by any merge"),
        (bpe([("a", "a"), ("a", "b"), ("a", "ab"), ("b", "a"), ("aa", "b")]), "do not stand together"),
        (bpe([("a", "b"), ("b", "b"), ("a", "bb")]), "its own merges"),
        (WITHOUT_RESULT, "outside the vocabulary"),
    ],
)
def test_what_cannot_be_proved_is_refused_with_a_reason(model: ByteLevelBpe, why: str) -> None:
    """A file that breaks a condition is refused, and the reason names the condition."""
    refused = prove(model, loaded(ONE_MERGE if model is WITHOUT_RESULT else model))
    assert isinstance(refused, str)
    assert why in refused


def test_the_proof_leaves_the_model_as_it_was() -> None:
    """Asking the model with other options does not change what it does afterwards."""
    model = bpe([("a", "b"), ("b", "b"), ("a", "bb")], ignore_merges=True)
    tokenizer = loaded(model)
    before = tokenizer.encode("abb").ids
    prove(model, tokenizer)
    assert tokenizer.encode("abb").ids == before
    assert tokenizer.model.ignore_merges is True
