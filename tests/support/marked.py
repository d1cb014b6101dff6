"""Documents of which a part is written by a command: what stands between two comments."""

from __future__ import annotations

from pathlib import Path


def write_marked(document: Path, mark: str, text: str) -> None:
    """Put `text` between the comments that begin and end `mark`. Raises `ValueError` if they are not there."""
    old = document.read_text(encoding="utf-8")
    head, begun, rest = old.partition(f"<!-- {mark}:begin")
    comment, closed, rest = rest.partition("-->\n")
    _, ended, tail = rest.partition(f"<!-- {mark}:end -->")
    if not (begun and closed and ended):
        raise ValueError(
            f"{document} has no place for figures: <!-- {mark}:begin --> and <!-- {mark}:end -->"
        )
    document.write_text(f"{head}{begun}{comment}{closed}\n{text}\n{ended}{tail}", encoding="utf-8")
