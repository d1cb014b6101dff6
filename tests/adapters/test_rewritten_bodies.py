"""How Envoy is told to replace a request's body."""

from __future__ import annotations

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.adapters.envoy_codec import bytes_of
from extproc.domain.decision import Decision
from extproc.domain.outcome import Outcome
from extproc.exchange.events import Phase, Route


def _answered(body: bytes | None) -> pb.ProcessingResponse:
    route = Route(
        phase=Phase.REQUEST_BODY,
        set_headers=(("x-admission-fallback", "model:small"), ("content-length", "2")),
        remove_headers=(),
        endpoint=None,
        decision=Decision(outcome=Outcome.ADMITTED, lease_id="lease-1", fallback="model:small"),
        body=body,
    )
    return pb.ProcessingResponse.FromString(bytes_of(route))


def test_a_new_body_travels_with_its_length() -> None:
    """Envoy refuses a changed body whose length is not changed in the same answer."""
    response = _answered(b"{}")
    common = response.request_body.response
    assert common.body_mutation.body == b"{}"
    headers = {option.header.key: option.header.raw_value for option in common.header_mutation.set_headers}
    assert headers["content-length"] == b"2"
    fields = response.dynamic_metadata.fields["extproc.admission"].struct_value.fields
    assert fields["fallback"].string_value == "model:small"


def test_a_body_that_stays_is_not_sent() -> None:
    """Without a new body Envoy goes on with the one that it has."""
    assert not _answered(None).request_body.response.HasField("body_mutation")
