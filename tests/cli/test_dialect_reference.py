"""The committed table of dialects is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.cli import build_app
from extproc.dialects.reading import Dialect
from extproc.dialects.registry import DIALECTS, UNCOUNTED_PATHS, dialect_for

PAGE = Path(__file__).parents[2] / "deploy" / "dialects.md"


def test_the_page_is_printed_from_the_registry() -> None:
    """Print it again after a change: `extproc schema --dialects > deploy/dialects.md`."""
    printed = CliRunner().invoke(build_app(), ["schema", "--dialects"])
    assert printed.exit_code == 0
    assert PAGE.read_text() == printed.stdout


def test_every_dialect_and_route_is_on_it() -> None:
    """Nobody has to read code to know what is counted, and what is not."""
    text = PAGE.read_text()
    for dialect in DIALECTS:
        assert text.count(f"| {dialect.name} |") == 2
        assert all(f"`{path}`" in text for path in (*dialect.paths, *dialect.exact_paths))
    assert all(f"`{path}`" in text for path in UNCOUNTED_PATHS)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_the_smallest_request_is_one(dialect: Dialect) -> None:
    """The body that the table is made from is read on every route of its dialect."""
    for path in (*dialect.paths, *dialect.exact_paths):
        route = path.replace("*", "m")
        assert dialect_for(route) is dialect
        assert dialect.read(dialect.smallest, route).choices == 1
