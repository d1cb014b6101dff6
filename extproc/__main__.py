"""`python -m extproc`: the same as the `extproc` command."""

from __future__ import annotations

from extproc.cli import main

if __name__ == "__main__":
    main()
