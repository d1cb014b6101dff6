"""The architecture is checked, and the check can fail: a planted import of each forbidden kind is found."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the import contracts on the tree at `root`."""
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package that a test may spoil."""
    root = tmp_path_factory.mktemp("architecture")
    shutil.copytree(ROOT / "extproc", root / "extproc", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_the_contracts_hold(copy: Path) -> None:
    """Dependencies point inward, and the core is pure."""
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "planted"),
    [
        ("domain/books.py", "import time"),
        ("domain/policy.py", "import logging"),
        ("domain/demand.py", "from extproc.ports import Ledger"),
        ("dialects/tgi.py", "import orjson"),
        ("exchange/machine.py", "import asyncio"),
        ("exchange/events.py", "from extproc.ports import Ledger"),
        ("driver.py", "from extproc.adapters.envoy_codec import bytes_of"),
        ("adapters/memory_ledger.py", "from extproc.settings import Settings"),
        ("adapters/memory_ledger.py", "import extproc.app"),
        ("utils.py", "import os"),
    ],
)
def test_a_planted_violation_is_found(copy: Path, module: str, planted: str) -> None:
    """One import in the wrong place breaks the build; so does a module that has no place."""
    file = copy / "extproc" / module
    before = file.read_text() if file.exists() else None
    file.write_text(f"{before or ''}\n{planted}\n")
    try:
        result = lint_imports(copy)
        assert result.returncode != 0, result.stdout
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_text(before)
