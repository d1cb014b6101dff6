"""A simulated inference server: the engine model in real time behind vLLM's and TGI's HTTP endpoints.

    python -m extproc.sim.server --port 8000 --model tiny --kv-tokens 20000

Besides the inference paths it has /v1/models, /health, /metrics, and /sim/requests, which tells a test what
reached the engine: the newest requests' paths, x-admission-* headers, body hashes and arrival times, never
their text. All it holds is bounded: open sequences, remembered requests, and the size of a body.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop
from aiohttp import web

from extproc.sim import answers
from extproc.sim.asked import Api, Asked, Refused, count_words, draw_tokens, read
from extproc.sim.engine import EngineConfig
from extproc.sim.live import LiveEngine, Opened
from extproc.sim.metrics import CONTENT_TYPE, Metrics

CountTokens = Callable[[str, Mapping[str, Any]], int]
"""Path and body (with one prompt) to input tokens. May be called in a thread."""

_INLINE_BYTES = 16_384  # parsing and counting a body up to this size takes well under a millisecond
_GOODBYE_S = 0.05  # how long `stop` lets an answer finish: a simulated engine dies as abruptly as a real one


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The engine, and what the server around it adds.

    An answer that is not bound by `ignore_eos` ends by itself after a length drawn from the body's hash, between
    `shortest_answer_tokens` and `longest_answer_tokens`. The first of `models` names the engine in metrics.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    models: tuple[str, ...] = ("sim",)
    max_model_len_tokens: int | None = None  # None: the whole KV cache
    shortest_answer_tokens: int = 1
    longest_answer_tokens: int = 512
    max_open_sequences: int = 4_096
    remembered_requests: int = 1_000
    max_body_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty; name at least one model")
        if not 1 <= self.shortest_answer_tokens <= self.longest_answer_tokens:
            raise ValueError(
                f"shortest_answer_tokens is {self.shortest_answer_tokens} and longest_answer_tokens is "
                f"{self.longest_answer_tokens}; the first must be at least 1 and at most the second"
            )

    @property
    def context_tokens(self) -> int:
        """The most tokens, prompt and output, that one sequence may have."""
        capacity = self.engine.kv_capacity_tokens
        return min(capacity, self.max_model_len_tokens or capacity)


class SimulatedEngine:
    """One engine on one port. `start` and `stop` it in a running event loop; it is not for reuse after `stop`."""

    def __init__(self, config: ServerConfig, count_tokens: CountTokens = count_words) -> None:
        self._config = config
        self._count_tokens = count_tokens
        self._live = LiveEngine(config.engine, Metrics(model=config.models[0], config=config.engine))
        self._received_total = 0
        self._received: deque[dict[str, Any]] = deque(maxlen=config.remembered_requests)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen, on a free port if `port` is 0, and return the port. Raises OSError if it cannot."""
        app = web.Application(client_max_size=self._config.max_body_bytes)
        app.add_routes(
            [
                *(web.post(api, self._infer) for api in Api),
                web.get("/v1/models", self._list_models),
                web.get("/health", self._health),
                web.get("/metrics", self._scrape),
                web.get("/sim/requests", self._list_received),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_GOODBYE_S
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Close the port and every connection, cutting off open answers."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._live.stop()

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        api = Api(request.path)
        raw = await request.read()
        self._remember(request, raw)
        try:
            opened = await self._admit(api, raw)
        except Refused as refused:
            status, body = answers.error_body(api, refused)
            return web.Response(status=status, body=body, content_type="application/json")
        try:
            if opened.answer.asked.stream:
                return await self._stream(request, opened)
            while not opened.is_complete:
                await opened.news()
            return web.Response(
                body=answers.whole(opened.answer),
                content_type="application/json",
                headers=answers.headers(opened.answer),
            )
        finally:
            self._live.abandon(opened)

    async def _stream(self, request: web.Request, opened: Opened) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while not opened.is_complete:
            await opened.news()
            await response.write(answers.events(opened.answer))
        await response.write_eof()
        return response

    async def _admit(self, api: Api, raw: bytes) -> Opened:
        """Submit a body's sequences to the model, all or none. Raises Refused."""
        if len(raw) <= _INLINE_BYTES:
            asked, prompts_tokens = self._measure(api, raw)
        else:
            asked, prompts_tokens = await asyncio.to_thread(self._measure, api, raw)
        answer_id = uuid.uuid4().hex[:16]
        choices = [
            self._choice(asked, index, f"{answer_id}-{index}", prompts_tokens[index // asked.copies], raw)
            for index in range(len(prompts_tokens) * asked.copies)
        ]
        if self._live.open_sequences + len(choices) > self._config.max_open_sequences:
            raise Refused(
                "The engine is busy and takes no more requests for now; try again later.",
                status=503,
                kind="Service Unavailable",
                param=None,
            )
        return self._live.submit(
            answers.Answer(
                asked=asked,
                id=f"{'chatcmpl' if api is Api.CHAT else 'cmpl'}-{answer_id}",
                model=asked.model or self._config.models[0],
                created_at_s=int(time.time()),
                prompt_tokens=sum(prompts_tokens),
                choices=tuple(choices),
            )
        )

    def _measure(self, api: Api, raw: bytes) -> tuple[Asked, list[int]]:
        asked = read(api, raw)
        if asked.model is not None and asked.model not in self._config.models:
            raise Refused(
                f"There is no model of the name given in `model`; there is {', '.join(self._config.models)}.",
                status=404,
                kind="NotFoundError",
                param="model",
            )
        return asked, [max(1, self._count_tokens(api.value, prompt)) for prompt in asked.prompts]

    def _choice(
        self, asked: Asked, index: int, request_id: str, prompt_tokens: int, raw: bytes
    ) -> answers.Choice:
        """How long sequence `index` will be, and why it ends there. Raises Refused if it does not fit."""
        config = self._config
        ceiling = asked.ceiling_tokens or max(1, config.context_tokens - prompt_tokens)
        if prompt_tokens + ceiling > config.context_tokens:
            raise Refused(
                f"The context is {config.context_tokens} tokens, and {prompt_tokens} of input and {ceiling} "
                "of output make more. Shorten the prompt or lower the output limit.",
                param="max_new_tokens" if asked.api.is_tgi else "max_tokens",
            )
        by_itself = draw_tokens(
            raw, index, least=config.shortest_answer_tokens, most=config.longest_answer_tokens
        )
        stops = by_itself < ceiling and not asked.ignore_eos
        return answers.Choice(
            index=index,
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=by_itself if stops else ceiling,
            finish_reason="stop" if stops else "length",
        )

    def _remember(self, request: web.Request, raw: bytes) -> None:
        self._received_total += 1
        self._received.append(
            {
                "path": request.path,
                "headers": {
                    name.lower(): value
                    for name, value in request.headers.items()
                    if name.lower().startswith("x-admission-")
                },
                "body_sha256": hashlib.sha256(raw).hexdigest(),
                "received_at_ms": time.time_ns() // 1_000_000,
            }
        )

    async def _list_received(self, _request: web.Request) -> web.Response:
        """The newest requests, oldest first; `received_total` also counts those already forgotten."""
        return _json({"received_total": self._received_total, "requests": list(self._received)})

    async def _list_models(self, _request: web.Request) -> web.Response:
        return _json(
            {
                "object": "list",
                "data": [
                    {
                        "id": model,
                        "object": "model",
                        "created": 0,
                        "owned_by": "extproc-sim",
                        "max_model_len": self._config.context_tokens,
                    }
                    for model in self._config.models
                ],
            }
        )

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._live.metrics_page(), headers={"content-type": CONTENT_TYPE})


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _parse(arguments: Sequence[str] | None) -> tuple[str, int, ServerConfig]:
    engine, server = EngineConfig(), ServerConfig()
    parser = argparse.ArgumentParser(
        prog="python -m extproc.sim.server",
        description="A simulated inference engine with OpenAI, TGI and vLLM metrics endpoints.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    add("--model", action="append", help="model name to serve; repeat it for aliases (default: sim)")
    add("--prefill-tokens-per-s", type=int, default=engine.prefill_tokens_per_s, help="speed of prefill")
    add("--decode-ms", type=float, default=engine.step_base_us / 1000, help="time of an empty step")
    add(
        "--decode-us-per-sequence",
        type=int,
        default=engine.step_per_sequence_us,
        help="time that each decoding sequence adds to a step",
    )
    add("--kv-tokens", type=int, default=engine.kv_capacity_tokens, help="KV cache capacity")
    add("--max-num-seqs", type=int, default=engine.max_num_seqs, help="most sequences in the batch")
    add("--max-step-tokens", type=int, default=engine.max_step_tokens, help="most tokens in a step")
    add("--max-model-len", type=int, help="longest context; without it, the KV cache's capacity")
    add("--shortest-answer", type=int, default=server.shortest_answer_tokens, help="in tokens")
    add("--longest-answer", type=int, default=server.longest_answer_tokens, help="in tokens")
    options = parser.parse_args(arguments)
    try:
        config = ServerConfig(
            engine=EngineConfig(
                prefill_tokens_per_s=options.prefill_tokens_per_s,
                step_base_us=round(options.decode_ms * 1000),
                step_per_sequence_us=options.decode_us_per_sequence,
                kv_capacity_tokens=options.kv_tokens,
                max_num_seqs=options.max_num_seqs,
                max_step_tokens=options.max_step_tokens,
            ),
            models=tuple(options.model or server.models),
            max_model_len_tokens=options.max_model_len,
            shortest_answer_tokens=options.shortest_answer,
            longest_answer_tokens=options.longest_answer,
        )
    except ValueError as error:
        parser.error(str(error))
    return options.host, options.port, config


async def _serve(host: str, port: int, config: ServerConfig) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    engine = SimulatedEngine(config)
    bound = await engine.start(host, port)
    # A parent that asked for port 0 reads the port here.
    sys.stdout.write(f"listening on http://{host}:{bound}\n")
    sys.stdout.flush()
    await stopping.wait()
    await engine.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; says where in its first line of output."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(*_parse(arguments)))


if __name__ == "__main__":
    main()
