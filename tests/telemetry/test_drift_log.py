"""When an engine's count is not ours, somebody is told: seldom, per model, and never with text."""

from __future__ import annotations

import logging

import pytest

from extproc.adapters.telemetry.drift_log import MOST_MODELS, QUIET_S, DriftLog
from extproc.adapters.telemetry.logs import FIELDS, line_of
from extproc.adapters.telemetry.telemetry import Telemetry
from tests.telemetry.facts import a_decision, a_settled, a_snapshot


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[object, ...]]:
    """What each line says."""
    names = ("model", "input_tokens", "used_input_tokens", "requests")
    return [tuple(vars(record)[name] for name in names) for record in caplog.records]


def test_differences_are_sampled_per_model(caplog: pytest.LogCaptureFixture) -> None:
    """One line per model and minute, which tells how many requests it stands for; equal counts say nothing."""
    now_s = 100.0
    observer = DriftLog(lambda: now_s)
    observer.decided(a_decision())
    observer.settled(a_settled())
    observer.settled(a_settled(used_input_tokens=None))
    assert said(caplog) == []
    for _ in range(50):
        observer.settled(a_settled(used_input_tokens=1_001))
    observer.settled(a_settled(model="other", used_input_tokens=999))
    now_s += QUIET_S
    observer.settled(a_settled(used_input_tokens=990))
    assert said(caplog) == [("tiny", 1_000, 1_001, 1), ("other", 1_000, 999, 1), ("tiny", 1_000, 990, 50)]


def test_lines_have_known_fields_only(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of a line is left out when it is written, and all of it are numbers and names of the policy."""
    DriftLog().settled(a_settled(used_input_tokens=1_001))
    (record,) = caplog.records
    extra = set(vars(record)) - set(vars(logging.makeLogRecord({}))) - {"message", "asctime", "taskName"}
    assert extra <= set(FIELDS)
    assert "left_out" not in str(line_of(record))


def test_memory_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Records with ever new names of models share one line beyond some hundreds."""
    observer = DriftLog(lambda: 1.0)
    for number in range(10 * MOST_MODELS):
        observer.settled(a_settled(model=f"m{number}", used_input_tokens=1))
    assert len(caplog.records) == MOST_MODELS + 1


def test_it_is_one_of_the_observers(caplog: pytest.LogCaptureFixture) -> None:
    """The service's telemetry tells it."""

    async def snapshot() -> object:
        return a_snapshot()

    Telemetry(snapshot=snapshot).observer.settled(a_settled(used_input_tokens=7))  # type: ignore[arg-type]
    assert said(caplog) == [("tiny", 1_000, 7, 1)]
