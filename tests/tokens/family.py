"""Tokenizers of every construction that models use, small, trained in a moment on the repository's own text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

CORPUS_DIR = Path(__file__).resolve().parents[1] / "data" / "corpus"
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\n' + message['content'] + '</s>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def corpus(pattern: str = "*.txt") -> Iterator[str]:
    """The lines of the repository's own text."""
    for path in sorted(CORPUS_DIR.glob(pattern)):
        yield from path.read_text("utf-8").splitlines(keepends=True)


def of_merges(*merges: tuple[str, str], split: str | None = None, nfc: bool = False) -> Tokenizer:
    """A byte-level BPE with these merges and no others."""
    texts = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)])
    tokenizer = Tokenizer(models.BPE({text: at for at, text in enumerate(texts)}, list(merges)))
    steps: list[Any] = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _bpe(tokenizer: Tokenizer, *, byte_level: bool, vocabulary: int = 900) -> Tokenizer:
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        initial_alphabet=alphabet if byte_level else [],
        special_tokens=SPECIAL if byte_level else ["<unk>", *SPECIAL, *alphabet],
        limit_alphabet=300,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def _byte_level(split: str | None, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    tokenizer.pre_tokenizer = options.pop("pre_tokenizer", pre_tokenizers.Sequence(steps))
    if "normalizer" in options:
        tokenizer.normalizer = options["normalizer"]
    return _bpe(tokenizer, byte_level=True)


def gpt2() -> Tokenizer:
    """GPT-2's construction: ByteLevel with its built-in expression."""
    return _byte_level(None, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama3() -> Tokenizer:
    """One splitting expression, then bytes, and a BOS around texts."""
    tokenizer = _byte_level(SPLIT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def qwen() -> Tokenizer:
    """NFC first."""
    return _byte_level(SPLIT, normalizer=normalizers.NFC())


def deepseek() -> Tokenizer:
    """Several expressions one after the other, and added tokens that are `normalized`."""
    tokenizer = _byte_level(
        None,
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
                pre_tokenizers.Split(Regex(r"[一-龥]+"), "isolated"),
                pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=True), AddedToken("s><", normalized=True)])
    return tokenizer


def roberta() -> Tokenizer:
    """A space before every piece, and a mask that swallows the space on its left."""
    tokenizer = _byte_level(None, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def phi3() -> Tokenizer:
    """Added tokens that swallow the white space on their right, or on both sides."""
    tokenizer = _byte_level(SPLIT)
    tokenizer.add_special_tokens(
        [AddedToken("<|end|>", rstrip=True), AddedToken("<|both|>", lstrip=True, rstrip=True)]
    )
    return tokenizer


def single_word() -> Tokenizer:
    """An added token that only counts as a word of its own."""
    tokenizer = _byte_level(SPLIT)
    tokenizer.add_tokens([AddedToken("river", single_word=True)])
    return tokenizer


def normalized_under_nfc() -> Tokenizer:
    """An added token that is looked for after NFC."""
    tokenizer = _byte_level(SPLIT, normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("é!", normalized=True)])
    return tokenizer


def llama2() -> Tokenizer:
    """SentencePiece BPE as first converted: a normalizer puts a space before every piece; bytes as a last resort."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _bpe(tokenizer, byte_level=False)


def llama2_first() -> Tokenizer:
    """SentencePiece BPE as converted since: only the text's very beginning gets a space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _bpe(tokenizer, byte_level=False)


def gemma() -> Tokenizer:
    """SentencePiece BPE without any space put in."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _bpe(tokenizer, byte_level=False)


def t5() -> Tokenizer:
    """SentencePiece Unigram with NFKC."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(corpus("prose.txt"), trainer)
    return tokenizer


def bert() -> Tokenizer:
    """WordPiece over cleaned, lower-cased words, between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]", *SPECIAL]
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=128)
    return tokenizer


FAMILY: Mapping[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        gpt2,
        llama3,
        qwen,
        deepseek,
        roberta,
        phi3,
        single_word,
        normalized_under_nfc,
        llama2,
        llama2_first,
        gemma,
        t5,
        bert,
    )
}


def save(tokenizer: Tokenizer, directory: Path, *, chat_template: str | None = CHATML, **config: Any) -> Path:
    """The tokenizer in Hugging Face form, in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


def plain(directory: Path) -> Tokenizer:
    """The tokenizer in `directory`, as the engine would ask it: without padding and truncation."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
