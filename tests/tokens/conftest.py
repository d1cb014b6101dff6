"""Loaded tokenizers: loading proves a lot and takes a while, so each is loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.adapters.tokens.load import load_model_tokens
from extproc.adapters.tokens.model_tokens import ModelTokens
from tests.tokens.family import FAMILY, save


@pytest.fixture(scope="session")
def qwen3(qwen3_dir: Path) -> ModelTokens:
    """Qwen3 with its own template."""
    return load_model_tokens(qwen3_dir)


@pytest.fixture(scope="session")
def tiny(tokenizer_dir: Path) -> ModelTokens:
    """The small tokenizer that ships with the package."""
    return load_model_tokens(tokenizer_dir)


@pytest.fixture(scope="session", params=FAMILY)
def family_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of each construction, in Hugging Face form; the directory bears its name."""
    name: str = request.param
    return save(FAMILY[name](), tmp_path_factory.mktemp("family") / name)


@pytest.fixture(scope="session")
def family_member(family_dir: Path) -> ModelTokens:
    """What is loaded from `family_dir`."""
    return load_model_tokens(family_dir)
