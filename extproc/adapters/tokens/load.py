"""From the files of a model to its `ModelTokens`, with every shortcut tried before it is trusted.

Takes one to three seconds per tokenizer, most of it proofs; done before serving, and blocking.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
from extproc.adapters.tokens.engine_shape import ContentFormat
from extproc.adapters.tokens.errors import TokenizerUnusable
from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.adapters.tokens.self_test import self_test_texts
from extproc.adapters.tokens.slices import SLICE_CHARS, slices, tokens_respect_cuts
from extproc.adapters.tokens.tokenizer_file import TokenizerFile, read_tokenizer_file

CACHE_BYTES = 32 * 1024 * 1024
"""About 130,000 pieces: the turns of some 10,000 conversations. Whole prompts get an eighth of it on top."""

NFC_SHRINKS = 3
"""Composing makes UTF-8 at most three times shorter (a KELVIN SIGN, three bytes, becomes a K)."""


def load_model_tokens(
    tokenizer_path: Path | str,
    chat_template_path: Path | str | None = None,
    *,
    content_format: ContentFormat | None = None,
    cache_bytes: int = CACHE_BYTES,
) -> ModelTokens:
    """The counting of the model whose tokenizer is at `tokenizer_path`, a `tokenizer.json` or its directory.

    The chat template comes from `chat_template_path`, else from beside the tokenizer (`read_template_sources`).
    `content_format` overrides what the template seems to want, as vLLM's `--chat-template-content-format` does.
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
            name: ChatTemplate(text, name=where, special_tokens=special_tokens, content=content_format)
            for name, (text, where) in sources.items()
        }
    )
    return _proved(file, _tokenizer(path), templates, cache_bytes)


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


def _proved(
    file: TokenizerFile, tokenizer: Tokenizer, templates: ChatTemplates, cache_bytes: int
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
        fast = _fast_encoder(file, tokenizer, reference)
        if isinstance(fast, str):
            why_reference = fast
        elif any(fast.ids(piece) != reference.ids(piece) for piece in pieces):
            why_reference = "tiktoken splits a text of the self-test otherwise"
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
        tokens_around=tokenizer.num_special_tokens_to_add(is_pair=False),
        longest_token_bytes=longest,
        slice_chars=SLICE_CHARS if sliced else None,
        why_reference=why_reference,
        why_whole=why_whole,
        reference=reference,
    )


def _fast_encoder(
    file: TokenizerFile, tokenizer: Tokenizer, reference: ReferenceEncoder
) -> TiktokenEncoder | str:
    if file.fast_bpe is None:
        return file.why_not_fast
    ranks = prove(file.fast_bpe, tokenizer)
    if isinstance(ranks, str):
        return ranks
    try:
        return TiktokenEncoder(file, ranks, reference)
    except ValueError as error:
        return f"tiktoken cannot use the splitting expression ({error})"


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
