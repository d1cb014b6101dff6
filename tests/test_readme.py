"""What the README promises is what the code does."""

from __future__ import annotations

from pathlib import Path

from extproc.domain.contract import CONTRACT, Retry

README = Path(__file__).parent.parent / "README.md"


def contract_table() -> str:
    """The contract as a Markdown table: reasons of one status and retry on one line."""
    rows: dict[tuple[int, Retry], list[str]] = {}
    for reason, row in CONTRACT.items():
        rows.setdefault((row.status, row.retry), []).append(f"`{reason}`")
    lines = ["| reason | status | retry |", "|---|---|---|"]
    for (status, retry), reasons in rows.items():
        when = "never" if retry is Retry.NEVER else "after `retry-after`"
        lines.append(f"| {', '.join(reasons)} | {status} | {when} |")
    return "\n".join(lines)


def test_the_contract_table_is_the_contract() -> None:
    """README and code name the same reasons, statuses and retries."""
    text = README.read_text()
    begin, end = text.index("<!-- contract:begin"), text.index("<!-- contract:end -->")
    written = text[text.index("\n", begin) + 1 : end].strip()
    assert written == contract_table()
