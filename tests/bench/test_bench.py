"""A tiny round of the whole benchmark: everything is measured and told. Nothing here is about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import h2load, report, scenarios, targets, through_envoy
from tests.bench.services import NOOP_SOURCE, compiled
from tests.support.train_tokenizer import TOKENIZER_DIR


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of `python -m tests.bench` has written its figures."""
    directory = tmp_path_factory.mktemp("bench")
    arguments = ["--rounds=1", "--scale=0.002", f"--output={directory}", f"--model={TOKENIZER_DIR}"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


@pytest.fixture(scope="module")
def document(results: Path) -> dict[str, Any]:
    """The figures."""
    found: dict[str, Any] = json.loads((results / "exchange.json").read_text())
    return found


def test_every_scenario_has_figures(document: dict[str, Any]) -> None:
    """Each line of the table was run against the floor and the service, and cost both something."""
    assert [row["scenario"] for row in document["scenarios"]] == [one.name for one in scenarios.SCENARIOS]
    for row in document["scenarios"]:
        for figure in ("cpu_us", "floor_cpu_us", "ratio", "p50_us", "p99_us", "floor_p50_us", "per_s"):
            assert 0 < row[figure]["min"] <= row[figure]["median"] <= row[figure]["max"], (row, figure)
        assert row["peak_mb"] > 10
        assert row["exchanges"] >= 16


def test_neighbours_were_there(document: dict[str, Any]) -> None:
    """The storm was refused, nobody else was, and the streams were open at once."""
    answers = document["storm"]["answers"]
    assert sum(number for reason, number in answers.items() if reason != "admitted") > 0
    assert document["storm"]["chats_refused"] == 0
    assert document["documents"]["answers"].keys() == {"admitted"}
    assert document["documents"]["ratio"]["min"] > 0
    assert document["hostile"]["ratio"]["min"] > 0
    assert document["open_streams"]["streams"] >= 50


def test_what_is_in_c_was_used_where_it_is_installed(document: dict[str, Any], tmp_path: Path) -> None:
    """Without it the report says so, and the targets that need it are not measured rather than met."""
    if h2load.installed():
        gateways = [row["gateway"] for row in document["through_envoy"]]
        assert gateways == [through_envoy.ALONE, through_envoy.NOOP, through_envoy.OURS] * 2
        assert all(row["ratio"]["min"] > 0 for row in document["native"])
        can_compile = compiled(NOOP_SOURCE, tmp_path / "noop")
        floors = [row["native_floor_cpu_us"] for row in document["native"]]
        assert all(floor["min"] > 0 if can_compile else floor is None for floor in floors)
    else:
        assert "not installed" in document["through_envoy"]
        assert "not installed" in document["native"]


def test_the_report_tells_it_all(results: Path, document: dict[str, Any]) -> None:
    """Every scenario and every target has its line, and a table its columns."""
    text = (results / "exchange.md").read_text()
    for name in (*(one.name for one in scenarios.SCENARIOS), *(one.measure for one in targets.TARGETS)):
        assert f"| {name} |" in text
    for line in text.splitlines():
        if line.startswith("| chat"):
            assert line.count("|") == len(report.SCENARIOS) + 1
    assert len(document["targets"]) == len(targets.TARGETS)


def test_a_missed_target_is_said() -> None:
    """What is over its limit, under it, or was not measured at all."""
    target = targets.Target(measure="x", of=lambda document: document["x"], most=2)
    floor = targets.Target(measure="y", of=lambda document: document["x"], least=60)
    assert target.row({"x": 2.5})["met"] is False
    assert target.row({"x": 2.0})["met"] is True
    assert floor.row({"x": 59.0})["met"] is False
    assert target.row({"x": None}) == {"measure": "x", "target": "<= 2", "measured": None, "met": None}


def test_what_h2load_says_is_read() -> None:
    """Latencies count from sending, sorted; the rate is over the whole run, however the lines are ordered."""
    done = h2load.answered([(1_010_000, 200, 90_000), (1_000_000, 200, 3_000), (1_010_001, 200, 2_000)])

    assert done.latencies_us == (2_000, 3_000, 90_000)
    assert done.per_s == pytest.approx(30)
