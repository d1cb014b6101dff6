"""What a count costs, beside the plain way of counting, in one run.

    python -m tests.bench.tokens_bench [--json FILE] [--rounds N] [--tokenizer DIRECTORY] [--publish]

The plain way renders the chat template in Jinja's sandbox and encodes the whole text by `encode_batch_fast`. Both
ways do the same work by turns, so that a busy machine slows both; processor time of the one thread, except where
wall time is said. `--publish` writes the tables into TOKENS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import count as numbers
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from extproc.adapters.json_body import read_short
from extproc.adapters.tokens.count_cache import CountCache
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.adapters.tokens.load import load_model_tokens
from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.dialects.openai_chat import DIALECT
from extproc.domain.policy import Limits
from extproc.domain.prompt import ChatPrompt, Count, Counted, TextPrompt
from tests.bench.report import TARGETS as TARGET_COLUMNS
from tests.bench.report import plain, table
from tests.bench.targets import Target
from tests.support.marked import write_marked
from tests.support.qwen3 import DATA_DIR, qwen3_dir
from tests.support.reference_count import ReferenceCount

NO_LIMIT = 1 << 40
DOCUMENT_TOKENS = 100_000
RUNS = {"a": 200_000, "^": 1_000_000, " ": 100_000, "\n": 100_000, "7": 200_000}
STALL_PROBES = 2_000
PAGE = Path(__file__).with_name("TOKENS.md")

Row = dict[str, Any]

DOCUMENT = "document of {}, new"
KINDS = ("prose", "code", "25 languages")
FROM_BYTES = "chat, all new, from the body's bytes"
LIFE_TURNS = 20
LIFE_TOKENS = 30_000
LIFE = f"conversation of {LIFE_TURNS} turns to {LIFE_TOKENS:,} tokens, its whole life"

LIMITS = Limits(
    body_bytes=1 << 24,
    json_depth=64,
    prefill_weight_permille=1_000,
    lease_ttl_ms=60_000,
    orphan_grace_ms=60_000,
)


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
        """About 300 tokens in six messages; the first five are the same for the same `history`, and for no other."""
        at = 61 * history % 4_000
        texts = [f"{history}: {self.prose[at + 300 * number :][:180]}" for number in range(5)]
        texts.append(f"{history}, {turn}: {self.prose[at + 1_500 :][:180]}")
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        return ChatPrompt(
            messages=[{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        )

    def life(self) -> list[ChatPrompt]:
        """The requests of a conversation that grows by an answer and a question each, and was never seen before."""
        chars = LIFE_TOKENS * len(self.prose) // self.plain_text(self.prose) // (2 * LIFE_TURNS - 1)
        text = self.prose * (2 * LIFE_TURNS * chars // len(self.prose) + 1)
        said = [
            f"{next(self.serial)}: {text[at * chars : (at + 1) * chars]}" for at in range(2 * LIFE_TURNS - 1)
        ]
        messages = [
            {"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(said)
        ]
        return [ChatPrompt(messages=messages[: 2 * turn + 1]) for turn in range(LIFE_TURNS)]

    def plain_body(self, body: bytes) -> int:
        return self.plain_text(self.reference.render(json.loads(body)["messages"]))

    def ours_body(self, body: bytes) -> int:
        read = read_short(body, content_encoding=None, content_type="application/json", limits=LIMITS)
        assert read is not None
        prompt = DIALECT.read(read, "/v1/chat/completions").prompt
        assert isinstance(prompt, ChatPrompt)
        return self.ours(prompt)

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
            "times": round(statistics.median(plain_us) / statistics.median(ours_us), 1),
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
        bodies = (
            json.dumps(
                {"model": "m", "messages": self.conversation(history=-number, turn=0).messages}
            ).encode()
            for number in numbers(1)
        )
        yield self.compare(FROM_BYTES, bodies, self.plain_body, self.ours_body)
        known = [self.conversation(history=number, turn=0) for number in range(1, self.rounds + 1)]
        yield self.compare("chat, all new", iter(known), self.plain_chat, self.ours)
        self.model.prompts = CountCache(0)  # the pieces stay known, the prompts do not
        yield self.compare("chat, pieces known", iter(known), self.plain_chat, self.ours)

    def conversations(self) -> Iterator[Row]:
        """All requests of a conversation together."""
        rounds, self.rounds = self.rounds, max(3, self.rounds // 200)
        yield self.compare(
            LIFE,
            iter(self.life, None),
            lambda prompts: sum(map(self.plain_chat, prompts)),
            lambda prompts: sum(map(self.ours, prompts)),
        )
        self.rounds = rounds

    def documents(self) -> Iterator[Row]:
        """Documents of 100,000 tokens that were not seen before, and one that was."""
        rounds, self.rounds = self.rounds, max(3, self.rounds // 100)
        for name, text in zip(KINDS, (self.prose, self.code, self.languages), strict=True):
            document = text * (DOCUMENT_TOKENS // self.plain_text(text) + 1)
            fresh = (f"{next(self.serial)} {document}" for _ in numbers())
            yield self.compare(DOCUMENT.format(name), fresh, self.plain_text, self.ours_text)
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


def _of(what: str, figure: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Finds a figure among the rows."""
    return lambda report: next((row[figure] for row in report["rows"] if row["what"] == what), None)


