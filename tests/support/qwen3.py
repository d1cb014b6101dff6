"""The tokenizer of a real model family, unpacked."""

from __future__ import annotations

import lzma
import os
import shutil
from pathlib import Path

DATA_DIR = Path(__file__).resolve().parents[1] / "data"


def qwen3_dir(cache_dir: Path) -> Path:
    """A directory in `cache_dir` with Qwen3's `tokenizer.json` and `tokenizer_config.json`."""
    packed = DATA_DIR / "qwen3" / "tokenizer.json.xz"
    target = cache_dir / f"qwen3-{packed.stat().st_size}"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(DATA_DIR / "qwen3" / "tokenizer_config.json", target / "tokenizer_config.json")
    document = target / "tokenizer.json"
    if not document.exists():
        # Written aside, so that a second test process never reads half a file.
        unfinished = target / f"{os.getpid()}"
        with lzma.open(packed) as source, unfinished.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        unfinished.replace(document)
    return target
