"""The real vLLM, its CPU build, with a model of random weights: what it counts is what a trained model would read.

It is large, so it has an environment of its own: `make vllm` installs it into `.cache/vllm`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support import child

PYTHON = Path(os.environ.get("VLLM_PYTHON") or Path(__file__).resolve().parents[2] / ".cache/vllm/bin/python")
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 30
CONTEXT_TOKENS = 8_192
MODEL = "tiny"

_ARCHITECTURE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


def model_dir(tokenizer_dir: Path, target: Path, **changes: Any) -> Path:
    """`target`, made a model for the tokenizer in `tokenizer_dir`; `changes` are for its `tokenizer_config.json`."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(tokenizer_dir / "tokenizer.json", target / "tokenizer.json")
    config = json.loads((tokenizer_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    (target / "tokenizer_config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    document = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in document["added_tokens"]} | document["model"]["vocab"]
    architecture = {
        **_ARCHITECTURE,
        "vocab_size": -(-(max(ids.values()) + 1) // 64) * 64,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }
    (target / "config.json").write_text(json.dumps(architecture), encoding="utf-8")
    return target


def command(python: Path | str, model: Path, port: int, *arguments: str, name: str = MODEL) -> list[str]:
    """How it is started for the model directory: eight sequences at once, what is over them waits."""
    return [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model}",
        "--load-format=dummy",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--max-model-len={CONTEXT_TOKENS}",
        "--max-num-seqs=8",
        f"--served-model-name={name}",
        "--enforce-eager",
        *arguments,
    ]


@dataclass(kw_only=True)
class VllmServer:
    """`with VllmServer(model=..., log=...) as server:` serves the model directory at `server.url`; takes a minute."""

    model: Path
    log: Path
    arguments: tuple[str, ...] = ()
    url: str = field(default="", init=False)
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        (port,) = child.free_ports(1)
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command(PYTHON, self.model, port, *self.arguments),
                cwd=self.model,  # not the repository's root, whose directories must not be imported
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # it has children, which are ended with it
            )
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._await_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _await_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with (
                suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=2),
            ):
                return
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-3_000:]
                raise RuntimeError(f"vLLM did not start in {START_TIMEOUT_S} s:\n{tail}")
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop the server with its children, and wait; stopping twice does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
