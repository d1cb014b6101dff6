"""`extproc explain --full`: where a request goes for which its pool has no room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from extproc.cli import build_app

ROOT = Path(__file__).parent.parent.parent
POLICY = f"""
version: 1
models:
  tiny:
    tokenizer: {ROOT / "extproc" / "sim" / "tokenizer" / "tokenizer.json"}
    context_tokens: 8_192
    lanes: {{interactive: chat}}
    fallback: [{{pool: spare}}, {{region: "https://eu.example"}}]
pools:
  chat: {{prefill_tokens_per_s: 8_000, decode_tokens_per_s: 40, replicas: [{{name: c0, ceiling_tokens: 50_000}}]}}
  spare: {{prefill_tokens_per_s: 8_000, decode_tokens_per_s: 40, replicas: [{{name: s0, ceiling_tokens: 50_000}}]}}
tenants:
  identity: {{header: x-tenant}}
  tiers: {{all: {{}}}}
  members: {{acme: {{tier: all}}}}
"""
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "What is said twice?"}], "max_tokens": 50}


def explain(folder: Path, *arguments: str) -> Result:
    """The command's answer about a short chat."""
    policy, body = folder / "policy.yaml", folder / "body.json"
    policy.write_text(POLICY)
    body.write_text(json.dumps(BODY))
    return CliRunner().invoke(
        build_app(),
        ["explain", f"--policy={policy}", f"--body={body}", "--header=x-tenant=acme", *arguments],
    )


def steps_of(result: Result) -> dict[str, dict[str, Any]]:
    """The last step of each kind."""
    assert result.exit_code == 0, result.output
    return {step["step"]: step for step in json.loads(result.output)}


def test_an_idle_fleet_takes_it(tmp_path: Path) -> None:
    """The request goes to its own pool; where it could go instead is said, and that it did not have to."""
    steps = steps_of(explain(tmp_path, "--json"))
    assert steps["read"]["fallbacks"] == "pool:spare, region:https://eu.example"
    assert (steps["decision"]["outcome"], steps["decision"]["pool"]) == ("admitted", "chat")
    assert steps["decision"]["fallback"] is None


@pytest.mark.parametrize(
    ("full", "went", "fallback", "header"),
    [
        (("chat",), ("admitted", "spare"), "pool:spare", ("x-admission-pool", "spare")),
        (
            ("chat", "spare"),
            ("refused", "chat"),
            "region:https://eu.example",
            ("location", "https://eu.example/v1/chat/completions"),
        ),
    ],
)
def test_full_pools_show_the_fallback(
    tmp_path: Path, full: tuple[str, ...], went: tuple[str, str], fallback: str, header: tuple[str, str]
) -> None:
    """As if the pools had no room: every denial is a step, and the decision names where it went."""
    steps = steps_of(explain(tmp_path, "--json", *(f"--full={name}" for name in full)))
    decision = steps["decision"]
    assert (decision["outcome"], decision["pool"]) == went
    assert decision["fallback"] == fallback
    assert steps["answer"]["headers"][header[0]] == header[1]
    assert steps["denied"]["scope"] == "replica_tokens"


def test_a_pool_that_is_not_there_cannot_be_full(tmp_path: Path) -> None:
    """A wrong name is an error."""
    result = explain(tmp_path, "--full=none")
    assert result.exit_code == 2
    assert "'none' is not a pool of the policy" in " ".join(result.output.replace("│", " ").split())
