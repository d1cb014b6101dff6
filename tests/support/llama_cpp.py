"""The real llama.cpp server, in a process of its own.

A native crash in it must not take the tests along, and its threads must not run in the process that measures.
The child binds a port of the kernel's choice and says which; it ends when its standard input closes, so it
cannot outlive the test process, however that ends.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import child

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60


@dataclass(kw_only=True)
class LlamaServer:
    """`with LlamaServer(model=..., log=...) as server:` serves `model` at `server.url` until the block ends.

    `context_tokens` is shared by `parallel` slots: each request may use `context_tokens / parallel`.
    """

    model: Path
    log: Path
    parallel: int = 4
    context_tokens: int = 65536
    url: str = field(default="", init=False)
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        arguments = [str(self.model), str(self.parallel), str(self.context_tokens)]
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._process = process
        assert process.stdout is not None
        # A child that never speaks is ended, and the read below then returns nothing.
        deadline = threading.Timer(START_TIMEOUT_S, process.kill)
        deadline.start()
        self.url = process.stdout.readline().strip()
        deadline.cancel()
        if not self.url:
            self.stop()
            raise RuntimeError(f"llama.cpp did not start with {self.model}; see {self.log}")
        with urllib.request.urlopen(f"{self.url}/health", timeout=START_TIMEOUT_S) as answer:
            assert answer.status == 200
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The process id, for tests that pause or kill the engine."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Stop the server and wait for its end; stopping twice does nothing."""
        process, self._process = self._process, None
        if process is not None:
            child.stop(process)


def serve(model: str, parallel: int, context_tokens: int) -> None:
    """The child: serve until standard input closes."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = parallel
    params.n_ctx = context_tokens
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
