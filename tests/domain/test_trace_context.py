"""Trace contexts as the standard has them; anything else is none at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.domain.trace_context import TraceContext, nearest, trace_context

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-adds", True),
    ],
)
def test_a_valid_parent_is_read(value: str, sampled: bool) -> None:
    """Ids and the sampling flag are taken from what the standard allows, later versions included."""
    found = trace_context({"traceparent": value, "tracestate": "a=1,b=2"})
    assert found == TraceContext(trace_id=TRACE, span_id=SPAN, sampled=sampled, state="a=1,b=2")


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"{GOOD},{GOOD}",
        f" {GOOD}",
        f"{GOOD}\n",
        f"00-{TRACE}-{SPAN}-01" + "-x" * 500,
        f"00-{'٣' * 32}-{SPAN}-01",
    ],
)
def test_anything_else_is_no_parent(value: str) -> None:
    """A parent that is not exactly right is as good as none, and no error."""
    assert trace_context({"traceparent": value}) is None


@pytest.mark.parametrize("state", ["", "x" * 513, "a=\x00", "a=é"])
def test_a_bad_state_is_dropped_alone(state: str) -> None:
    """A state that is too long or not printable does not take the parent with it."""
    found = trace_context({"traceparent": GOOD, "tracestate": state})
    assert found is not None
    assert found.state is None


@given(st.text(max_size=300))
def test_no_text_fails(value: str) -> None:
    """Whatever a client types, reading it raises nothing and yields only well-formed ids."""
    found = trace_context({"traceparent": value, "tracestate": value})
    assert found is None or (len(found.trace_id), len(found.span_id)) == (32, 16)


def test_the_proxys_span_is_nearer_within_the_same_trace() -> None:
    """The proxy's own span is the parent where it belongs to the request's trace, and never otherwise."""
    request = TraceContext(trace_id=TRACE, span_id=SPAN, sampled=True)
    proxy = TraceContext(trace_id=TRACE, span_id="1" * 16, sampled=True)
    elsewhere = TraceContext(trace_id="2" * 32, span_id="1" * 16, sampled=True)

    assert nearest(request, proxy) is proxy
    assert nearest(request, elsewhere) is request
    assert nearest(request, None) is request
    assert nearest(None, elsewhere) is elsewhere
    assert nearest(None, None) is None
