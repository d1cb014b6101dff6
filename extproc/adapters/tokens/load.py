"""From the files of a model to its `ModelTokens`, with every shortcut tried before it is trusted.

Takes one to three seconds per tokenizer, most of it proofs; done before serving, and blocking.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from extproc.adapters.tokens.added_tokens import AddedTokenSplitter
from extproc.adapters.tokens.bpe_proof import prove
from extproc.adapters.tokens.chat_template import (
    ChatTemplate,
    ChatTemplates,
    read_template_sources,
    special_token_texts,
)
from extproc.adapters.tokens.count_cache import CountCache
from extproc.adapters.tokens.encoder import Encoder, ReferenceEncoder, TiktokenEncoder
from extproc.adapters.tokens.engine_rules import RULES
from extproc.adapters.tokens.engine_shape import ContentFormat
from extproc.adapters.tokens.errors import TokenizerUnusable
from extproc.adapters.tokens.expressions import splittings
from extproc.adapters.tokens.mistral_tokens import PromptTokens, is_mistral_file, load_mistral_tokens
from extproc.adapters.tokens.model_tokens import ChatEnds, ModelTokens
from extproc.adapters.tokens.self_test import self_test_texts
from extproc.adapters.tokens.slices import SLICE_CHARS, slices, tokens_respect_cuts
from extproc.adapters.tokens.tokenizer_file import TokenizerFile, read_tokenizer_file
from extproc.domain.policy import Engine

CACHE_BYTES = 32 * 1024 * 1024
"""About 130,000 pieces: the turns of some 10,000 conversations. Whole prompts get an eighth of it on top."""

NFC_SHRINKS = 3
"""Composing makes UTF-8 at most three times shorter (a KELVIN SIGN, three bytes, becomes a K)."""


def load_tokens(
    tokenizer_path: Path | str,
    chat_template_path: Path | str | None = None,
    *,
    engine: Engine = Engine.VLLM,
    cache_bytes: int = CACHE_BYTES,
) -> PromptTokens:
    """The counting of a model by whichever kind of file `tokenizer_path` is: see `load_model_tokens`.

    Mistral's own files need no template and `extproc[mistral]`. Raises `TokenizerUnusable`.
    """
    path = Path(tokenizer_path)
    if is_mistral_file(path):
        return load_mistral_tokens(path, cache_bytes=cache_bytes // 8)
    return load_model_tokens(path, chat_template_path, engine=engine, cache_bytes=cache_bytes)


def load_model_tokens(
    tokenizer_path: Path | str,
    chat_template_path: Path | str | None = None,
    *,
    content_format: ContentFormat | None = None,
    engine: Engine = Engine.VLLM,
    cache_bytes: int = CACHE_BYTES,
) -> ModelTokens:
    """The counting of the model whose tokenizer is at `tokenizer_path`, a `tokenizer.json` or its directory.

    The chat template comes from `chat_template_path`, else from beside the tokenizer (`read_template_sources`).
    `content_format` overrides what the template seems to want, as vLLM's `--chat-template-content-format` does.
    `engine` is the program whose counts these are.
    Raises `TokenizerUnusable`, whose message names the file and the remedy.
    """
    # The library's own threads serve batches; this process counts one text per call, in threads of its own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(tokenizer_path)
    if path.is_dir():
        path /= "tokenizer.json"
    file = read_tokenizer_file(path)
    config = _config(path.parent)
    sources = read_template_sources(
        path.parent, config, None if chat_template_path is None else Path(chat_template_path)
    )
    special_tokens = special_token_texts(config)
    templates = ChatTemplates(
        {
            name: ChatTemplate(
                text, name=where, special_tokens=special_tokens, content=content_format, engine=engine
            )
            for name, (text, where) in sources.items()
        }
    )
    tokenizer = _tokenizer(path)
    rules = RULES[engine]
    if not rules.normalizes and file.normalizer == "nfc":
        tokenizer.normalizer = None
        file = replace(file, normalizer="none")
    ends = _chat_ends(config, tokenizer) if rules.adds_special_tokens else None
    return _proved(file, tokenizer, templates, cache_bytes, ends)


def _tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise TokenizerUnusable(
            f"{path} cannot be loaded ({error}); it may need a newer release of the `tokenizers` library"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _config(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json` over `special_tokens_map.json`; both may be absent."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise TokenizerUnusable(
                f"{path} cannot be read ({type(error).__name__}); correct the file or remove it"
            ) from error
        if not isinstance(read, Mapping):
            raise TokenizerUnusable(f"{path} is not a JSON object; correct the file or remove it")
        config.update(read)
    return config


def _chat_ends(config: Mapping[str, Any], tokenizer: Tokenizer) -> ChatEnds:
    """Does the model add BOS and EOS? As its configuration says, else as its tokenizer does."""
    texts = special_token_texts(config)
    ids = tokenizer.encode_batch_fast([""], add_special_tokens=True)[0].ids
    ends: dict[str, bytes] = {}
    for name in ("bos", "eos"):
        text = texts.get(f"{name}_token", "")
        adds = config.get(f"add_{name}_token")
        if adds is None:
            adds = bool(text) and tokenizer.token_to_id(text) in ids
        ends[name] = text.encode() if adds else b""
    return ChatEnds(bos=ends["bos"], eos=ends["eos"])


def _proved(
    file: TokenizerFile,
    tokenizer: Tokenizer,
    templates: ChatTemplates,
    cache_bytes: int,
    chat_ends: ChatEnds | None,
) -> ModelTokens:
    reference = ReferenceEncoder(tokenizer)
    texts = self_test_texts([token.content for token in file.added_tokens])
    splitter = AddedTokenSplitter(file.added_tokens, normalizes=file.normalizer != "none")
    why_whole = splitter.why_not or _try_pieces(texts, splitter, reference)
    pieces = [] if why_whole else list(dict.fromkeys(_pieces(texts, splitter)))
    encoder: Encoder = reference
    # Only pieces are free of added tokens, and `tiktoken` knows none.
    why_reference = f"texts are counted whole: {why_whole}" if why_whole else ""
    if not why_reference:
        fast = _fast_encoder(file, tokenizer, reference, pieces)
        if isinstance(fast, str):
            why_reference = fast
        else:
            encoder = fast
    sliced = not why_whole and tokens_respect_cuts(file.token_texts) and _try_slices(pieces, reference)
    longest = file.longest_token_bytes
    if longest is not None and file.normalizer == "nfc":
        longest *= NFC_SHRINKS
    return ModelTokens(
        templates=templates,
        encoder=encoder,
        splitter=None if why_whole else splitter,
        pieces=CountCache(cache_bytes),
        prompts=CountCache(cache_bytes // 8),
        tokens_around=(
            tokenizer.num_special_tokens_to_add(is_pair=False)
            if chat_ends is None
            else chat_ends.missing_in(b"")
        ),
        chat_ends=chat_ends,
        longest_token_bytes=longest,
        slice_chars=SLICE_CHARS if sliced else None,
        why_reference=why_reference,
        why_whole=why_whole,
        reference=reference,
    )


def _fast_encoder(
    file: TokenizerFile, tokenizer: Tokenizer, reference: ReferenceEncoder, pieces: Sequence[str]
) -> TiktokenEncoder | str:
    """The fastest encoder that gives the same ids for all `pieces`; or why there is none."""
    if file.fast_bpe is None:
        return file.why_not_fast
    ranks = prove(file.fast_bpe, tokenizer)
    if isinstance(ranks, str):
        return ranks
    expected = [reference.ids(piece) for piece in pieces]
    why = ""
    for splitting in splittings(file.fast_bpe.split):
        try:
            fast = TiktokenEncoder(file, ranks, splitting, reference)
        except ValueError as error:
            why = f"tiktoken cannot use the splitting expression ({error})"
            continue
        if all(fast.ids(piece) == ids for piece, ids in zip(pieces, expected, strict=True)):
            return fast
        why = "tiktoken splits a text of the self-test otherwise"
    return why


def _pieces(texts: list[str], splitter: AddedTokenSplitter) -> list[str]:
    return [piece.decode() for text in texts for piece in splitter.split(text.encode())[0]]


def _try_pieces(texts: list[str], splitter: AddedTokenSplitter, reference: ReferenceEncoder) -> str:
    """Is a text's count the sum of its pieces'? Empty if so, for all texts; else why not."""
    for text in texts:
        pieces, added = splitter.split(text.encode())
        if added and reference.count(text) != added + sum(
            reference.count(piece.decode()) for piece in pieces
        ):
            return "a text of the self-test has another count than its pieces have together"
    return ""


def _try_slices(pieces: list[str], reference: ReferenceEncoder) -> bool:
    for piece in pieces:
        parts = list(slices(piece, 1))
        if len(parts) > 1 and reference.count(piece) != sum(map(reference.count, parts)):
            return False
    return True
