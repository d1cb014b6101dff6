"""Engines that are too large for every run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm import VllmServer, model_dir

ARGUMENTS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--enable-scale-out")


@pytest.fixture(scope="session")
def vllm_qwen3(qwen3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM whose model has Qwen3's tokenizer and template."""
    work = tmp_path_factory.mktemp("vllm-qwen3")
    with VllmServer(
        model=model_dir(qwen3_dir, work / "model"), log=work / "log", arguments=ARGUMENTS
    ) as server:
        yield server
