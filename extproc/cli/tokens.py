"""`extproc tokens`: how many tokens does a request have, and does the engine say the same?"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from extproc.domain.policy import Engine

if TYPE_CHECKING:
    from concurrent.futures import Future

    from extproc.cli.tokens_counting import Counting, Read, Tally
    from extproc.cli.tokens_source import SourceRequest
    from extproc.cli.tokens_view import Compared

    Ask = Callable[[SourceRequest, Read], int]

TOLD_EVERY_S = 10.0
"""How often a long run says on standard error how far it is, where there is no terminal for a bar."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="tokens")(tokens)


def tokens(
    file: Annotated[
        Path, typer.Argument(help="A request's body, or one per line (.jsonl); - for standard input.")
    ],
    policy: Annotated[
        Path | None, typer.Option(help="Policy file: its models, limits and tokenizers.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Count for this tokenizer instead: a tokenizer.json or its folder.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="With --tokenizer: a Jinja file instead of the one beside it.")
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(help="With --tokenizer: the program whose counts these are; a policy says it itself."),
    ] = Engine.VLLM,
    model: Annotated[str | None, typer.Option(help="The model of requests that name none.")] = None,
    path: Annotated[str, typer.Option(help="The requests' path.")] = "/v1/chat/completions",
    lines: Annotated[
        bool, typer.Option("--lines", help="A request per line, whatever the file's name.")
    ] = False,
    against: Annotated[
        str | None, typer.Option(help="Compare with the engine at this URL, by its /tokenize.", metavar="URL")
    ] = None,
    usage: Annotated[
        bool,
        typer.Option("--usage", help="With --against: by the usage of a real answer of one token instead."),
    ] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(help="With --against: a header for the engine, NAME=VALUE; may be repeated."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="With --against: requests at a time.")] = 4,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="With --against: seconds to wait for an answer.")
    ] = 60.0,
    bench: Annotated[
        bool, typer.Option("--bench", help="Say what counting costs, beside encoding the whole text.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object per request, then one with the summary.")
    ] = False,
) -> None:
    """Count the input tokens of requests offline, exactly as the service does, without a service.

    Exit code 0: every request is counted and, with --against, the engine says the same. 1: not so.
    2: the command cannot be carried out. What is printed never quotes a prompt.
    """
    from extproc.adapters.policy_file import PolicyError
    from extproc.adapters.tokens.errors import TokenizerUnusable
    from extproc.cli.tokens_engines import NoAnswer

    if (policy is None) == (tokenizer is None):
        raise typer.BadParameter("name one of --policy and --tokenizer", param_hint="--policy")
    if chat_template is not None and tokenizer is None:
        raise typer.BadParameter(
            "belongs to --tokenizer; a policy names its own", param_hint="--chat-template"
        )
    if engine is not Engine.VLLM and tokenizer is None:
        raise typer.BadParameter(
            "belongs to --tokenizer; a policy says it for each model", param_hint="--engine"
        )
    if usage and against is None:
        raise typer.BadParameter("needs --against", param_hint="--usage")
    if bench and against is not None:
        raise typer.BadParameter("measures this counter only; leave --against out", param_hint="--bench")
    headers = _headers(header or ())
    try:
        ask = None if against is None else _asking(against, usage=usage, headers=headers, timeout_s=timeout)
        with _opened(file) as opened:
            counting = _counting(policy, tokenizer, chat_template, engine, model)
            try:
                good = _run(
                    counting,
                    _sources(opened, file, lines=lines, path=path),
                    ask=ask,
                    concurrency=concurrency,
                    bench=bench,
                    as_json=as_json,
                )
            finally:
                counting.close()
    except (PolicyError, TokenizerUnusable, NoAnswer, OSError) as error:
        typer.echo(f"extproc: {error}", err=True)
        raise typer.Exit(code=2) from None
    raise typer.Exit(code=0 if good else 1)


