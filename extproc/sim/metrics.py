"""The simulated engine's /metrics page: the names, labels and buckets that vLLM 0.32 shows, as far as load goes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from extproc.sim.engine import Ended, EngineConfig, Snapshot

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_BLOCK_TOKENS = 16  # vLLM counts its cache in blocks; the model here does not, so this is for show
_FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0),
)
_REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
_FINISHED_REASONS = ("stop", "length", "abort")
_US_PER_S = 1_000_000


class Metrics:
    """What would a scraper of this engine see? Gauges and totals are read at the time of the scrape."""

    def __init__(self, *, model: str, config: EngineConfig) -> None:
        self._registry = CollectorRegistry()
        self._kv_capacity_tokens = config.kv_capacity_tokens
        self._labels = {"engine": "0", "model_name": model}
        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all.")
        self._preemptions = self._counter("num_preemptions", "Evictions from the batch.")
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that began to answer."
        )
        self._generation_tokens = self._counter("generation_tokens", "Output tokens.")
        self._seen = Snapshot(**dict.fromkeys(Snapshot.__dataclass_fields__, 0))
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time per token after the first.",
            _TOKEN_BUCKETS_S,
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS_S
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _REQUEST_BUCKETS_S
        )
        ended = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._ended = {
            reason: ended.labels(**self._labels, finished_reason=reason) for reason in _FINISHED_REASONS
        }
        cache = {
            "block_size": str(_BLOCK_TOKENS),
            "engine": "0",
            "kv_cache_size_tokens": str(config.kv_capacity_tokens),
            "num_gpu_blocks": str(config.kv_capacity_tokens // _BLOCK_TOKENS),
        }
        Gauge("vllm:cache_config_info", "The KV cache's size.", list(cache), registry=self._registry).labels(
            **cache
        ).set(1)

    def first_token(self, *, ttft_us: int) -> None:
        """A request got its first token this long after it arrived."""
        self._first_token.observe(ttft_us / _US_PER_S)

    def ended(self, facts: Ended, *, reason: str) -> None:
        """A request left the engine; `reason` is one of stop, length and abort."""
        self._ended[reason].inc()
        if reason == "abort" or facts.started_at_us is None or facts.first_token_at_us is None:
            return
        self._whole.observe((facts.ended_at_us - facts.submitted_at_us) / _US_PER_S)
        self._queued.observe((facts.started_at_us - facts.submitted_at_us) / _US_PER_S)
        if facts.generated_tokens > 1:
            decode_us = facts.ended_at_us - facts.first_token_at_us
            self._per_token.observe(decode_us / (facts.generated_tokens - 1) / _US_PER_S)

    def page(self, now: Snapshot) -> bytes:
        """The exposition text as of `now`, a snapshot no older than the last one given."""
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        self._kv_usage.set(now.kv_used_tokens / self._kv_capacity_tokens)
        seen, self._seen = self._seen, now
        self._preemptions.inc(now.preemptions_total - seen.preemptions_total)
        self._prompt_tokens.inc(now.prompt_tokens_total - seen.prompt_tokens_total)
        self._generation_tokens.inc(now.generation_tokens_total - seen.generation_tokens_total)
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self._registry).labels(
            **self._labels
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self._registry
        ).labels(**self._labels)
