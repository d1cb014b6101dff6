"""Makes a real model file around any byte-level BPE tokenizer: random weights, true vocabulary, true chat template.

What such a model answers is noise, but how many tokens it reads is exactly what a trained model with the same
tokenizer would read. One file takes about a second to write and is kept for later runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CONTEXT_TOKENS = 32768
EMBEDDING = 64
LAYERS = 1
HEADS = 2
FEED_FORWARD = 128

# Part of the file name: a change of the layout must not meet a file from an earlier run.
LAYOUT = "1"

# llama.cpp knows split rules by name, not by pattern. The keys are the patterns as `tokenizer.json` writes them.
PRE_TOKENIZER_NAMES = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}


def tiny_model(tokenizer_dir: Path, cache_dir: Path) -> Path:
    """The model file for the tokenizer in `tokenizer_dir` (Hugging Face form), written on first use."""
    digest = hashlib.sha256(LAYOUT.encode())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        digest.update((tokenizer_dir / name).read_bytes())
    path = cache_dir / f"tiny-{digest.hexdigest()[:16]}.gguf"
    if not path.exists():
        # Two test processes may both write; whoever comes last replaces an equal file by an equal file.
        unfinished = path.with_suffix(f".{os.getpid()}")
        write_tiny_model(tokenizer_dir, unfinished)
        unfinished.replace(path)
    return path


def write_tiny_model(tokenizer_dir: Path, path: Path) -> None:
    """Write a llama model with random weights and the vocabulary of `tokenizer_dir` to `path`."""
    document = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, types = _vocabulary(document)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER_NAMES[_split_pattern(document)])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _add_special_tokens(writer, tokenizer_dir)
    _add_weights(writer, vocabulary_size=len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary(document: dict[str, Any]) -> tuple[list[str], list[int]]:
    by_id = {
        token_id: (token, gguf.TokenType.NORMAL) for token, token_id in document["model"]["vocab"].items()
    }
    for added in document["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
    entries = [
        by_id.get(token_id, (f"[PAD{token_id}]", gguf.TokenType.UNUSED)) for token_id in range(max(by_id) + 1)
    ]
    return [token for token, _ in entries], [kind for _, kind in entries]


def _split_pattern(document: dict[str, Any]) -> str:
    steps = document["pre_tokenizer"].get("pretokenizers", [document["pre_tokenizer"]])
    patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
    if len(patterns) != 1 or patterns[0] not in PRE_TOKENIZER_NAMES:
        raise ValueError(
            f"pre_tokenizer: no llama.cpp name for the split {patterns}; add it to PRE_TOKENIZER_NAMES"
        )
    return str(patterns[0])


def _add_special_tokens(writer: Any, tokenizer_dir: Path) -> None:
    special = gguf.SpecialVocab(tokenizer_dir, load_merges=True)
    # Without an id llama.cpp assumes token 11, and its `llama-bpe` adds BOS unless told otherwise.
    special.special_token_ids.setdefault("bos", special.special_token_ids["eos"])
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)


def _add_weights(writer: Any, *, vocabulary_size: int) -> None:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns), dtype=np.float32) * 0.05).astype(np.float16)

    norm = np.ones(EMBEDDING, np.float32)
    key_value = EMBEDDING // HEADS
    writer.add_tensor("token_embd.weight", matrix(vocabulary_size, EMBEDDING))
    writer.add_tensor("output_norm.weight", norm)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        writer.add_tensor(prefix + "attn_norm.weight", norm)
        writer.add_tensor(prefix + "ffn_norm.weight", norm)
        writer.add_tensor(prefix + "attn_q.weight", matrix(EMBEDDING, EMBEDDING))
        writer.add_tensor(prefix + "attn_k.weight", matrix(key_value, EMBEDDING))
        writer.add_tensor(prefix + "attn_v.weight", matrix(key_value, EMBEDDING))
        writer.add_tensor(prefix + "attn_output.weight", matrix(EMBEDDING, EMBEDDING))
        writer.add_tensor(prefix + "ffn_gate.weight", matrix(FEED_FORWARD, EMBEDDING))
        writer.add_tensor(prefix + "ffn_up.weight", matrix(FEED_FORWARD, EMBEDDING))
        writer.add_tensor(prefix + "ffn_down.weight", matrix(EMBEDDING, FEED_FORWARD))
