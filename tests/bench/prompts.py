"""What is sent: texts of exact lengths in a real vocabulary, and the policy that prices them."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from tests.support.qwen3 import qwen3_dir

POLICY = """
version: 1
models:
  tiny:
    tokenizer: {tokenizer}
    context_tokens: 131_072
    default_output_tokens: 256
    media: {{image: {{max_tokens: 1}}}}
    lanes: {{interactive: chat, bulk: chat}}
lanes:
  interactive: {{max_input_tokens: 4_096, max_output_tokens: 1_024, deadline_ms: 60s, residence_ms: 0}}
  bulk:
    {{max_input_tokens: 130_000, max_output_tokens: 4_096, deadline_ms: 600s, residence_ms: 0,
     prefill_share_permille: 1000}}  # a whole run sends long prompts faster than half a pool reads them
pools:
  chat:
    replicas: [{{name: r0, address: "127.0.0.1:9", ceiling_tokens: 1_000_000_000}}]
    breaker: {{failures: 1000}}  # no engine is behind a bench
    prefill_tokens_per_s: 1_000_000
    prefill_window_ms: 60s
    decode_tokens_per_s: 100
    request_cap: 100_000
tenants:
  identity: {{header: x-tenant}}
  tiers:
    paid: {{tokens_per_minute: 5_000_000_000, inflight_tokens: 500_000_000, inflight_requests: 50_000}}
    poor: {{tokens_per_minute: 1_000, burst_tokens: 1_000}}
  members:
    acme: {{tier: paid}}
    pauper: {{tier: poor}}
"""

TEXT = (
    "the harbour master counted every barrel before tide came in and nobody wrote down how many there were "
    "when a lamp went out at night on our side of town people asked why it had been lit for so long"
)
WORDS = TEXT.split()
LONGEST_TOKENS = 125_000

MODEL_VARIABLE = "EXTPROC_BENCH_MODEL"


@cache
def model_directory() -> Path:
    """Qwen3's tokenizer, unpacked: a vocabulary as large as real ones are, so that tokens are as long.

    Another one where `MODEL_VARIABLE` names its directory: everything is then as long in that one's tokens.
    """
    if MODEL_VARIABLE in os.environ:
        return Path(os.environ[MODEL_VARIABLE])
    return qwen3_dir(Path(tempfile.gettempdir()) / "extproc-bench-models")


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer by itself, to cut texts to their lengths."""
    return Tokenizer.from_file(str(model_directory() / "tokenizer.json"))


@cache
def prompt(tokens: int, *, seed: int = 0) -> str:
    """English of `tokens` tokens of Qwen3's vocabulary; another seed gives other text."""
    text = " ".join(WORDS[(number * 7 + number // 5 + seed * 13) % len(WORDS)] for number in range(tokens))
    offsets = tokenizer().encode(text, add_special_tokens=False).offsets
    return text[: offsets[min(tokens, len(offsets)) - 1][1]]


@cache
def _long_text() -> tuple[str, tuple[int, ...]]:
    """The longest text that is asked for, and where its tokens end."""
    text = " ".join(WORDS[(number * 7 + number // 5) % len(WORDS)] for number in range(LONGEST_TOKENS))
    return text, tuple(end for _, end in tokenizer().encode(text, add_special_tokens=False).offsets)


def cut(tokens: int, *, start: int = 0) -> str:
    """English of `tokens` tokens from `start` on: quickly made, for any length up to `LONGEST_TOKENS`."""
    text, ends = _long_text()
    first = start % max(1, len(ends) - tokens)
    return text[ends[first] : ends[min(first + tokens, len(ends) - 1)]]


def write_policy(directory: Path, *, tokenizer_file: Path | None = None) -> Path:
    """The policy as a file in `directory`."""
    path = directory / "policy.yaml"
    path.write_text(POLICY.format(tokenizer=tokenizer_file or model_directory() / "tokenizer.json"))
    return path
