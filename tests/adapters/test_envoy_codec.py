"""A long body is taken from its message without protobuf, and is what protobuf would have made of it."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.envoy_codec import event_of, message_of
from extproc.exchange.events import RequestBody

LONG = 64 * 1024


def a_message(size: int, *, ended: bool, **fields: Any) -> bytes:
    """A request_body message, and what else is said in it."""
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"x" * size, end_of_stream=ended), **fields)
    serialized: bytes = message.SerializeToString()
    return serialized


@given(
    size=st.one_of(
        st.integers(0, 300), st.integers(LONG - 300, LONG + 300), st.just(1 << 21), st.just(1 << 22)
    ),
    ended=st.booleans(),
)
def test_a_body_is_the_same_however_long(size: int, ended: bool) -> None:
    """The same event, whoever took the message apart."""
    data = a_message(size, ended=ended)
    event = event_of(message_of(data))
    assert event == RequestBody(data=b"x" * size, end_of_stream=ended)
    assert event == event_of(pb.ProcessingRequest.FromString(data))


def test_a_long_body_is_taken_out_without_protobuf() -> None:
    """What is much larger than its message is not copied more often than needed."""
    assert type(message_of(a_message(LONG, ended=True))) is RequestBody
    assert type(message_of(a_message(100, ended=True))) is pb.ProcessingRequest


OTHERS: dict[str, bytes] = {
    "more is said": a_message(LONG, ended=True, observability_mode=True),
    "another field of the body": pb.ProcessingRequest(
        request_body=pb.HttpBody(body=b"x" * LONG, end_of_stream=True, end_of_stream_without_message=True)
    ).SerializeToString(),
    "another message last": a_message(LONG, ended=True)
    + pb.ProcessingRequest(response_headers={}).SerializeToString(),
    "two bodies": a_message(LONG, ended=False) + a_message(3, ended=True),
    "a head": pb.ProcessingRequest(
        request_headers={"headers": {"headers": [{"key": "a", "value": "b" * LONG}]}}
    ).SerializeToString(),
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_everything_else_is_protobufs(data: bytes) -> None:
    """Only a body and nothing else is known here."""
    assert message_of(data) == pb.ProcessingRequest.FromString(data)


@given(position=st.integers(0, 24), patch=st.binary(min_size=1, max_size=4))
def test_damaged_messages_are_protobufs_to_refuse(position: int, patch: bytes) -> None:
    """Whatever stands where lengths were: the event is what protobuf makes of it, or its error."""
    whole = a_message(LONG, ended=True)
    data = whole[:position] + patch + whole[position + len(patch) :]
    try:
        expected = event_of(pb.ProcessingRequest.FromString(data))
    except Exception as error:
        with pytest.raises(type(error)):
            message_of(data)
    else:
        assert event_of(message_of(data)) == expected
