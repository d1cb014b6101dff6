"""LiteLLM's proxy with its own limiter.

Its limits belong to keys. Keys live in PostgreSQL, or are what a custom authentication says they are; the second is
documented to have the same rate limits, needs no database, and so costs LiteLLM less than most installations pay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.bench.peers.peer import MODEL, Reply, Running, Scene, installed, process, program, scrape
from tests.support import child

IN_FLIGHT = "litellm_in_flight_requests"
NEVER_REACHED = 1_000_000_000

AUTH = """
import itertools
from litellm.proxy._types import UserAPIKeyAuth

async def user_api_key_auth(request, api_key):
    return UserAPIKeyAuth(
        api_key=api_key, tpm_limit={tokens}, rpm_limit={requests}, max_parallel_requests={inflight}
    )
"""


class LiteLLM:
    """`litellm --config` with one worker and limits per key; logs only errors, as its guide for production says."""

    name = "litellm"
    setting = "per key: `tpm_limit`, `rpm_limit`, `max_parallel_requests` (limiter v3, in memory, one worker)"

    def version(self) -> str:
        """Pinned: later ones want a package that PyPI does not have."""
        return installed(self.name, "litellm", "litellm[proxy]==1.108.7", "prometheus-client")

    @contextmanager
    def run(self, scene: Scene) -> Iterator[Running]:
        """Metrics only where a limit is to be reached: they are not needed for speed."""
        limited = scene.inflight_requests is not None or scene.tokens_per_minute is not None
        (port,) = child.free_ports(1)
        directory = scene.directory
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "bench_auth.py").write_text(
            AUTH.format(
                tokens=scene.tokens_per_minute or NEVER_REACHED,
                requests=NEVER_REACHED,
                inflight=scene.inflight_requests or NEVER_REACHED,
            )
        )
        config: dict[str, Any] = {
            "model_list": [
                {
                    "model_name": MODEL,
                    "litellm_params": {
                        "model": f"openai/{MODEL}",
                        "api_base": f"{scene.upstream_url}/v1",
                        "api_key": "none",
                    },
                }
            ],
            "litellm_settings": {"request_timeout": 600, "set_verbose": False, "json_logs": True}
            | ({"callbacks": ["prometheus"]} if limited else {}),
            "general_settings": {"custom_auth": "bench_auth.user_api_key_auth"},
        }
        (directory / "config.yaml").write_text(json.dumps(config))
        url = f"http://127.0.0.1:{port}"
        with process(
            [
                program(self.name, "litellm"),
                "--config=config.yaml",
                "--host=127.0.0.1",
                f"--port={port}",
                "--num_workers=1",
            ],
            log=directory / "litellm.log",
            ready_url=f"{url}/health/liveliness",
            env={
                "LITELLM_MASTER_KEY": "sk-nobody-uses-this",
                "LITELLM_LOG": "ERROR",
                "LITELLM_MODE": "PRODUCTION",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "DO_NOT_TRACK": "1",
            },
        ) as pid:
            yield Running(
                url=url,
                parts={"proxy": pid},
                headers=lambda client: {"authorization": f"Bearer sk-{client}"},
                gauges=lambda: gauges(url) if limited else {},
                counted=counted,
            )


def gauges(url: str) -> dict[str, float]:
    """Requests in flight, without the one that asks."""
    page = scrape(f"{url}/metrics/", IN_FLIGHT)
    return {IN_FLIGHT: page[IN_FLIGHT] - 1}


def counted(reply: Reply, body: Mapping[str, Any]) -> int | None:
    """Its input tokens: what the key's budget lost when the request came in, less the output that was asked for.

    Only right for the first request of a minute and key, so every request that is counted has a key of its own.
    """
    limit = reply.headers.get("x-ratelimit-api_key-limit-tokens")
    remaining = reply.headers.get("x-ratelimit-api_key-remaining-tokens")
    if limit is None or remaining is None:
        return None
    return int(limit) - int(remaining) - int(body["max_tokens"])
