"""What clients will send: streams of requests from traces or from laws, the same for every run compared.

Everything about a request is decided here, before any run: when it comes, its size, whose it is, and how its
client takes a refusal. So runs with different policies, or with none, see the very same clients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

from extproc.domain.policy import Lane
from extproc.sim.traces import TraceRow, read_trace

_US_PER_S = 1_000_000
_SPREADS = 1 << 30


class StreamInvalid(ValueError):
    """A stream is not understood. The message names the part, its value and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Arrivals at random: `rate_per_s` on average; `cv` 1 is a Poisson process, more of it comes in bursts.

    The times between arrivals are gamma distributed; `cv` is their coefficient of variation.
    """

    rate_per_s: float
    cv: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A number of tokens drawn evenly from `least` to `most`."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Clients of one kind.

    Arrivals come from `law`, or are those of `trace`, `rate` times as fast. Lengths are those of the trace's
    row; of a random row of `lengths`; or `input` and `output`. `limit_tokens` is the output limit that the
    clients declare (`None`: they declare none). Of `obey_permille` of them Retry-After is obeyed, the others
    come back as impatient libraries do. Each tries `attempts` times, and hangs up when its first token is not
    there within `timeout_s`, which it also declares as its deadline.
    """

    name: str
    tenants: tuple[tuple[str, int], ...]  # with their shares of the stream
    law: Law | None = None
    trace: Path | None = None
    rate: float = 1.0
    lengths: Path | None = None
    input: Span | None = None
    output: Span | None = None
    model: str | None = None
    lane: Lane | None = None
    limit_tokens: int | None = None
    from_s: float = 0.0
    until_s: float | None = None
    obey_permille: int = 900
    attempts: int = 3
    timeout_s: float | None = None
    repeat: bool = False  # the trace, once it has been played to its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as its client means it. `output_tokens` is what the engine will write.

    `spread` differs between requests, and stands for everything about this one that is left to chance.
    """

    index: int
    stream: str
    arrival_us: int
    tenant: str
    model: str | None
    declared_lane: Lane | None
    input_tokens: int
    output_tokens: int
    limit_tokens: int | None
    obeys: bool
    attempts: int
    timeout_us: int | None
    spread: int


def check_names(streams: Iterable[Stream]) -> None:
    """Names keep streams apart, in what is drawn for them and in reports. Raises StreamInvalid."""
    for one, other in pairwise(sorted(stream.name for stream in streams)):
        if one == other:
            raise StreamInvalid(f"two streams are called {one!r}; give one of them another name=")


def generate(streams: Iterable[Stream], *, seconds: float, seed: int) -> tuple[Request, ...]:
    """All requests of all streams within the first `seconds`, in order of arrival.

    The same seed gives the same requests, and a stream's do not depend on the streams beside it.

    Raises StreamInvalid, OSError and TraceUnreadable.
    """
    traces: dict[Path, tuple[TraceRow, ...]] = {}

    def rows_of(path: Path) -> tuple[TraceRow, ...]:
        if path not in traces:
            traces[path] = read_trace(path)
        return traces[path]

    found: list[tuple[int, int, Stream, random.Random, tuple[int, int]]] = []
    for position, stream in enumerate(streams):
        dice = random.Random(f"{seed}/{stream.name}")
        until_s = seconds if stream.until_s is None else min(seconds, stream.until_s)
        for at_us, sizes in _sizes(stream, until_s, rows_of, dice):
            found.append((at_us, position, stream, dice, sizes))
    found.sort(key=lambda one: one[:2])
    return tuple(
        _request(index, stream, dice, at_us, sizes)
        for index, (at_us, _, stream, dice, sizes) in enumerate(found)
    )


def _request(index: int, stream: Stream, dice: random.Random, at_us: int, sizes: tuple[int, int]) -> Request:
    input_tokens, output_tokens = sizes
    names = [name for name, _ in stream.tenants]
    limit = stream.limit_tokens
    return Request(
        index=index,
        stream=stream.name,
        arrival_us=at_us,
        tenant=dice.choices(names, weights=[share for _, share in stream.tenants])[0],
        model=stream.model,
        declared_lane=stream.lane,
        input_tokens=input_tokens,
        output_tokens=output_tokens if limit is None else min(output_tokens, limit),
        limit_tokens=limit,
        obeys=dice.randrange(1000) < stream.obey_permille,
        attempts=stream.attempts,
        timeout_us=None if stream.timeout_s is None else round(stream.timeout_s * _US_PER_S),
        spread=dice.randrange(_SPREADS),
    )


def _sizes(
    stream: Stream, until_s: float, rows_of: Callable[[Path], tuple[TraceRow, ...]], dice: random.Random
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Arrival, and input and output tokens, of each request of one stream."""
    until_us, from_us = round(until_s * _US_PER_S), round(stream.from_s * _US_PER_S)
    lengths = rows_of(stream.lengths) if stream.lengths is not None else None

    def drawn(row: TraceRow | None) -> tuple[int, int]:
        if lengths is not None:
            row = dice.choice(lengths)
        input_tokens = _draw(stream.input, dice) if stream.input is not None else None
        output_tokens = _draw(stream.output, dice) if stream.output is not None else None
        if row is not None:
            input_tokens = input_tokens or row.input_tokens
            output_tokens = output_tokens or row.output_tokens
        if input_tokens is None or output_tokens is None:
            raise StreamInvalid(
                f"stream {stream.name}: a law says when requests come, not how long they are; "
                "add lengths=FILE, or input=TOKENS and output=TOKENS"
            )
        return input_tokens, output_tokens

    if stream.trace is not None:
        rows = rows_of(stream.trace)
        # Played again, the trace begins as long after its last arrival as its arrivals are apart on average.
        round_us = max(1, rows[-1].at_us * len(rows) // max(1, len(rows) - 1))
        for played in count():
            for row in rows:
                at_us = from_us + round((played * round_us + row.at_us) / stream.rate)
                if at_us >= until_us:
                    return
                yield at_us, drawn(row)
            if not stream.repeat:
                return
    elif stream.law is not None:
        shape = 1 / stream.law.cv**2
        scale_us = _US_PER_S / (stream.law.rate_per_s * stream.rate * shape)
        at = from_us + dice.gammavariate(shape, scale_us)
        while at < until_us:
            yield int(at), drawn(None)
            at += dice.gammavariate(shape, scale_us)
    else:
        raise StreamInvalid(f"stream {stream.name}: it has neither a trace nor a law")


def _draw(span: Span, dice: random.Random) -> int:
    return dice.randint(span.least, span.most)
