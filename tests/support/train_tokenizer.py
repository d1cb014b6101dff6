"""Makes the small tokenizer that ships with the package, from text of our own, byte for byte the same each time.

A byte-level BPE of 4,096 entries with the split rule of Llama 3, so that three independent programs give the
same ids for the same text: `tokenizers`, `tiktoken`, and llama.cpp (which knows the rule as `llama-bpe`; that
name also implies `ignore_merges`). The chat template is ChatML. Vocabulary and merges come from the
`tokenizers` trainer; the file around them is written here, so its form does not depend on a library's version.

    python tests/support/train_tokenizer.py [TARGET_DIR]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
CORPUS_DIR = ROOT / "tests" / "data" / "corpus"
TOKENIZER_DIR = ROOT / "extproc" / "sim" / "tokenizer"

VOCABULARY_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT_TOKENS = 16384

SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How often each part is read, so that a few pages stand for the texts that a model usually sees: the words of the
# list are common, code is dense, and the sentences in 25 languages must not fill the vocabulary with their endings.
WORD_WEIGHT = 10
PROSE_WEIGHT = 3
CODE_WEIGHT = 6
LANGUAGES_WEIGHT = 2
NUMBER_WEIGHT = 5
ROLE_WEIGHT = 100
SYMBOLS_WEIGHT = 4

CHAT_TEMPLATE = """\
{%- set ns = namespace(system='You are a small model in a test fleet. Answer briefly.', turns=messages) %}
{%- if messages and messages[0]['role'] == 'system' %}
{%- set ns.system = messages[0]['content'] or '' %}
{%- set ns.turns = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\\n' + ns.system }}
{%- if tools %}
{{- '\\n\\nYou may call these tools:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' }}
{{- tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\nA call looks like this:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in ns.turns %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] %}
{{- message['content'] }}
{%- endif %}
{%- if message['tool_calls'] %}
{%- for call in message['tool_calls'] %}
{%- if message['content'] or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{%- if call['function']['arguments'] is string %}
{{- call['function']['arguments'] }}
{%- else %}
{{- call['function']['arguments'] | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def corpus() -> Iterator[str]:
    """The training text, in a fixed order: prose, languages, code, words, numbers, symbols, white space."""
    yield from [_read("prose.txt")] * PROSE_WEIGHT
    yield from [_read("code.txt")] * CODE_WEIGHT
    yield from [_read("languages.txt")] * LANGUAGES_WEIGHT
    for word in _read("words.txt").split():
        yield f" {word}" * WORD_WEIGHT
        yield f" {word.capitalize()} {word}s\n{word}" * 2
    for number in range(1000):
        yield f"{number} " * NUMBER_WEIGHT
        if number < 100:
            yield f"{number:02d}:" * (3 * NUMBER_WEIGHT)
    yield "system\nuser\nassistant\ntool\n" * ROLE_WEIGHT
    yield from [" " + _read("symbols.txt")] * SYMBOLS_WEIGHT
    for width in (*range(1, 17), 20, 24, 28, 32, 64):
        yield (" " * width + "x\n") * 4
        yield ("\t" * (width // 4 + 1) + "x\n") * 4
        yield ("\n" * width + "x") * 2


def train() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary without the special tokens, and merges in the order of their rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def tokenizer_json() -> str:
    """The content of `tokenizer.json`."""
    vocabulary, merges = train()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": content, **_SPECIAL_TOKEN}
            for token_id, content in enumerate(SPECIAL_TOKENS, start=len(vocabulary))
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT_REGEX}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": dict(sorted(vocabulary.items(), key=lambda entry: entry[1])),
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"


def tokenizer_config_json() -> str:
    """The content of `tokenizer_config.json`: roles of the special tokens, and the chat template."""
    first_special = VOCABULARY_SIZE - len(SPECIAL_TOKENS)
    document: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(token_id): {"content": content, **_SPECIAL_TOKEN}
            for token_id, content in enumerate(SPECIAL_TOKENS, start=first_special)
        },
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"


def main(target_dir: Path) -> None:
    """Write both files into `target_dir`."""
    target_dir.mkdir(parents=True, exist_ok=True)
    (target_dir / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    (target_dir / "tokenizer_config.json").write_text(tokenizer_config_json(), encoding="utf-8")


_SPECIAL_TOKEN = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


def _read(name: str) -> str:
    return (CORPUS_DIR / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER_DIR)
