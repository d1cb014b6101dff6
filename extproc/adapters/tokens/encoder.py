"""How many tokens is a text? Two programs that agree, one exact by definition and one several times faster.

`tokenizers` runs the model's own file, so its answer is the engine's. It is always asked with
`encode_batch_fast([text])`: plain `encode` holds the interpreter lock and would stop the event loop for as long as
it takes. `tiktoken` runs byte-level BPE tokenizers with one splitting expression 2 to 10 times faster, prose most;
`bpe_proof` says when its merges are the same, `self_test` whether it splits the same.

Both know no added tokens here: texts are cut at those first.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Protocol

import tiktoken
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

from extproc.adapters.tokens.bpe_proof import Ranks
from extproc.adapters.tokens.tokenizer_file import TokenizerFile

LONG_RUN_CHARS = 1_000_000
"""Beyond this, `tiktoken` would hold the interpreter lock for more than some 10 ms to build its list of ids. Only
texts without a place to cut come here so long."""

_NEVER_IN_TEXT = "\U0010fffe\U0010ffff\U0010fffe\U0010ffff"
"""`tiktoken` searches for special tokens at every position unless it has one to search for: four noncharacters."""


class Encoder(Protocol):
    """How many tokens does the model's tokenizer make of this text, alone and without added tokens?"""

    name: str
    nanoseconds_per_byte: int
    """About what a byte costs, on the slow side: it decides where a text is counted, never the count."""

    def count(self, text: str) -> int:
        """The number of tokens. `text` must have no lone surrogates."""
        ...


class ReferenceEncoder:
    """The model's own tokenizer."""

    name = "tokenizers"
    nanoseconds_per_byte = 500

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def count_with_special_tokens(self, text: str) -> int:
        """The number of tokens with those that the tokenizer puts around a text by itself."""
        return len(self._tokenizer.encode_batch_fast([text], add_special_tokens=True)[0])

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class TiktokenEncoder:
    """The same tokens from `tiktoken`, for a file whose merges `bpe_proof` has accepted.

    Texts that the two might normalize or classify differently go to the reference: the programs carry different
    editions of Unicode, and agree on the characters that are assigned in the edition this Python knows.
    """

    name = "tiktoken"
    nanoseconds_per_byte = 120

    def __init__(self, file: TokenizerFile, ranks: Ranks, reference: ReferenceEncoder) -> None:
        """Raises `ValueError` if `tiktoken` cannot read the splitting expression."""
        if file.fast_bpe is None:
            raise ValueError(file.why_not_fast)
        self._nfc = file.normalizer == "nfc"
        self._unsettled = _unsettled(nfc=self._nfc)
        self._reference = reference
        self._ids = ranks.ids
        self._encoding = tiktoken.Encoding(
            "policy-model",
            pat_str=file.fast_bpe.split,
            mergeable_ranks=ranks.by_bytes,
            special_tokens={_NEVER_IN_TEXT: len(ranks.by_bytes)},
        )

    def count(self, text: str) -> int:
        ranks = self._ranks(text)
        return self._reference.count(text) if ranks is None else len(ranks)

    def ids(self, text: str) -> list[int]:
        ranks = self._ranks(text)
        return self._reference.ids(text) if ranks is None else [self._ids[rank] for rank in ranks]

    def _ranks(self, text: str) -> list[int] | None:
        if not text.isascii():
            if self._unsettled.search(text):
                return None
            if self._nfc:
                text = unicodedata.normalize("NFC", text)
        if len(text) > LONG_RUN_CHARS:
            return None
        try:
            return self._encoding.encode(text, disallowed_special=())
        except ValueError:  # the expression ran out of stack, on a run of some 10^6 spaces
            return None
        except BaseException as error:
            if is_panic(error):
                return None
            raise


def is_panic(error: BaseException) -> bool:
    """Is this a failed assertion of a Rust library? Its class is no `Exception` and has no importable name."""
    return type(error).__name__ == "PanicException"


def _ranges(numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    first = last = next(numbers)
    for number in numbers:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


@cache
def _unsettled(*, nfc: bool) -> re.Pattern[str]:
    """Characters that the two programs may classify or, with `nfc`, order differently.

    Those are the unassigned ones, and the planes where most new scripts arrive. Of the second plane only the emoji
    (U+1F000) count as settled: a finer list there would cost more than the detour, as every character beyond the
    first plane is compared with all of the list. With `nfc` it is also the marks that the normalizer of
    `tokenizers`, whose Unicode is older, does not know for marks and leaves where they stand.
    """
    codes = (*range(0x10000), *range(0x20000, 0x40000))
    unassigned = (code for code in codes if unicodedata.category(chr(code)) == "Cn")
    classes = "".join(f"{chr(first)}-{chr(last)}" for first, last in _ranges(unassigned))
    if nfc:
        classes += "".join(mark for mark in map(chr, range(0x10000)) if _is_unknown_mark(mark))
    return re.compile(f"[{classes}\U00010000-\U0001efff\U0001fb00-\U0001ffff\U00040000-\U0010ffff]")


def _is_unknown_mark(character: str) -> bool:
    """Is this a mark that `tokenizers` does not put in its place beside others, above or below?"""
    if not unicodedata.combining(character):
        return False
    trials = (
        f"x{character}\u0334",
        f"x\u0345{character}",
        f"x{character}\u0345",
        f"x\u0301{character}\u0323",
    )
    return any(NFC().normalize_str(trial) != unicodedata.normalize("NFC", trial) for trial in trials)
