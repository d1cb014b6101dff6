"""How many tokens is a text? Two programs that agree, one exact by definition and one several times faster.

`tokenizers` runs the model's own file, so its answer is the engine's. It is always asked with
`encode_batch_fast([text])`: plain `encode` holds the interpreter lock and would stop the event loop for as long as
it takes. `tiktoken` runs byte-level BPE tokenizers with one splitting expression 2 to 10 times faster, prose most;
`bpe_proof` says when its merges are the same, `self_test` whether it splits the same.

Both know no added tokens here: texts are cut at those first.
"""

from __future__ import annotations

import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

from tiktoken._tiktoken import CoreBPE
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

from extproc.adapters.tokens.bpe_proof import Ranks
from extproc.adapters.tokens.expressions import (
    BEGINNING_CHARS,
    CUT,
    NONE_SPECIAL,
    ONE_CUT,
    CharacterSearch,
    Splitting,
    character_class,
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

    def __init__(
        self, file: TokenizerFile, ranks: Ranks, splitting: Splitting, reference: ReferenceEncoder
    ) -> None:
        """Raises `ValueError` if `tiktoken` cannot read the splitting expression."""
        nfc = file.normalizer == "nfc"
        unsettled, composing = _unsettled(nfc=nfc), _composing() if nfc else ""
        self._unsettled = CharacterSearch(unsettled)
        self._composing = CharacterSearch(composing) if nfc else None
        self._piled = CharacterSearch(_piled()) if nfc else None
        self._unusual = CharacterSearch("|".join(filter(None, (unsettled, composing, splitting.places))))
        self._splitting = splitting
        self._reference = reference
        self._cut = len(ranks.by_bytes)
        self._ids = ranks.ids
        # A new thread has memory of its own, where the vocabulary's texts lie side by side. Scattered over what
        # loading has left free, they make counting Chinese or Thai a tenth slower.
        with ThreadPoolExecutor(1) as new_thread:
            self._core = new_thread.submit(
                CoreBPE, ranks.by_bytes, {CUT: self._cut}, splitting.expression
            ).result()

    def count(self, text: str) -> int:
        encoded = self._encoded(text)
        return self._reference.count(text) if encoded is None else len(encoded[0]) - encoded[1]

    def ids(self, text: str) -> list[int]:
        encoded = self._encoded(text)
        if encoded is None:
            return self._reference.ids(text)
        return [self._ids[rank] for rank in encoded[0] if rank != self._cut]

    def _encoded(self, text: str) -> tuple[memoryview[int], int] | None:
        """The ranks, and how many of them are marks; None for a text that is for the reference."""
        if len(text) > LONG_RUN_CHARS:
            return None
        cuts = 0
        ascii_only = text.isascii()
        if self._is_unusual(text, ascii_only):
            if not ascii_only:
                if self._unsettled.finds_in(text):
                    return None
                if self._composing is not None and self._composing.finds_in(text):
                    if self._piled is not None and self._piled.finds_in(text):
                        return None
                    text = unicodedata.normalize("NFC", text)
            marked = self._splitting.marked(text)
            if marked is None:
                return None
            text, cuts = marked
        try:
            ranks = self._core.encode_to_tiktoken_buffer(text, ONE_CUT if cuts else NONE_SPECIAL)
        except ValueError:  # the expression ran out of stack, on a run of some 10^6 spaces
            return None
        except BaseException as error:
            if is_panic(error):
                return None
            raise
        return memoryview(ranks).cast("B").cast("I"), cuts

    def _is_unusual(self, text: str, ascii_only: bool) -> bool:
        """May something have to be done about `text` first? One look, and most need no other."""
        if ascii_only:
            if self._splitting.hinted_in(text[:BEGINNING_CHARS]):  # as source code mostly is
                return True
            if len(text) <= BEGINNING_CHARS:
                return False
        return self._unusual.finds_in(text)


def is_panic(error: BaseException) -> bool:
    """Is this a failed assertion of a Rust library? Its class is no `Exception` and has no importable name."""
    return type(error).__name__ == "PanicException"


_SETTLED_PLANES = (*range(0x10000), *range(0x20000, 0x40000))


@cache
def _unsettled(*, nfc: bool) -> str:
    """Characters that the two programs may classify or, with `nfc`, order differently, as an expression.

    Those are the unassigned ones, and the planes where most new scripts arrive. Of the second plane only the emoji
    (U+1F000) count as settled. With `nfc` it is also the marks that the normalizer of `tokenizers`, whose Unicode is
    older, does not know for marks and leaves where they stand.
    """
    unknown = [code for code in _SETTLED_PLANES if unicodedata.category(chr(code)) == "Cn"]
    if nfc:
        unknown += (code for code in range(0x10000) if _is_unknown_mark(chr(code)))
    unknown += (*range(0x10000, 0x1F000), *range(0x1FB00, 0x20000), *range(0x40000, 0x110000))
    return character_class(sorted(set(unknown)))


@cache
def _composing() -> str:
    """What a text must hold for NFC to change it, as an expression; on the safe side, and nearer than UAX #15's
    quick check, which is in doubt about half of the vowels of India.

    A character that is another one in NFC; two neighbours that are one character in NFC; a mark behind a mark (or
    behind a letter that is composed with one) which belongs before it, or which might be composed with what the
    other stands on. A vowel sign that is no mark is composed with its neighbour only: a mark between keeps them
    apart.
    """
    changing: list[int] = []
    firsts: dict[int, list[int]] = {}
    marks: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for code in _SETTLED_PLANES:
        character = chr(code)
        if unicodedata.normalize("NFC", character) != character:
            changing.append(code)
            continue
        parts = unicodedata.decomposition(character)
        if parts and not parts.startswith("<"):
            first, second = (int(part, 16) for part in parts.split())
            firsts.setdefault(second, []).append(first)
        if order := unicodedata.combining(character):
            marks.setdefault(order, []).append(code)
        if order := unicodedata.combining(unicodedata.normalize("NFD", character)[-1]):
            ends.setdefault(order, []).append(code)
    found = [character_class(changing), *_HANGUL]
    found += (f"{character_class(sorted(before))}\\x{{{code:x}}}" for code, before in firsts.items())
    composed = [code for code in sorted(firsts) if unicodedata.combining(chr(code))]
    every_end = sorted(code for codes in ends.values() for code in codes)
    found.append(f"{character_class(every_end)}{character_class(composed)}")
    for order, codes in marks.items():
        later = sorted(code for other, many in ends.items() if other > order for code in many)
        if later:
            found.append(f"{character_class(later)}{character_class(codes)}")
    return "|".join(found)


_HANGUL = (
    "[\\x{1100}-\\x{1112}][\\x{1161}-\\x{1175}]",
    "[\\x{ac00}-\\x{d7a3}][\\x{11a8}-\\x{11c2}]",
)
"""Letters that make a syllable, and a syllable with a letter that may join it: their composition is arithmetic."""


@cache
def _piled() -> str:
    """More marks in a row than any writing has (UAX #15's stream-safe texts have 30 at most), as an expression.

    Python sorts such a row in quadratic time, a minute for 200 KB, and holds the interpreter lock meanwhile.
    """
    marks = character_class(code for code in _SETTLED_PLANES if unicodedata.combining(chr(code)))
    return f"{marks}{{{MOST_MARKS_IN_A_ROW + 1}}}"


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
