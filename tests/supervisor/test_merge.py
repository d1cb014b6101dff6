"""One metrics page out of several, and addresses for several workers."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.adapters.telemetry import instruments
from extproc.supervisor.merge import ADDITIVE_GAUGES, merged_page
from extproc.supervisor.supervise import listen_address

PAGE = """
# HELP extproc_requests_total Requests.
# TYPE extproc_requests_total counter
extproc_requests_total{{lane="interactive",decision="admitted"}} {requests}
# HELP extproc_open_streams Streams.
# TYPE extproc_open_streams gauge
extproc_open_streams {streams}
# HELP extproc_replica_reserved_tokens Reserved.
# TYPE extproc_replica_reserved_tokens gauge
extproc_replica_reserved_tokens{{pool="chat",replica="r0"}} {reserved}
# HELP extproc_input_tokens Input.
# TYPE extproc_input_tokens histogram
extproc_input_tokens_bucket{{le="10.0"}} {small}
extproc_input_tokens_bucket{{le="+Inf"}} {requests}
extproc_input_tokens_count {requests}
extproc_input_tokens_sum {total}
# HELP extproc_build_info Build.
# TYPE extproc_build_info gauge
extproc_build_info{{version="1"}} 1
"""


def samples(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of a page."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_counters_and_histograms_add_and_shared_balances_do_not() -> None:
    """What each worker did is summed; what all of them see is told once."""
    one = PAGE.format(requests=5, streams=2, reserved=700, small=3, total=90)
    two = PAGE.format(requests=7, streams=4, reserved=700, small=1, total=500)
    merged = samples(merged_page([one, two], []))
    assert merged["extproc_requests_total", (("decision", "admitted"), ("lane", "interactive"))] == 12
    assert merged["extproc_open_streams", ()] == 6
    assert merged["extproc_replica_reserved_tokens", (("pool", "chat"), ("replica", "r0"))] == 700
    assert merged["extproc_input_tokens_bucket", (("le", "10.0"),)] == 4
    assert merged["extproc_input_tokens_bucket", (("le", "+Inf"),)] == 12
    assert merged["extproc_input_tokens_sum", ()] == 590
    assert merged["extproc_build_info", (("version", "1"),)] == 1


def test_every_additive_gauge_is_an_instrument() -> None:
    """A renamed gauge must not silently become one of the shared ones."""
    names = {value.name for value in vars(instruments).values() if isinstance(value, instruments.Instrument)}
    assert names >= ADDITIVE_GAUGES


def test_a_page_of_one_worker_is_that_workers_page() -> None:
    """Merging changes no value."""
    page = PAGE.format(requests=5, streams=2, reserved=700, small=3, total=90)
    assert samples(merged_page([page], [])) == samples(page.encode())


@pytest.mark.parametrize(
    ("template", "worker", "address"),
    [
        ("127.0.0.1:9002", 0, "127.0.0.1:9002"),
        ("127.0.0.1:9002", 3, "127.0.0.1:9005"),
        ("unix:/run/extproc.sock", 1, "unix:/run/extproc-1.sock"),
        ("unix:/run/ext.d/service", 1, "unix:/run/ext.d/service-1"),
        ("unix:/run/w{worker}.sock", 2, "unix:/run/w2.sock"),
    ],
)
def test_each_worker_has_an_address_of_its_own(template: str, worker: int, address: str) -> None:
    """Ports count up, paths are numbered, and a template is filled in."""
    assert listen_address(template, worker) == address
