"""An OpenTelemetry collector for tests: receives over gRPC or HTTP, and keeps what it gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

PATIENCE_S = 15


@dataclass(kw_only=True)
class Received:
    """What arrived: spans with the name of the service they came from, and metrics by name."""

    address: str = ""
    spans: list[tuple[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    def take_traces(self, request: Any) -> None:
        """Keep an export of spans."""
        for resource_spans in request.resource_spans:
            attributes = {one.key: one.value.string_value for one in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans.append((attributes.get("service.name", ""), span))

    def take_metrics(self, request: Any) -> None:
        """Keep an export of metrics."""
        for resource_metrics in request.resource_metrics:
            for scope_metrics in resource_metrics.scope_metrics:
                for metric in scope_metrics.metrics:
                    self.metrics[metric.name] = metric

    def named(self, name: str) -> list[Any]:
        """The spans with this name."""
        return [span for _, span in self.spans if span.name == name]

    def await_spans(self, count: int, name: str | None = None) -> list[Any]:
        """At least `count` spans, of this name if one is given."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.named(name) if name is not None else [span for _, span in self.spans]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"only {len(found)} of {count} spans came"
            time.sleep(0.02)


def attributes_of(span: Any) -> dict[str, Any]:
    """A span's or a data point's attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:
        self._received.take_traces(request)
        return trace_pb.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:
        self._received.take_metrics(request)
        return metrics_pb.ExportMetricsServiceResponse()


@contextmanager
def grpc_collector() -> Iterator[Received]:
    """A collector that speaks OTLP over gRPC at `address` (`host:port`)."""
    received = Received()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_grpc.add_TraceServiceServicer_to_server(_Traces(received), server)  # type: ignore[no-untyped-call]
    metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(received), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    received.address = f"127.0.0.1:{port}"
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Received]:
    """A collector that speaks OTLP over HTTP at `address` (`host:port`)."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                received.take_traces(trace_pb.ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                received.take_metrics(metrics_pb.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    received.address = f"127.0.0.1:{server.server_address[1]}"
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