TARGETS = (
    *(
        Target(
            measure=f"{DOCUMENT_TOKENS:,} tokens of {kind}, never seen: times faster than `encode_batch_fast`",
            of=_of(DOCUMENT.format(kind), "times"),
            least=5,
        )
        for kind in KINDS
    ),
    Target(measure=f"{LIFE}: times less CPU", of=_of(LIFE, "times"), least=20),
    Target(
        measure="chat of 300 tokens, never seen, from the body's bytes to its count, µs",
        of=_of(FROM_BYTES, "ours_us"),
        most=250,
    ),
)

COLUMNS = (
    ("what", plain("what")),
    ("tokens", plain("tokens")),
    ("plain µs", plain("plain_us")),
    ("ours µs", plain("ours_us")),
    ("best µs", plain("ours_best_us")),
    ("times less", plain("times")),
)


def page(report: Mapping[str, Any], targets: Sequence[Row]) -> str:
    """The figures as Markdown."""
    machine, beside = report["machine"], report["beside_hostile_prompts"]
    versions = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    return (
        f"{machine['date']}, {machine['machine']}, Python {machine['python']}, {versions}; "
        f"{machine['cpus']} processors, load average before the run {machine['load']}. Loading the tokenizer with "
        f"all its proofs took {report['load_s']} s.\n\n"
        f"{table(TARGET_COLUMNS, targets)}\n{table(COLUMNS, report['rows'])}\n"
        f"Beside twenty prompts of a million equal characters each, {beside['hostile_counted']} of them counted in "
        f"time, a new prompt of 50 tokens took {beside['busy_p50_us']} µs of wall time, p99 "
        f"{beside['busy_p99_us']} µs; without them {beside['idle_p50_us']} and {beside['idle_p99_us']}.\n"
    )


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
    parser.add_argument("--publish", action="store_true", help=f"write the tables into {PAGE.name}")
    arguments = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    load = round(os.getloadavg()[0], 2)
    with TemporaryDirectory() as scratch:
        directory = arguments.tokenizer or qwen3_dir(Path(scratch))
        bench = Bench(directory, arguments.rounds)
        rows = [*bench.chats(), *bench.conversations(), *bench.documents()]
        bench.counter.close()
        report: dict[str, Any] = {
            "machine": {
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "machine": platform.machine(),
                "python": platform.python_version(),
                "cpus": os.cpu_count(),
                "load": load,
            },
            "packages": {
                name: metadata.version(name) for name in ("tokenizers", "tiktoken", "jinja2", "orjson")
            },
            "encoder": bench.model.encoder_name,
            "load_s": round(bench.load_s, 2),
            "rows": rows,
            "beside_hostile_prompts": asyncio.run(stalls(directory)),
        }
    report["targets"] = [target.row(report) for target in TARGETS]
    print(json.dumps(report, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1), "utf-8")
    text = page(report, report["targets"])
    if arguments.publish:
        write_marked(PAGE, "measured", text)
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
