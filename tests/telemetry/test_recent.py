"""What the live page remembers: little, bounded, and aligned to time."""

from __future__ import annotations

from extproc.adapters.telemetry import recent as recent_module
from extproc.adapters.telemetry.recent import DECISIONS, SLOT_S, SLOTS, Recent
from extproc.domain.outcome import Outcome, Reason
from tests.telemetry.facts import a_decision


class Watched:
    """A memory on a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0
        self.recent = Recent(lambda: self.now_s)

    def refuse(self, reason: Reason, times: int = 1) -> None:
        """Some refusals, now."""
        for _ in range(times):
            self.recent.decided(a_decision(outcome=Outcome.REFUSED, reason=reason))


def test_the_last_decisions_are_kept_newest_first() -> None:
    """Only so many are kept, and none of them says more than the decision does."""
    watched = Watched()
    for number in range(DECISIONS + 40):
        watched.now_s += 1
        watched.recent.decided(a_decision(lease_id=f"lease-{number}"))
    kept = watched.recent.decisions()

    assert len(kept) == DECISIONS
    assert kept[0]["reservation"] == f"lease-{DECISIONS + 39}"
    assert kept[0]["at_ms"] == int(watched.now_s * 1_000)
    assert kept[0]["decision"] == "admitted"
    assert {key for one in kept for key in one} == {
        *(
            "at_ms",
            "decision",
            "reason",
            "tenant",
            "model",
            "lane",
            "pool",
            "replica",
            "fallback",
            "input_tokens",
        ),
        *("output_tokens", "decided_us", "retry_after_ms", "reservation"),
    }


def test_refusals_are_counted_by_reason_over_the_last_minutes() -> None:
    """Each slot of time has its count, quiet slots have none, and what is older than the window is gone."""
    watched = Watched()
    watched.refuse(Reason.QUEUE_FULL, 3)
    watched.recent.decided(a_decision())
    watched.now_s += SLOT_S * 2
    watched.refuse(Reason.QUEUE_FULL)
    watched.refuse(Reason.TENANT_RATE, 2)
    history = watched.recent.history()

    assert history["slot_s"] == SLOT_S
    assert history["refusals"] == ["queue_full", "tenant_rate"]
    assert history["counts"]["queue_full"][-3:] == [3, 0, 1]
    assert history["counts"]["tenant_rate"][-3:] == [0, 0, 2]
    assert history["counts"]["admitted"][-3:] == [1, 0, 0]
    assert {len(counts) for counts in history["counts"].values()} == {SLOTS}

    watched.now_s += SLOT_S * (SLOTS - 1)
    assert watched.recent.history()["counts"] == {
        "queue_full": [1] + [0] * (SLOTS - 1),
        "tenant_rate": [2] + [0] * (SLOTS - 1),
    }
    watched.now_s += SLOT_S
    assert watched.recent.history()["counts"] == {}


def test_memory_does_not_grow_with_time() -> None:
    """After days of traffic no more slots are kept than are shown."""
    watched = Watched()
    for _ in range(5 * SLOTS):
        watched.now_s += SLOT_S
        watched.refuse(Reason.QUEUE_FULL)
    assert len(watched.recent._slots) == SLOTS
    assert recent_module.DECISIONS >= 20  # the page shows as many
