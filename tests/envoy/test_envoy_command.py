"""`extproc envoy`, as people run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from extproc.adapters.envoy_bootstrap.rendering import from_yaml
from extproc.cli import build_app

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "deploy" / "policies" / "small.yaml"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(build_app(), ["envoy", *map(str, arguments)])


def test_the_repositorys_configuration_is_current() -> None:
    """`envoy/envoy.yaml` is what the command prints for the small policy."""
    printed = run("--policy", SMALL)
    assert printed.exit_code == 0
    assert (ROOT / "envoy" / "envoy.yaml").read_text() == printed.stdout, (
        "run: extproc envoy --policy deploy/policies/small.yaml > envoy/envoy.yaml"
    )


def test_the_real_envoy_accepts_the_repositorys_configuration() -> None:
    """With --check, Envoy's verdict comes first, and the configuration is printed as without it."""
    checked = run("--policy", SMALL, "--check")
    assert checked.exit_code == 0, checked.stderr
    assert "Envoy accepts the configuration" in checked.stderr
    assert checked.stdout == (ROOT / "envoy" / "envoy.yaml").read_text()


def test_options_are_in_the_configuration() -> None:
    """Addresses and switches end up where Envoy looks for them."""
    printed = run(
        *("--policy", SMALL, "--extproc", "unix:/run/a.sock", "--extproc", "unix:/run/b.sock"),
        *("--listen", "127.0.0.1:8080", "--admin", "127.0.0.1:8081", "--otlp", "collector:4317"),
        *("--pool-health", "/health", "--no-usage-filters", "--trust-identity-header", "--node-id", "east-1"),
    )
    assert printed.exit_code == 0
    assert printed.stderr == ""
    configuration = from_yaml(printed.stdout)
    assert configuration.node is not None
    assert configuration.node.id == "east-1"
    for part in (
        "{pipe: {path: /run/a.sock}}",
        "{pipe: {path: /run/b.sock}}",
        "{socket_address: {address: 127.0.0.1, port_value: 8080}}",
        "{socket_address: {address: 127.0.0.1, port_value: 8081}}",
        "{socket_address: {address: collector, port_value: 4317}}",
        "{path: /health}",
    ):
        assert part in printed.stdout
    assert "to_metadata" not in printed.stdout
    assert "x-tenant-id" not in printed.stdout


def test_a_stripped_tenant_header_is_told() -> None:
    """Who makes a gateway that will know no tenant learns so at once, and what to do."""
    printed = run("--policy", SMALL)
    assert "clients' own x-tenant-id is removed" in printed.stderr
    assert "--trust-identity-header" in printed.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "nowhere.yaml"), "nowhere.yaml"),
        (("--policy", SMALL, "--listen", "8080"), "'8080' is not host:port"),
        (("--policy", SMALL, "--extproc", "unix:a.sock"), "unix:/run/extproc/worker-0.sock"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments: tuple[str | Path, ...], told: str) -> None:
    """A mistake ends the command with code 1, a sentence that names it, and nothing on stdout."""
    printed = run(*arguments)
    assert printed.exit_code == 1
    assert printed.stdout == ""
    assert told in printed.stderr
    assert "Traceback" not in printed.stderr


def test_what_envoy_refuses_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --check, a configuration that Envoy refuses ends the command with Envoy's own words."""
    import extproc.adapters.envoy_bootstrap as package

    monkeypatch.setattr(package, "bootstrap", lambda *_: "static_resources: {listeners: 7}\n")
    printed = run("--policy", SMALL, "--check")
    assert printed.exit_code == 1
    assert printed.stdout == ""
    assert "Envoy refuses the configuration" in printed.stderr
