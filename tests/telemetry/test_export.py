"""Exporting to a collector: a real one, one that refuses, and one that swallows everything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_ENDPOINT

from extproc.adapters.telemetry import telemetry as telemetry_module
from extproc.adapters.telemetry.export_queue import ExportQueue
from extproc.adapters.telemetry.otlp import Signal, TelemetrySettingsError, is_wanted
from extproc.adapters.telemetry.telemetry import Telemetry
from extproc.domain.snapshot import Snapshot
from tests.builders import a_policy
from tests.telemetry.collector import Received, attributes_of, grpc_collector, http_collector
from tests.telemetry.facts import a_decision, a_settled, a_snapshot
from tests.telemetry.test_tracing import CALLER, SPAN, TRACE


@pytest.fixture(autouse=True)
def _no_otel_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


async def held() -> Snapshot:
    return a_snapshot()


def some_telemetry() -> Telemetry:
    telemetry = Telemetry(snapshot=held)
    telemetry.policy_changed(a_policy())
    return telemetry


@pytest.fixture(params=["grpc", "http/protobuf"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """A collector, and the environment that sends to it."""
    with grpc_collector() if request.param == "grpc" else http_collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        monkeypatch.setenv(OTEL_EXPORTER_OTLP_ENDPOINT, f"http://{received.address}")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
        yield received


async def test_a_real_collector_gets_spans_and_metrics(collector: Received) -> None:
    """Over either protocol, an exchange arrives as one trace and the instruments as metrics."""
    telemetry = some_telemetry()
    await telemetry.start()
    telemetry.observer.decided(a_decision(trace=CALLER))
    telemetry.observer.settled(a_settled())
    await telemetry.stop()

    assert {service for service, _ in collector.spans} == {"extproc"}
    names = [span.name for _, span in collector.spans]
    assert names == [
        "extproc.admission",
        "extproc.read",
        "extproc.count",
        "extproc.reserve",
        "extproc.answer",
    ]
    (whole,) = collector.named("extproc.admission")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, SPAN)
    assert attributes_of(whole)["extproc.admission.input_tokens"] == 1_000

    (requests,) = collector.metrics["extproc_requests"].sum.data_points
    assert requests.as_int == 1
    assert attributes_of(requests)["model"] == "tiny"
    (input_tokens,) = collector.metrics["extproc_input_tokens"].histogram.data_points
    assert (input_tokens.count, input_tokens.sum) == (1, 1_000)
    (headroom,) = collector.metrics["extproc_replica_headroom_tokens"].gauge.data_points
    assert headroom.as_int == 20_400


async def test_pushed_and_scraped_metrics_are_the_same_set(collector: Received) -> None:
    """Whatever Prometheus sees of this service, OpenTelemetry gets under the same name."""
    telemetry = some_telemetry()
    await telemetry.start()
    telemetry.observer.decided(a_decision())
    telemetry.observer.settled(a_settled())
    page, _ = await telemetry.exposition("")
    await telemetry.stop()

    scraped = {
        line.split()[2].removesuffix("_total")
        for line in page.decode().splitlines()
        if line.startswith("# TYPE extproc_")
    }
    assert scraped == set(collector.metrics)


async def test_the_slow_bucket_leads_to_a_trace() -> None:
    """A sampled decision is an exemplar of its bucket, for scrapers that understand them."""
    with grpc_collector() as received, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://{received.address}")
        telemetry = some_telemetry()
        telemetry.observer.decided(a_decision(trace=CALLER))
        page, _ = await telemetry.exposition("application/openmetrics-text")
        await telemetry.stop()

    (line,) = [line for line in page.decode().splitlines() if "# {" in line]
    assert line.startswith(
        'extproc_decision_seconds_bucket{decision="admitted",lane="interactive",le="0.0025"} 1.0'
    )
    assert f'# {{trace_id="{TRACE}"}} 0.0014 ' in line


@pytest.fixture
def swallowing() -> Iterator[str]:
    """A collector that accepts connections and never answers, as `host:port`."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["swallowing", "refusing"])
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_is_gone_costs_nothing_but_its_spans(
    kind: str, protocol: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans are dropped and counted, no caller waits, and the end comes within its bound."""
    monkeypatch.setenv(OTEL_EXPORTER_OTLP_ENDPOINT, f"http://{request.getfixturevalue(kind)}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setattr(telemetry_module, "STOP_S", 1.0)
    telemetry = some_telemetry()
    await telemetry.start()
    for number in range(3_000):
        telemetry.observer.decided(a_decision(trace=CALLER, lease_id=f"lease-{number}"))
    before_s = time.monotonic()
    await telemetry.stop()

    assert time.monotonic() - before_s < 5
    page, _ = await telemetry.exposition("")
    dropped = next(
        float(line.split()[-1])
        for line in page.decode().splitlines()
        if line.startswith('extproc_telemetry_dropped_total{signal="traces"}')
    )
    assert dropped > 3_000
    assert telemetry.metrics.series > 0


def test_a_full_queue_drops_and_counts_and_never_blocks() -> None:
    """While an export hangs, what does not fit is dropped; what fitted arrives when it goes on."""
    let_go = threading.Event()
    began = threading.Event()
    arrived: list[int] = []

    def export(batch: Sequence[int]) -> bool:
        began.set()
        let_go.wait()
        arrived.extend(batch)
        return True

    queue = ExportQueue(
        name="test", export=export, cut=let_go.set, most_items=10, batch_items=2, delay_s=0.01
    )
    queue.put(0)
    queue.put(1)
    assert began.wait(5)
    for number in range(2, 50):
        queue.put(number)
    assert queue.dropped == 38
    let_go.set()
    queue.close(5)

    assert arrived == list(range(12))
    assert (queue.exported, queue.dropped) == (12, 38)
    queue.put(99)
    queue.close(5)
    assert queue.dropped == 39


def test_a_failing_exporter_is_counted_and_survived() -> None:
    """An export that raises or is refused loses its batch, and the next one goes through."""
    outcomes: Iterator[bool | Exception] = iter([RuntimeError("no"), False, True])
    batches: list[Sequence[int]] = []

    def export(batch: Sequence[int]) -> bool:
        batches.append(batch)
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    queue = ExportQueue(name="test", export=export, cut=lambda: None, batch_items=1, delay_s=0.01)
    for number in range(3):
        queue.put(number)
        deadline = time.monotonic() + 5
        while queue.exported + queue.dropped <= number and time.monotonic() < deadline:
            time.sleep(0.005)
    queue.close(5)

    assert (len(batches), queue.exported, queue.dropped) == (3, 1, 2)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, False),
    ],
)
def test_the_standard_variables_switch_it_on(environment: dict[str, str], wanted: bool) -> None:
    """Tracing is off until the environment names where to, and can be switched off again."""
    assert is_wanted(Signal.TRACES, environment) is wanted


def test_an_exporter_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong variable is told with its name and the values that work."""
    with pytest.raises(
        TelemetrySettingsError, match="OTEL_TRACES_EXPORTER is 'zipkin'; use 'otlp' or 'none'"
    ):
        is_wanted(Signal.TRACES, {"OTEL_TRACES_EXPORTER": "zipkin"})
    monkeypatch.setenv(OTEL_EXPORTER_OTLP_ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with pytest.raises(TelemetrySettingsError, match="carrier-pigeon"):
        Telemetry(snapshot=held)
