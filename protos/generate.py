"""Writes extproc/pb from the protos in this directory: `python protos/generate.py`.

The generated modules are committed, so that an installation needs no compiler; a test compares the two.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
PACKAGE = PROTOS.parent / "extproc" / "pb"
NOTE = '"""Generated from protos/ by protos/generate.py."""\n'


def generate(target: Path) -> None:
    """Make `target` a package with one module and one type stub for each proto, and nothing else.

    The compiler mirrors the protos' directories. Their first one is our own package's name and is left out:
    extproc/admission/v1/decision.proto becomes the module admission.v1.decision_pb2.
    """
    # Only those who change a proto need the compiler.
    from grpc_tools import protoc  # noqa: PLC0415

    sources = sorted((PROTOS / "extproc").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        arguments = [f"--proto_path={PROTOS}", f"--python_out={out}", f"--pyi_out={out}", *map(str, sources)]
        if protoc.main(["protoc", *arguments]):
            raise SystemExit("protoc failed; its messages are above")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(out / "extproc", target)
    for path in target.rglob("*.py*"):
        # A proto that imports another one of ours would look for it without the package around it.
        path.write_text(path.read_text().replace("from extproc.", "from extproc.pb."))
    for directory in (target, *(path for path in target.rglob("*") if path.is_dir())):
        (directory / "__init__.py").write_text(NOTE)


if __name__ == "__main__":
    generate(PACKAGE)
    sys.stdout.write(f"wrote {PACKAGE}\n")
