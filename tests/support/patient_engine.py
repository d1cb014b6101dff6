"""An engine for tests of waiting: a streamed answer goes on until its client leaves, any other comes at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

TOKEN_EVERY_S = 0.05

ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "id": "chat-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello."}}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    },
    "/v1/messages": {
        "id": "message-1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 2},
    },
}


async def _answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if not body.get("stream"):
        return web.json_response(ANSWERS[request.path])
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
        await asyncio.sleep(TOKEN_EVERY_S)


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="ok")


@contextmanager
def patient_engine() -> Iterator[str]:
    """Run one in a thread of its own; its `host:port`."""
    address: list[str] = []
    ready = threading.Event()
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post(path, _answer) for path in ANSWERS])
        app.add_routes([web.get("/health", _health)])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        address.append(f"{host}:{port}")
        ready.set()
        await ended.wait()
        await runner.cleanup()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10), "the engine did not come up"
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
