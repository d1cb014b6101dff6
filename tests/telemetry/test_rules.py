"""Recording rules and alerts: valid, tested with promtool, about metrics that exist, each with a runbook section."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.adapters.telemetry.instruments import INSTRUMENTS, Kind
from extproc.domain.contract import CONTRACT, Retry
from extproc.domain.outcome import Reason

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus"
FOREIGN = {
    *("up", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"),
    *("extproc_workers", "extproc_worker_restarts_total"),  # the supervisor's own
}


def require_prometheus() -> None:
    """Skip where there is no Prometheus; in CI, whose script installs it, fail."""
    if shutil.which("promtool") and shutil.which("prometheus"):
        return
    if os.environ.get("CI") == "true":
        pytest.fail("promtool is missing: the CI script must install Debian's prometheus")
    pytest.skip("promtool is missing: install Debian's prometheus to test rules and dashboards")


def exported_names() -> set[str]:
    """Every name under which Prometheus sees one of our metrics."""
    names = set(FOREIGN)
    for instrument in INSTRUMENTS.values():
        if instrument.kind is Kind.COUNTER:
            names.add(f"{instrument.name}_total")
        elif instrument.kind is Kind.HISTOGRAM:
            names.update(f"{instrument.name}_{part}" for part in ("bucket", "sum", "count"))
        else:
            names.add(instrument.name)
    return names


def metrics_in(expression: str) -> set[str]:
    """Names of metrics in an expression of ours; recorded ones have colons."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    return set(re.findall(r"\b(?:[a-z_]+:)?(?:extproc|process)_[a-z_]+(?::[a-z0-9_]+)?\b|\bup\b", bare))


def rules(name: str) -> list[dict[str, Any]]:
    document = yaml.safe_load((RULES / name).read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


RECORDED = rules("recording.rules.yml")
ALERTS = rules("alerts.rules.yml")


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    """Rules parse, and every alert fires and stays quiet as its cases say."""
    require_prometheus()
    for command in (
        ["check", "rules", "recording.rules.yml", "alerts.rules.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "rules.test.yml"],
    ):
        done = subprocess.run(["promtool", *command], cwd=RULES, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_made_to_fire() -> None:
    """There is a case in which the alert fires."""
    cases = yaml.safe_load((RULES / "rules.test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        name
        for case in cases
        for test in case["promql_expr_test"]
        for sample in test["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert {alert["alert"] for alert in ALERTS} == fired


@pytest.mark.parametrize("rule", [*RECORDED, *ALERTS], ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_only_metrics_that_exist(rule: dict[str, Any]) -> None:
    """Every name in an expression is exported by the service or recorded by another rule."""
    used = metrics_in(rule["expr"])
    assert used
    assert used <= exported_names() | {one["record"] for one in RECORDED}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_what_and_links_how(alert: dict[str, Any]) -> None:
    """An alert has a severity, a summary, a description, and a section in the runbook under its own name."""
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"] == f"deploy/runbook.md#{alert['alert'].lower()}"
    headings = re.findall(r"^## (\w+)$", (DEPLOY / "runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert alert["alert"] in headings
    assert len(headings) == len(ALERTS)


def test_capacity_refusals_are_those_of_the_contract() -> None:
    """What counts as want of capacity is every reason that may go away, less what a tenant did to itself."""
    (rule,) = [rule for rule in RECORDED if rule["record"] == "lane:extproc_capacity_refusals:rate5m"]
    (listed,) = re.findall(r'reason=~"([^"]+)"', rule["expr"])
    own_doing = {Reason.TENANT_RATE, Reason.TENANT_INFLIGHT, Reason.RETRY_PENALTY}
    later = {reason for reason in Reason if CONTRACT[reason].retry is Retry.LATER}
    assert set(listed.split("|")) == {str(reason) for reason in later - own_doing}


def test_links_inside_the_runbook_lead_somewhere() -> None:
    """Every link within the runbook names one of its sections."""
    text = (DEPLOY / "runbook.md").read_text(encoding="utf-8")
    sections = {heading.lower() for heading in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= sections
