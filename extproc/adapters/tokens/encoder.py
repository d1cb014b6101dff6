"""How many tokens is a text? Two programs that agree, one exact by definition and one several times faster.

`tokenizers` runs the model's own file, so its answer is the engine's. It is always asked with
`encode_batch_fast([text])`: plain `encode` holds the interpreter lock and would stop the event loop for as long as
it takes. `tiktoken` runs byte-level BPE tokenizers with one splitting expression 2 to 10 times faster, prose most;
`bpe_proof` says when its merges are the same, `self_test` whether it splits the same.

Both know no added tokens here: texts are cut at those first.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Protocol

from tiktoken._tiktoken import CoreBPE
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

from extproc.adapters.tokens.bpe_proof import Ranks
from extproc.adapters.tokens.expressions import (
    NEVER_IN_TEXT,
    NONE_SPECIAL,
    CharacterSearch,
    character_class,
    grouped,
)
from extproc.adapters.tokens.tokenizer_file import TokenizerFile

LONG_RUN_CHARS = 1_000_000
"""Longer texts without a place to cut take a second and 30 to 100 MB per million characters with either program."""


MOST_MARKS_IN_A_ROW = 30


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

    The library's own class makes Python numbers of all ids, which costs a tenth of a count and holds the interpreter
    lock; so its core is asked, for the ids as an array.
    """

    name = "tiktoken"
    nanoseconds_per_byte = 120

    def __init__(self, file: TokenizerFile, ranks: Ranks, reference: ReferenceEncoder) -> None:
        """Raises `ValueError` if `tiktoken` cannot read the splitting expression."""
        if file.fast_bpe is None:
            raise ValueError(file.why_not_fast)
        nfc = file.normalizer == "nfc"
        self._unsettled = _unsettled(nfc=nfc)
        self._composing = _composing() if nfc else None
        self._piled = _piled() if nfc else None
        self._reference = reference
        self._ids = ranks.ids
        self._core = CoreBPE(
            ranks.by_bytes, {NEVER_IN_TEXT: len(ranks.by_bytes)}, grouped(file.fast_bpe.split)
        )

    def count(self, text: str) -> int:
        ranks = self._ranks(text)
        return self._reference.count(text) if ranks is None else len(ranks)

    def ids(self, text: str) -> list[int]:
        ranks = self._ranks(text)
        return self._reference.ids(text) if ranks is None else [self._ids[rank] for rank in ranks]

    def _ranks(self, text: str) -> memoryview[int] | None:
        if not text.isascii():
            if self._unsettled.finds_in(text):
                return None
            if self._composing is not None and self._composing.finds_in(text):
                if self._piled is not None and self._piled.finds_in(text):
                    return None
                text = unicodedata.normalize("NFC", text)
        if len(text) > LONG_RUN_CHARS:
            return None
        try:
            ranks = self._core.encode_to_tiktoken_buffer(text, NONE_SPECIAL)
        except ValueError:  # the expression ran out of stack, on a run of some 10^6 spaces
            return None
        except BaseException as error:
            if is_panic(error):
                return None
            raise
        return memoryview(ranks).cast("B").cast("I")


def is_panic(error: BaseException) -> bool:
    """Is this a failed assertion of a Rust library? Its class is no `Exception` and has no importable name."""
    return type(error).__name__ == "PanicException"


_SETTLED_PLANES = (*range(0x10000), *range(0x20000, 0x40000))


@cache
def _unsettled(*, nfc: bool) -> CharacterSearch:
    """Characters that the two programs may classify or, with `nfc`, order differently.

    Those are the unassigned ones, and the planes where most new scripts arrive. Of the second plane only the emoji
    (U+1F000) count as settled. With `nfc` it is also the marks that the normalizer of `tokenizers`, whose Unicode is
    older, does not know for marks and leaves where they stand.
    """
    unknown = [code for code in _SETTLED_PLANES if unicodedata.category(chr(code)) == "Cn"]
    if nfc:
        unknown += (code for code in range(0x10000) if _is_unknown_mark(chr(code)))
    unknown += (*range(0x10000, 0x1F000), *range(0x1FB00, 0x20000), *range(0x40000, 0x110000))
    return CharacterSearch(character_class(sorted(set(unknown))))


@cache
def _composing() -> CharacterSearch:
    """What a text must hold for NFC to change it: UAX #15's quick check, on the safe side and as an expression.

    A character that is another one in NFC; one that stands in a decomposition behind the first, so that it might
    be composed with what is before it; or two marks in a row, which might stand in the wrong order.
    """
    changing: set[int] = set()
    for code in _SETTLED_PLANES:
        character = chr(code)
        if unicodedata.normalize("NFC", character) != character:
            changing.add(code)
        changing.update(map(ord, unicodedata.normalize("NFD", character)[1:]))
    return CharacterSearch(f"{character_class(sorted(changing))}|{_marks() * 2}")


@cache
def _piled() -> CharacterSearch:
    """More marks in a row than any writing has (UAX #15's stream-safe texts have 30 at most).

    Python sorts such a row in quadratic time, a minute for 200 KB, and holds the interpreter lock meanwhile.
    """
    return CharacterSearch(f"{_marks()}{{{MOST_MARKS_IN_A_ROW + 1}}}")


@cache
def _marks() -> str:
    return character_class(code for code in _SETTLED_PLANES if unicodedata.combining(chr(code)))


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
