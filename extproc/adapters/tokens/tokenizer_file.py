"""`tokenizer.json` as far as counting needs it: which parts does this tokenizer consist of?

`tokenizers` loads and runs the file; this reads the few facts that decide what can be done faster or in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from extproc.adapters.tokens.errors import TokenizerUnusable

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` with `use_regex` splits by: GPT-2's expression, built into `tokenizers`."""


def _symbols() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a printable character; this is the way back.

    Printable Latin-1 stands for itself, the other bytes in order for U+0100 and up (GPT-2's table).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


BYTE_SYMBOLS = _symbols()
_BYTE_OF_SYMBOL = {ord(symbol): byte for symbol, byte in BYTE_SYMBOLS.items()}
_SEPARATOR = "\ue000"  # private use: stands for no byte and in no vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A text that is one token wherever it stands, and how `tokenizers` looks for it."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevelBpe:
    """A tokenizer that splits text by one expression and merges bytes inside the parts."""

    split: str
    vocabulary: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]
    ignore_merges: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """The facts. `fast_bpe` is None, and `why_not_fast` says why, unless the file is a `ByteLevelBpe`."""

    added_tokens: tuple[AddedToken, ...]
    normalizer: str
    """`"none"`, `"nfc"` or `"other"`."""
    fast_bpe: ByteLevelBpe | None
    why_not_fast: str
    longest_token_bytes: int | None
    """No token stands for more bytes of normalized text than this. None: text may vanish or shrink."""
    token_texts: str
    """The texts of all tokens, one after the other with NUL between them. The tokenizer's stand-ins for spaces and
    bytes are undone; bytes that are no whole character are U+FFFD."""


def read_tokenizer_file(path: Path) -> TokenizerFile:
    """The facts about the tokenizer at `path`. Raises `TokenizerUnusable`."""
    try:
        content = orjson.loads(path.read_bytes())
        model = content["model"]
        added = tuple(_added(entry) for entry in content.get("added_tokens") or ())
    except OSError as error:
        raise TokenizerUnusable(
            f"{path}: the tokenizer cannot be read ({error.strerror}); check the path in the policy; a directory "
            "must hold a tokenizer.json"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerUnusable(
            f"{path} is not a tokenizer.json of the Hugging Face form; export one with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        ) from error
    normalizer = _normalizer(content.get("normalizer"))
    fast, why = _fast_bpe(content, model, added, normalizer)
    texts = _token_texts(model, fast is not None or _has(content.get("pre_tokenizer"), "ByteLevel"))
    return TokenizerFile(
        added_tokens=added,
        normalizer=normalizer,
        fast_bpe=fast,
        why_not_fast=why,
        longest_token_bytes=_longest_bytes(fast, added),
        token_texts=texts,
    )


def token_bytes(texts: Iterable[str]) -> list[bytes]:
    """The bytes that byte-level tokens stand for. Characters that stand for no byte become question marks."""
    # All in one go: a hundred thousand calls would take longer than anything else here.
    joined = _SEPARATOR.join(texts).translate(_BYTE_OF_SYMBOL)
    return [text.encode("latin-1", "replace") for text in joined.split(_SEPARATOR)]


def _added(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        content=entry["content"],
        single_word=bool(entry.get("single_word")),
        lstrip=bool(entry.get("lstrip")),
        rstrip=bool(entry.get("rstrip")),
        normalized=bool(entry.get("normalized", not entry.get("special"))),
    )


def _steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a part that may be absent, one step, or a sequence of them."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for inner in part[key] for step in _steps(inner, key)]
    return [part]


def _has(part: Mapping[str, Any] | None, kind: str) -> bool:
    return any(step.get("type") == kind for step in _steps(part, "pretokenizers"))


def _normalizer(part: Mapping[str, Any] | None) -> str:
    kinds = [step.get("type") for step in _steps(part, "normalizers")]
    if not kinds:
        return "none"
    return "nfc" if set(kinds) == {"NFC"} else "other"


def _split(part: Mapping[str, Any] | None) -> str | None:
    """The one expression that the pre-tokenizer splits by before it goes to bytes; None if it does otherwise."""
    steps = _steps(part, "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    if steps[-1].get("use_regex", True):
        return GPT2_SPLIT if len(steps) == 1 else None
    if len(steps) != 2 or steps[0].get("type") != "Split":
        return None
    split = steps[0]
    expression: str | None = split["pattern"].get("Regex")
    return expression if split.get("behavior") == "Isolated" and not split.get("invert") else None


def _fast_bpe(
    content: Mapping[str, Any], model: Mapping[str, Any], added: tuple[AddedToken, ...], normalizer: str
) -> tuple[ByteLevelBpe | None, str]:
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        return None, f"the model is {model.get('type')}, not BPE"
    if normalizer == "other":
        return None, "the normalizer is neither absent nor NFC"
    if normalizer == "nfc" and any(token.normalized for token in added):
        return None, "added tokens are looked for in normalized text"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            return None, f"the model uses {option}"
    split = _split(content.get("pre_tokenizer"))
    if split is None:
        return None, "the pre-tokenizer is not one expression followed by ByteLevel"
    names = {token.content for token in added}
    vocabulary = {text: number for text, number in model["vocab"].items() if text not in names}
    if not BYTE_SYMBOLS.keys() <= vocabulary.keys():
        return None, "the vocabulary lacks some of the 256 bytes"
    merges = tuple(_pair(merge) for merge in model["merges"])
    return ByteLevelBpe(
        split=split,
        vocabulary=vocabulary,
        merges=merges,
        ignore_merges=bool(model.get("ignore_merges")),
    ), ""


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _longest_bytes(fast: ByteLevelBpe | None, added: tuple[AddedToken, ...]) -> int | None:
    if fast is None or any(token.lstrip or token.rstrip for token in added):
        return None
    longest = max(map(len, fast.vocabulary))  # a symbol per byte
    return max([longest, *(len(token.content.encode()) for token in added)])


def _token_texts(model: Mapping[str, Any], byte_level: bool) -> str:
    vocabulary = model.get("vocab") or ()
    texts = [entry if isinstance(entry, str) else str(entry[0]) for entry in vocabulary]
    if byte_level:
        return b"\0".join(token_bytes(texts)).decode("utf-8", "replace")
    return "\0".join(texts).replace("\u2581", " ")
