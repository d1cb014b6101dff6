"""Under which names engines tell their load, by engine and across their versions: data, and nothing else.

| engine | renamed |
|---|---|
| vLLM | `gpu_cache_usage_perc` became `kv_cache_usage_perc` with its second engine; 1 is all |
| SGLang | the colon after `sglang` became an underscore; 1 is all |
| llama.cpp | `kv_cache_usage_ratio` is gone from newer ones, which tell no use of their cache |
| TGI | tells no use of its cache |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from extproc.domain.policy import Engine


class Told(StrEnum):
    """What a number is about."""

    WAITING = "waiting"
    RUNNING = "running"
    KV_USED = "kv_used"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNames:
    """The names of each number, the newest first: of several that are there, the first is believed."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    kv_used: tuple[str, ...] = ()

    def of(self, told: Told) -> tuple[str, ...]:
        """The names of one number."""
        return {Told.WAITING: self.waiting, Told.RUNNING: self.running, Told.KV_USED: self.kv_used}[told]


NAMES: Mapping[Engine, EngineNames] = {
    Engine.VLLM: EngineNames(
        waiting=("vllm:num_requests_waiting",),
        running=("vllm:num_requests_running",),
        kv_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    Engine.SGLANG: EngineNames(
        waiting=("sglang_num_queue_reqs", "sglang:num_queue_reqs"),
        running=("sglang_num_running_reqs", "sglang:num_running_reqs"),
        kv_used=("sglang_token_usage", "sglang:token_usage"),
    ),
    Engine.TGI: EngineNames(waiting=("tgi_queue_size",), running=("tgi_batch_current_size",)),
    Engine.LLAMA_CPP: EngineNames(
        waiting=("llamacpp:requests_deferred",),
        running=("llamacpp:requests_processing",),
        kv_used=("llamacpp:kv_cache_usage_ratio",),
    ),
}

ALL_NAMES = tuple(
    name for names in NAMES.values() for told in Told for name in names.of(told)
)  # no two engines share one, so a page tells by itself whose it is

MODEL_LABEL = "model_name"
"""Names the model that a series is about, where an endpoint serves several."""

RANK_LABELS = (MODEL_LABEL, "engine", "dp_rank")
"""Tell apart engines behind one endpoint, which each have a queue of their own. By every other label, such as the
rank of a tensor-parallel process, the same number is told again."""
