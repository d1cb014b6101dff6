"""Envoy's records: which of them say that the engine failed, which that it did not, and which say nothing."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2

from extproc.adapters.access_log import settled_of
from extproc.adapters.envoy_names import ADMISSION_NAMESPACE


def a_record(status: int, **flags: bool) -> Any:
    """The record of an admitted request that ended so."""
    entry = accesslog_pb2.HTTPAccessLogEntry()
    fields = entry.common_properties.metadata.filter_metadata[ADMISSION_NAMESPACE].fields
    fields["decision"].string_value = "admitted"
    fields["reservation"].string_value = "lease-1"
    entry.response.response_code.value = status
    for name, value in flags.items():
        setattr(entry.common_properties.response_flags, name, value)
    return entry


@pytest.mark.parametrize(
    ("status", "flags", "failed"),
    [
        (200, {}, False),
        (404, {}, False),
        (429, {}, False),
        (500, {}, True),
        (503, {}, True),
        (503, {"upstream_connection_failure": True}, True),
        (503, {"no_healthy_upstream": True}, True),
        (502, {"upstream_protocol_error": True}, True),
        (200, {"upstream_remote_reset": True}, True),
        (200, {"upstream_connection_termination": True}, True),
        (504, {"upstream_request_timeout": True}, True),
        (200, {"upstream_request_timeout": True}, None),
        (0, {"downstream_connection_termination": True}, None),
        (200, {"downstream_connection_termination": True}, None),
        (503, {"upstream_overflow": True}, None),
        (0, {}, None),
    ],
)
def test_who_is_to_blame(status: int, flags: dict[str, bool], failed: bool | None) -> None:
    """5xx, and an upstream that lets go, are the engine's; a client that leaves and Envoy's own limits are not."""
    settled = settled_of(a_record(status, **flags))
    assert settled is not None
    assert settled.engine_failed is failed
    assert settled.flags == ",".join(flags)
