"""Real servers and real tokenizers, started or unpacked once per run; the files they need are kept for the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import qwen3
from tests.support.llama_cpp import LlamaServer
from tests.support.tiny_model import tiny_model
from tests.support.train_tokenizer import TOKENIZER_DIR
from tests.support.valkey import ValkeyServer

# Speed is for benchmarks; a busy machine must not fail a law.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def tokenizer_dir() -> Path:
    """The small tokenizer that ships with the package, in Hugging Face form."""
    return TOKENIZER_DIR


@pytest.fixture(scope="session")
def model_cache_dir(pytestconfig: pytest.Config) -> Path:
    """Where model files and unpacked tokenizers stay between runs."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("models")


@pytest.fixture(scope="session")
def qwen3_dir(model_cache_dir: Path) -> Path:
    """The tokenizer of Qwen3 (vocabulary of Qwen2 and 2.5 too), in Hugging Face form."""
    return qwen3.qwen3_dir(model_cache_dir)


@pytest.fixture(scope="session")
def llama_server(
    tokenizer_dir: Path, model_cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaServer]:
    """A llama.cpp server whose model has the package's tokenizer: 4 slots of 16,384 tokens."""
    log = tmp_path_factory.mktemp("llama") / "log"
    with LlamaServer(model=tiny_model(tokenizer_dir, model_cache_dir), log=log) as server:
        yield server


@pytest.fixture(scope="session")
def llama_qwen3(
    qwen3_dir: Path, model_cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaServer]:
    """A llama.cpp server whose model has Qwen3's tokenizer."""
    log = tmp_path_factory.mktemp("llama-qwen3") / "log"
    with LlamaServer(model=tiny_model(qwen3_dir, model_cache_dir), log=log) as server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """One Valkey on a Unix socket for the whole run: use keys of your own, or `FLUSHALL` first."""
    with ValkeyServer() as server:
        yield server
