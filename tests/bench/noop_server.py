"""The floor: an ext_proc server in `grpc.aio` that says CONTINUE to everything and does nothing else."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio


async def process(_requests: Any, context: Any) -> None:
    """Answer each message with CONTINUE of its own kind."""
    while True:
        message = await context.read()
        if message is aio.EOF:  # type: ignore[attr-defined]
            return
        response = pb.ProcessingResponse()
        getattr(response, message.WhichOneof("request")).SetInParent()
        await context.write(response)


async def serve(target: str) -> None:
    """Serve on `target` until killed."""
    server = aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "envoy.service.ext_proc.v3.ExternalProcessor", {"Process": handler}
            ),
        )
    )
    server.add_insecure_port(target)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
