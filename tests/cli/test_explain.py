"""`extproc explain`: the decision on one request, on an idle fleet and on one in trouble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from extproc.cli import build_app

SAMPLES = Path(__file__).parents[2] / "deploy" / "policies"
KEY = "authorization=acme-key-1"


def explain(tmp_path: Path, *options: str, model: str = "qwen3-32b") -> Any:
    """What the command says about a short chat under the full sample policy."""
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}]}))
    arguments = ["explain", "--policy", str(SAMPLES / "full.yaml"), "--body", str(body), "--header", KEY]
    return CliRunner().invoke(build_app(), [*arguments, *options])


def steps(tmp_path: Path, *options: str, model: str = "qwen3-32b") -> list[dict[str, Any]]:
    """Its steps."""
    done = explain(tmp_path, "--json", *options, model=model)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_on_an_idle_fleet_it_is_admitted(tmp_path: Path) -> None:
    found = steps(tmp_path)
    assert [step["step"] for step in found] == ["policy", "read", "count", "reserve", "answer", "decision"]
    assert (found[-1]["outcome"], found[-1]["pool"]) == ("admitted", "large")


@pytest.mark.parametrize(
    "options",
    [("--gone", "large"), ("--overloaded", "large", "--header", "x-request-intent=bulk")],
)
def test_in_trouble_the_fallback_is_shown(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Where the policy names one, the request goes there."""
    found = steps(tmp_path, *options)
    assert (found[-1]["outcome"], found[-1]["pool"]) == ("admitted", "batch")
    assert found[-2]["headers"]["x-admission-fallback"] == "pool:batch"


def test_without_a_fallback_the_refusal_is_shown(tmp_path: Path) -> None:
    found = steps(tmp_path, "--gone", "chat", model="llama-3.1-8b")
    assert (found[-1]["reason"], found[-2]["status"]) == ("breaker_open", 503)


def test_interactive_is_not_suspended(tmp_path: Path) -> None:
    assert steps(tmp_path, "--overloaded", "large")[-1]["pool"] == "large"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--gone", "nope"), "'nope' is not a pool of the policy"),
        (("--overloaded", "nope"), "'nope' is not a pool of the policy"),
        (("--overloaded", "chat"), "has no `overload` in the policy"),
    ],
)
def test_a_pool_that_cannot_be_in_such_trouble_is_an_error(
    tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    done = explain(tmp_path, *options)
    assert done.exit_code == 2
    assert problem in done.output
