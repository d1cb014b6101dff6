"""The harness of the hot path still fits the code, and its document the harness. Nothing here is about speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.driver import Driver
from tests.bench import hot_path
from tests.bench.prompts import write_policy
from tests.bench.stopwatch import StepGone, Stopwatch, timing
from tests.support.train_tokenizer import TOKENIZER_DIR

ADMITTED = ("cached", "fresh", "8k")


@pytest.mark.parametrize("name", hot_path.SCENARIOS)
def test_every_step_of_a_scenario_is_seen(name: str, tmp_path: Path) -> None:
    """Whatever is sent passes the codec; what is admitted passes every step but the refusal's own."""
    policy = write_policy(tmp_path, tokenizer_file=TOKENIZER_DIR / "tokenizer.json")

    result = hot_path.measure(policy, hot_path.SCENARIOS[name], blocks=2, size=3)

    steps = {row["step"]: row["calls"] for row in result["steps"]}
    assert result["low_us"] > 0
    assert result["scenario"] in hot_path.markdown(result)
    assert steps["codec: protobuf to event"] == 2
    wanted = {*hot_path.STEPS, hot_path.STREAM, hot_path.RECORDS, *hot_path.PARSED} - {"refusal worded"}
    if name in ADMITTED:
        assert wanted <= set(steps)
        assert steps["ledger: book"] == 1
    else:
        assert "ledger: book" not in steps
        assert steps["refusal worded"] >= 1
    assert ("plan: lane, demand, reservation" in steps) == (name != "early")


def test_the_document_names_the_steps() -> None:
    """A step that was added, renamed or dropped wants its line in the document."""
    text = hot_path.DOCUMENT.read_text()
    for step in (*hot_path.STEPS, hot_path.STREAM, hot_path.RECORDS, *hot_path.PARSED):
        assert f"| {step} |" in text, f"{step}: run `python -m tests.bench.hot_path --document`"


def test_a_step_that_is_gone_is_said() -> None:
    """A renamed function must not become a step of zero microseconds."""
    with (
        pytest.raises(StepGone, match="no 'drive' any more"),
        timing(Stopwatch(), {"x": ((Driver, "drive"),)}),
    ):
        pass


def test_time_is_counted_once() -> None:
    """A step's time is without the steps that it calls, and everything is put back afterwards."""
    watch = Stopwatch()
    before = Driver.receive

    def inner() -> None:
        sum(range(20_000))

    timed_inner = watch.wrap("inner", inner)
    watch.wrap("outer", timed_inner)()

    assert watch.taken["outer"].ns < watch.taken["inner"].ns
    assert watch.taken["outer"].inner_calls == watch.taken["inner"].calls == 1
    with timing(watch, {"receive": ((Driver, "receive"),)}):
        assert Driver.receive is not before
    assert Driver.receive is before