def _headers(given: list[str] | tuple[()]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in given:
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            # The line may be a credential: it is not repeated.
            raise typer.BadParameter("must be NAME=VALUE", param_hint="--header")
        headers[name.strip().lower()] = value
    return headers


def _asking(url: str, *, usage: bool, headers: dict[str, str], timeout_s: float) -> Ask:
    """How the engine is asked. Raises `NoAnswer`."""
    from extproc.cli.tokens_engines import Engine

    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter("must be a URL such as http://127.0.0.1:8000", param_hint="--against")
    engine = Engine(url, headers=headers, timeout_s=timeout_s)
    return engine.used if usage else engine.tokenized(engine.kind())


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    if str(file) == "-":
        yield sys.stdin.buffer
        return
    with file.open("rb") as opened:
        yield opened


def _counting(
    policy: Path | None,
    tokenizer: Path | None,
    chat_template: Path | None,
    engine: Engine,
    model: str | None,
) -> Counting:
    """What counts. Takes seconds. Raises `PolicyError` and `TokenizerUnusable`."""
    from extproc.adapters.policy_file import load_policy
    from extproc.adapters.tokens.load import load_tokens
    from extproc.app import Tokenizers
    from extproc.cli.tokens_counting import ALONE, Counting

    if policy is not None:
        loaded = load_policy(policy)
        return Counting(Tokenizers().load(loaded), policy=loaded, model=model)
    assert tokenizer is not None
    tokens = load_tokens(tokenizer, chat_template, engine=engine)
    return Counting({ALONE: tokens}, policy=None, model=model)


def _sources(opened: BinaryIO, file: Path, *, lines: bool, path: str) -> Iterator[SourceRequest]:
    from extproc.cli.tokens_source import LINES_SUFFIXES, requests_of

    size_bytes = file.stat().st_size if file.is_file() else None
    lines = lines or file.suffix.lower() in LINES_SUFFIXES
    sources = requests_of(opened, lines=lines, path=path)
    return _told(sources, size_bytes) if lines else sources


def _told(sources: Iterator[SourceRequest], size_bytes: int | None) -> Iterator[SourceRequest]:
    """The same requests, while standard error says how far they are."""
    import time

    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("counting", total=size_bytes)
            for source in sources:
                yield source
                progress.advance(task, source.read_bytes)
        return
    due_s = time.monotonic() + TOLD_EVERY_S
    done_bytes = 0
    for done, source in enumerate(sources, start=1):
        yield source
        done_bytes += source.read_bytes
        if time.monotonic() >= due_s:
            of = "" if size_bytes is None else f" ({done_bytes * 100 // max(size_bytes, 1)} %)"
            typer.echo(f"extproc: {done} requests counted{of}", err=True)
            due_s = time.monotonic() + TOLD_EVERY_S


def _run(
    counting: Counting,
    sources: Iterator[SourceRequest],
    *,
    ask: Ask | None,
    concurrency: int,
    bench: bool,
    as_json: bool,
) -> bool:
    """Count, compare or measure, and print. Is everything as it should be?"""
    import orjson

    from extproc.cli import tokens_view

    if bench:
        from extproc.cli import tokens_bench

        figures = tokens_bench.bench(counting, sources)
        if as_json:
            for row in figures.as_rows():
                typer.echo(orjson.dumps(row).decode())
        else:
            tokens_view.show_bench(figures)
        return figures.requests > 0 and not figures.unequal
    summary = tokens_view.Summary()
    for compared in _compared(counting, sources, ask, concurrency):
        summary.add(compared)
        if as_json:
            typer.echo(orjson.dumps(compared.as_values()).decode())
    if as_json:
        typer.echo(orjson.dumps(summary.as_values()).decode())
    else:
        tokens_view.show(summary, compared=ask is not None)
    return summary.is_good


def _compared(
    counting: Counting, sources: Iterator[SourceRequest], ask: Ask | None, concurrency: int
) -> Iterator[Compared]:
    """Every request in its order; the engine is asked about a few at a time."""
    from concurrent.futures import ThreadPoolExecutor

    from extproc.cli.tokens_view import Compared

    if ask is None:
        for source in sources:
            yield Compared(tally=counting.tally(source)[0])
        return
    with ThreadPoolExecutor(concurrency) as threads:
        waiting: deque[tuple[Tally, Future[int] | None]] = deque()
        for source in sources:
            tally, read = counting.tally(source)
            asked = None if read is None or tally.problem is not None else threads.submit(ask, source, read)
            waiting.append((tally, asked))
            if len(waiting) > 2 * concurrency:
                yield _answered(*waiting.popleft())
        while waiting:
            yield _answered(*waiting.popleft())


def _answered(tally: Tally, asked: Future[int] | None) -> Compared:
    from extproc.cli.tokens_engines import NoAnswer
    from extproc.cli.tokens_view import Compared

    if asked is None:
        return Compared(tally=tally)
    try:
        return Compared(tally=tally, engine_tokens=asked.result())
    except NoAnswer as none:
        return Compared(tally=tally, trouble=str(none))
