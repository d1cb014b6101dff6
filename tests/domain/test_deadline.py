"""Clients can shorten their deadline in every way that they already use, and lengthen it in none."""

from __future__ import annotations

import pytest

from extproc.domain.deadline import declared_deadline_ms

HEADER = "x-request-deadline-ms"


@pytest.mark.parametrize(
    ("headers", "expected_ms"),
    [
        ({}, None),
        ({HEADER: "1500"}, 1500),
        ({"x-stainless-read-timeout": "600"}, 600_000),
        ({"x-stainless-read-timeout": "0.25"}, 250),
        ({"x-stainless-timeout": "NOT_GIVEN"}, None),
        ({"x-stainless-timeout": "60.5", "x-stainless-read-timeout": "600"}, 60_500),
        ({"grpc-timeout": "2S"}, 2_000),
        ({"grpc-timeout": "500m"}, 500),
        ({"grpc-timeout": "3000000u"}, 3_000),
        ({"grpc-timeout": "5000000n"}, 5),
        ({"grpc-timeout": "1H"}, 3_600_000),
        ({"grpc-timeout": "123456789S"}, None),
        ({"x-envoy-expected-rq-timeout-ms": "800"}, 800),
        ({HEADER: "9000", "x-stainless-read-timeout": "5", "grpc-timeout": "7S"}, 5_000),
        ({HEADER: "0"}, None),
        ({HEADER: "-5"}, None),
        ({HEADER: "1e9"}, None),
        ({HEADER: "5000,1"}, None),
        ({HEADER: "٣"}, None),
        ({"x-stainless-read-timeout": "inf"}, None),
        ({"x-stainless-read-timeout": "9" * 400}, None),
    ],
)
def test_the_shortest_that_can_be_read_counts(headers: dict[str, str], expected_ms: int | None) -> None:
    """What cannot be read is no deadline: it neither lengthens nor refuses."""
    assert declared_deadline_ms(headers, header=HEADER) == expected_ms
