"""What the service sets on an admitted request is what the gateway strips from clients."""

from __future__ import annotations

from extproc.domain.policy import PoolFallback
from extproc.exchange.events import Route
from extproc.exchange.headers import ADMISSION_HEADERS, ADMITTED_HEADERS, accounting_headers
from tests.exchange.rig import a_body, a_count, a_grant, a_head, an_exchange, answers, play


def test_nothing_is_set_that_is_not_stripped() -> None:
    """A header that only one of the two knew could be forged, or would be lost."""
    exchange = an_exchange()
    route = answers(play(exchange, a_head(), a_body(), a_count(), a_grant()))[-1]
    assert isinstance(route, Route)
    assert exchange._plan is not None
    everything = accounting_headers(exchange._plan, a_grant(), 0, PoolFallback(pool="chat"))
    assert {name for name, _ in everything} == set(ADMITTED_HEADERS)
    assert {name for name, _ in route.set_headers} < set(ADMITTED_HEADERS)
    assert all(name.startswith(ADMISSION_HEADERS) for name in ADMITTED_HEADERS)
