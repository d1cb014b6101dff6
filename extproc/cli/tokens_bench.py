"""What counting costs, beside the plain way of counting, in one run.

The plain way renders the chat template and encodes the whole text with `tokenizers.encode_batch_fast`. Both do the
same work by turns, so that a busy machine slows both. Processor time of one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from extproc.cli.tokens_counting import Counting, NotCounted
from extproc.cli.tokens_source import SourceRequest
from extproc.domain.prompt import TokenIdPrompt

MOST_REQUESTS = 10_000


@dataclass(slots=True, kw_only=True)
class BenchFigures:
    """Sums over all requests.

    `first` is with what the requests before have left in the caches, `again` is the same request once more.
    """

    requests: int = 0
    skipped: int = 0
    tokens: int = 0
    unequal: int = 0
    bytes_us: int = 0
    plain_us: int = 0
    first_us: int = 0
    again_us: int = 0

    def as_rows(self) -> list[dict[str, Any]]:
        """One row per way: microseconds per request, tokens per second, speed as a multiple of the plain way."""
        ways = (
            ("tokenizers.encode_batch_fast, whole text", self.plain_us),
            ("this counter, as the requests come", self.first_us),
            ("this counter, from the body's bytes", self.first_us + self.bytes_us),
            ("this counter, all seen before", self.again_us),
        )
        return [
            {
                "way": way,
                "us_per_request": round(spent_us / max(self.requests, 1), 1),
                "tokens_per_s": round(self.tokens * 1_000_000 / max(spent_us, 1)),
                "times_as_fast": round(self.plain_us / max(spent_us, 1), 2),
            }
            for way, spent_us in ways
        ]


def bench(counting: Counting, sources: Iterable[SourceRequest]) -> BenchFigures:
    """Count every request in each way. The counts must be the same; `unequal` says how many were not."""
    figures = BenchFigures()
    for source in sources:
        if figures.requests >= MOST_REQUESTS:
            break
        begun_ns = time.thread_time_ns()
        try:
            read = counting.read(source)
            parsed_ns = read_ns = time.thread_time_ns()
            if isinstance(read.request.prompt, TokenIdPrompt):
                figures.skipped += 1  # nothing to encode
                continue
            if not figures.requests:  # what is done once per process is not what a request costs
                counting.tokens_of(read.model).plain(read.request.prompt)
                read_ns = time.thread_time_ns()
            first = counting.counted(read)
            first_ns = time.thread_time_ns()
            again = counting.counted(read)
            again_ns = time.thread_time_ns()
            plain = counting.tokens_of(read.model).plain(read.request.prompt)
            plain_ns = time.thread_time_ns()
        except NotCounted:
            figures.skipped += 1
            continue
        figures.requests += 1
        figures.tokens += sum(plain)
        figures.unequal += not first == again == plain
        figures.bytes_us += (parsed_ns - begun_ns) // 1_000
        figures.first_us += (first_ns - read_ns) // 1_000
        figures.again_us += (again_ns - first_ns) // 1_000
        figures.plain_us += (plain_ns - again_ns) // 1_000
    return figures
