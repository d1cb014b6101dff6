"""What a count costs, beside the plain way of counting, in one run.

    python -m tests.bench.tokens_bench [--json FILE] [--rounds N] [--tokenizer DIRECTORY]

The plain way renders the chat template in Jinja's sandbox and encodes the whole text by `encode_batch_fast`. Both
ways do the same work by turns, so that a busy machine slows both; processor time of the one thread, except where
wall time is said. Ratios are to the plain way: below 1 is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import count as numbers
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from extproc.adapters.tokens.count_cache import CountCache
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.adapters.tokens.load import load_model_tokens
from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.domain.prompt import ChatPrompt, Count, Counted, TextPrompt
from tests.support.qwen3 import DATA_DIR, qwen3_dir
from tests.support.reference_count import ReferenceCount

NO_LIMIT = 1 << 40
DOCUMENT_TOKENS = 100_000
RUNS = {"a": 200_000, "^": 1_000_000, " ": 100_000, "\n": 100_000, "7": 200_000}
STALL_PROBES = 2_000

Row = dict[str, Any]


class Bench:
    """Measures two ways of counting by turns."""

    def __init__(self, directory: Path, rounds: int) -> None:
        started_s = time.perf_counter()
        self.model: ModelTokens = load_model_tokens(directory)
        self.load_s = time.perf_counter() - started_s
        self.reference = ReferenceCount(directory)
        self.tokenizer: Tokenizer = self.reference.tokenizer
        self.counter = ExactTokenCounter({"m": self.model}, inline_us=1 << 60)
        self.rounds = rounds
        self.prose = (DATA_DIR / "corpus" / "prose.txt").read_text("utf-8")
        self.code = (DATA_DIR / "corpus" / "code.txt").read_text("utf-8")
        self.languages = (DATA_DIR / "corpus" / "languages.txt").read_text("utf-8")
        self.serial = numbers(1)

    def plain_chat(self, prompt: ChatPrompt) -> int:
        return self.plain_text(self.reference.render(prompt.messages))

    def plain_text(self, text: str) -> int:
        return len(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def ours(self, prompt: ChatPrompt | TextPrompt) -> int:
        answers: list[Count] = []
        self.counter.count(
            model="m", prompt=prompt, limit_tokens=NO_LIMIT, tenant="t", deliver=answers.append
        )
        (answer,) = answers
        assert isinstance(answer, Counted)
        return answer.per_sequence_tokens[0]

    def ours_text(self, text: str) -> int:
        return self.ours(TextPrompt(texts=(text,), add_special_tokens=False))

    def conversation(self, *, history: int, turn: int) -> ChatPrompt:
        """About 300 tokens in six messages; the first five are the same for the same `history`."""
        at = 61 * history % 4_000
        texts = [self.prose[at + 300 * number :][:210] for number in range(5)]
        texts[1] = f"{history}: {texts[1]}"
        texts.append(f"{turn}: {self.prose[at + 1_500 :][:210]}")
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        return ChatPrompt(
            messages=[{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        )

    def compare(
        self, name: str, inputs: Iterator[Any], plain: Callable[..., int], ours: Callable[..., int]
    ) -> Row:
        """Both ways on the same inputs; they must agree."""
        plain_us: list[float] = []
        ours_us: list[float] = []
        tokens = 0
        for _, item in zip(range(self.rounds), inputs, strict=False):
            begun_ns = time.thread_time_ns()
            expected = plain(item)
            between_ns = time.thread_time_ns()
            tokens = ours(item)
            ours_us.append((time.thread_time_ns() - between_ns) / 1_000)
            plain_us.append((between_ns - begun_ns) / 1_000)
            assert tokens == expected, f"{name}: {tokens} for {expected}"
        return {
            "what": name,
            "tokens": tokens,
            "plain_us": round(statistics.median(plain_us), 1),
            "ours_us": round(statistics.median(ours_us), 1),
            "ours_best_us": round(min(ours_us), 1),
            "ratio": round(statistics.median(ours_us) / statistics.median(plain_us), 3),
        }

    def chats(self) -> Iterator[Row]:
        """One chat of 300 tokens: seen as it is, but for its last turn, or not at all."""
        same = self.conversation(history=0, turn=0)
        self.ours(same)
        render = self.compare(
            "rendering alone (ours: render)",
            repeat(same),
            lambda prompt: len(self.reference.render(prompt.messages)),
            lambda prompt: len(self.model._templates.render(prompt)),
        )
        render["tokens"] = 0
        yield render
        yield self.compare("chat, sent again", repeat(same), self.plain_chat, self.ours)
        pieces = (self.conversation(history=0, turn=turn) for turn in numbers(1))
        yield self.compare("chat, new last turn", pieces, self.plain_chat, self.ours)
        known = [self.conversation(history=number, turn=0) for number in range(1, self.rounds + 1)]
        yield self.compare("chat, all new", iter(known), self.plain_chat, self.ours)
        self.model.prompts = CountCache(0)  # the pieces stay known, the prompts do not
        yield self.compare("chat, pieces known", iter(known), self.plain_chat, self.ours)

    def documents(self) -> Iterator[Row]:
        """Documents of 100,000 tokens that were not seen before, and one that was."""
        rounds, self.rounds = self.rounds, max(3, self.rounds // 200)
        for name, text in (("prose", self.prose), ("code", self.code), ("25 languages", self.languages)):
            document = text * (DOCUMENT_TOKENS // self.plain_text(text) + 1)
            fresh = (f"{next(self.serial)} {document}" for _ in numbers())
            yield self.compare(f"document of {name}, new", fresh, self.plain_text, self.ours_text)
            self.ours_text(document)
            yield self.compare(
                f"document of {name}, known",
                repeat(document),
                self.plain_text,
                self.ours_text,
            )
        for character, length in RUNS.items():
            runs = (character * length + str(next(self.serial)) for _ in numbers())
            yield self.compare(f"{length:,} times {character!r}", runs, self.plain_text, self.ours_text)
        self.rounds = rounds


async def stalls(directory: Path) -> dict[str, Any]:
    """Ordinary new prompts of 50 tokens, wall time: on an idle counter, and beside 20 hostile ones."""
    counter = ExactTokenCounter({"m": load_model_tokens(directory)})
    prose = (DATA_DIR / "corpus" / "prose.txt").read_text("utf-8")
    serial = numbers(1)

    def probe() -> float:
        answers: list[Count] = []
        number = next(serial)
        prompt = TextPrompt(texts=(f"{number} {prose[number % 4_000 :][:220]}",))
        begun_s = time.perf_counter()
        counter.count(model="m", prompt=prompt, limit_tokens=NO_LIMIT, tenant="good", deliver=answers.append)
        assert len(answers) == 1
        return (time.perf_counter() - begun_s) * 1e6

    async def probes(enough: Callable[[], bool]) -> list[float]:
        taken: list[float] = []
        while not enough() and len(taken) < STALL_PROBES:
            taken.append(probe())
            await asyncio.sleep(0.0005)
        return taken

    idle = await probes(lambda: False)
    hostile: list[Count] = []
    begun_s = time.perf_counter()
    for _ in range(20):
        prompt = TextPrompt(texts=("^" * 1_000_000 + str(next(serial)),))
        counter.count(model="m", prompt=prompt, limit_tokens=NO_LIMIT, tenant="bad", deliver=hostile.append)
    busy = await probes(lambda: len(hostile) == 20)
    while len(hostile) < 20:
        await asyncio.sleep(0.01)
    took_s = time.perf_counter() - begun_s
    counter.close()
    figures = {
        f"{when}_{name}_us": round(statistics.quantiles(taken, n=100)[at], 1)
        for when, taken in (("idle", idle), ("busy", busy))
        for name, at in (("p50", 49), ("p99", 98))
    }
    counted = sum(isinstance(answer, Counted) for answer in hostile)
    return {
        **figures,
        "busy_probes": len(busy),
        "hostile_s": round(took_s, 2),
        "hostile_counted": counted,
        "p99_ratio": round(figures["busy_p99_us"] / figures["idle_p99_us"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's directory; by default Qwen3's")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with TemporaryDirectory() as scratch:
        directory = arguments.tokenizer or qwen3_dir(Path(scratch))
        bench = Bench(directory, arguments.rounds)
        rows = [*bench.chats(), *bench.documents()]
        bench.counter.close()
        report = {
            "machine": {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()},
            "packages": {
                name: metadata.version(name) for name in ("tokenizers", "tiktoken", "jinja2", "orjson")
            },
            "encoder": bench.model.encoder_name,
            "load_s": round(bench.load_s, 2),
            "rows": rows,
            "beside_hostile_prompts": asyncio.run(stalls(directory)),
        }
    print(json.dumps(report, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1), "utf-8")
    table = Table(
        "what", "tokens", "plain µs", "ours µs", "best µs", "ratio", title="One count (median, CPU)"
    )
    for row in rows:
        figures = (row["tokens"], row["plain_us"], row["ours_us"], row["ours_best_us"], row["ratio"])
        table.add_row(row["what"], *map(str, figures))
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
