"""When to stop asking, and when to try again."""

from __future__ import annotations

from extproc.adapters.redis_ledger.breaker import Breaker


def test_the_life_of_a_breaker() -> None:
    """It opens after failures in a row, probes at growing pauses, and closes with the first answer."""
    breaker = Breaker(threshold=3, pause_ms=100, longest_pause_ms=300)
    assert not breaker.failed(0)
    assert not breaker.failed(10)
    assert not breaker.succeeded()  # not in a row
    assert not breaker.failed(20)
    assert not breaker.failed(30)
    assert breaker.failed(40)
    assert breaker.is_open
    probes = [now_ms for now_ms in range(40, 1_200, 10) if breaker.may_probe(now_ms)]
    assert probes == [140, 340, 640, 940]
    assert not breaker.failed(1_200)  # it is open already
    assert breaker.succeeded()
    assert not breaker.is_open
    assert not breaker.may_probe(5_000)
    assert breaker.opened_total == 1


def test_a_closed_breaker_needs_all_failures_again() -> None:
    """One failure after a recovery does not open it."""
    breaker = Breaker(threshold=2)
    breaker.failed(0)
    breaker.failed(0)
    breaker.succeeded()
    assert not breaker.failed(0)
    assert not breaker.is_open


def test_waits_are_told_until_the_next_probe() -> None:
    """Whoever is refused is told to come back when the store will have been asked again."""
    breaker = Breaker(threshold=1, pause_ms=100)
    assert breaker.wait_ms(0) == 100
    breaker.failed(1_000)
    assert breaker.wait_ms(1_030) == 70
    assert breaker.wait_ms(2_000) == 1
