"""Answers that are put together from parts say what the same answers say when protobuf writes them whole."""

from __future__ import annotations

from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.envoy_codec import bytes_of
from extproc.domain.decision import Decision
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane
from extproc.exchange.events import Phase, Refuse, Route

TEXTS = st.text(max_size=300)
AMOUNTS = st.none() | st.integers(0, 2**53)
DECISIONS = st.builds(
    Decision,
    outcome=st.sampled_from(Outcome),
    lease_id=TEXTS,
    reason=st.none() | st.sampled_from(Reason),
    tenant=st.none() | TEXTS,
    model=st.none() | TEXTS,
    lane=st.none() | st.sampled_from(Lane),
    replica=st.none() | TEXTS,
    fallback=st.none() | TEXTS,
    input_tokens=AMOUNTS,
    output_tokens=AMOUNTS,
    work_units=AMOUNTS,
    waited_ms=AMOUNTS,
    policy_version=TEXTS,
)
HEADERS = st.lists(st.tuples(TEXTS, st.text(max_size=3000)), max_size=8).map(tuple)


def write_decision(metadata: Any, decision: Decision) -> None:
    """The decision, field by field, by protobuf itself."""
    reserved_tokens = None
    if decision.input_tokens is not None and decision.output_tokens is not None:
        reserved_tokens = decision.input_tokens + decision.output_tokens
    fields = metadata.fields["extproc.admission"].struct_value.fields
    values = {
        "schema_version": 1,
        "reservation": decision.lease_id,
        "decision": decision.outcome,
        "reserved_tokens": reserved_tokens,
        **{
            name: getattr(decision, name)
            for name in (
                *("reason", "tenant", "tier", "model", "lane", "pool", "replica", "dialect", "fallback"),
                *("policy_version", "input_tokens", "output_tokens", "work_units", "predicted_ttft_ms"),
                *("retry_after_ms", "waited_ms"),
            )
        },
    }
    for name, value in values.items():
        if isinstance(value, str):
            fields[name].string_value = value
        elif value is not None:
            fields[name].number_value = value


ROUTES = st.builds(
    Route,
    phase=st.sampled_from((Phase.REQUEST_HEADERS, Phase.REQUEST_BODY)),
    set_headers=HEADERS,
    remove_headers=st.lists(TEXTS, max_size=3).map(tuple),
    endpoint=st.none() | TEXTS,
    body=st.none() | st.binary(max_size=300),
    decision=DECISIONS,
)


@given(ROUTES)
def test_a_route_is_what_protobuf_would_have_written(route: Route) -> None:
    whole = pb.ProcessingResponse()
    answer = whole.request_headers if route.phase is Phase.REQUEST_HEADERS else whole.request_body
    common = answer.response
    common.clear_route_cache = True
    common.header_mutation.SetInParent()
    for name, value in route.set_headers:
        common.header_mutation.set_headers.add().header.key = name
        common.header_mutation.set_headers[-1].header.raw_value = value.encode()
    common.header_mutation.remove_headers.extend(route.remove_headers)
    if route.body is not None:
        common.body_mutation.body = route.body
    write_decision(whole.dynamic_metadata, route.decision)
    if route.endpoint is not None:
        lb = whole.dynamic_metadata.fields["envoy.lb"].struct_value.fields
        lb["x-gateway-destination-endpoint"].string_value = route.endpoint

    assert pb.ProcessingResponse.FromString(bytes_of(route)) == whole


@given(HEADERS, DECISIONS)
def test_a_refusal_is_what_protobuf_would_have_written(
    headers: tuple[tuple[str, str], ...], decision: Decision
) -> None:
    refuse = Refuse(status=429, headers=headers, body={"error": "no"}, decision=decision)
    whole = pb.ProcessingResponse()
    immediate = whole.immediate_response
    immediate.status.code = 429
    immediate.headers.SetInParent()
    for name, value in headers:
        immediate.headers.set_headers.add().header.key = name
        immediate.headers.set_headers[-1].header.raw_value = value.encode()
    immediate.body = b'{"error":"no"}'
    immediate.details = f"extproc_{decision.reason}"
    write_decision(whole.dynamic_metadata, decision)

    assert pb.ProcessingResponse.FromString(bytes_of(refuse)) == whole
