"""What clients will send: traces are read as they are, laws have the rate they say, and a seed is a seed."""

from __future__ import annotations

import gzip
import random
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from extproc.domain.policy import Lane
from extproc.sim.stream_text import parse_stream
from extproc.sim.traces import TraceRow, TraceUnreadable, read_trace
from extproc.sim.workload import Law, Request, Span, Stream, StreamInvalid, check_names, generate

TRACES = Path(__file__).parent.parent / "data" / "traces"
AZURE = TRACES / "azure_llm_2023_conv.csv.gz"
MOONCAKE = TRACES / "mooncake_fast25_conversation.jsonl.gz"


def a_stream(**changes: object) -> Stream:
    """One request a second on average, of 100 and 10 tokens."""
    fields: dict[str, object] = {
        "name": "s",
        "tenants": (("acme", 1),),
        "law": Law(rate_per_s=1.0),
        "input": Span(least=100, most=100),
        "output": Span(least=10, most=10),
    }
    return Stream(**(fields | changes))  # type: ignore[arg-type]


def a_trace(folder: Path, *rows: tuple[int, int, int]) -> Path:
    """A trace file with these arrivals (ms), inputs and outputs."""
    path = folder / "trace.csv"
    lines = ["arrival_ms,input_tokens,output_tokens", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_conversation_trace_is_read_as_published() -> None:
    """19,366 requests in 58 minutes, with the medians that its description gives."""
    rows = read_trace(AZURE)
    assert len(rows) == 19_366
    assert rows[0] == TraceRow(at_us=0, input_tokens=374, output_tokens=44)
    assert rows[1].at_us == 4_314_579  # 18:15:46.680590 to 18:15:50.995169
    assert sorted(row.input_tokens for row in rows)[len(rows) // 2] == 1_020
    assert sorted(row.output_tokens for row in rows)[len(rows) // 2] == 129
    assert 58 * 60 < rows[-1].at_us / 1e6 < 59 * 60


def test_the_document_trace_is_read_as_published() -> None:
    """JSON lines with times in milliseconds; its first request is as published."""
    rows = read_trace(MOONCAKE)
    assert len(rows) == 4_000
    assert rows[0] == TraceRow(at_us=0, input_tokens=6_758, output_tokens=500)
    assert rows[-1].at_us == 1_301_999_000


def test_plain_and_compressed_are_the_same(tmp_path: Path) -> None:
    """Whether a file is compressed is seen from its content, not from its name."""
    plain = a_trace(tmp_path, (0, 5, 6), (1_500, 7, 8))
    packed = tmp_path / "packed.csv"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    expected = (
        TraceRow(at_us=0, input_tokens=5, output_tokens=6),
        TraceRow(at_us=1_500_000, input_tokens=7, output_tokens=8),
    )
    assert read_trace(plain) == read_trace(packed) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", "columns a, b"),
        ("", "no requests"),
        ("arrival_ms,input_tokens,output_tokens\n0,x,1\n", "line 2"),
        ("arrival_ms,input_tokens,output_tokens\n0,1,1\n\n5,1\n", "line 4"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\nnonsense\n', "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_by_place(tmp_path: Path, text: str, named: str) -> None:
    """A file that is no trace, or has a bad line, is refused with the place that is wrong."""
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(TraceUnreadable, match=named):
        read_trace(path)


def test_a_rate_makes_a_trace_faster_and_leaves_its_sizes(tmp_path: Path) -> None:
    """At twice the rate every arrival comes at half its time; requests beyond the end are left out."""
    trace = a_trace(tmp_path, (0, 1, 2), (4_000, 3, 4), (30_000, 5, 6))
    requests = generate(
        [a_stream(law=None, trace=trace, rate=2.0, input=None, output=None)], seconds=10, seed=1
    )
    assert [(one.arrival_us, one.input_tokens, one.output_tokens) for one in requests] == [
        (0, 1, 2),
        (2_000_000, 3, 4),
    ]


def test_a_trace_is_played_again_only_if_asked(tmp_path: Path) -> None:
    """Repeated, it goes on at its own mean rate."""
    trace = a_trace(tmp_path, (0, 1, 1), (1_000, 2, 2), (2_000, 3, 3))
    once = a_stream(law=None, trace=trace, input=None, output=None)
    assert len(generate([once], seconds=9, seed=1)) == 3
    again = a_stream(law=None, trace=trace, input=None, output=None, repeat=True)
    arrivals = [one.arrival_us for one in generate([again], seconds=9, seed=1)]
    assert arrivals == [second * 1_000_000 for second in range(9)]


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_laws_have_the_rate_and_the_burstiness_that_they_say(cv: float) -> None:
    """Mean and coefficient of variation of the times between 20,000 arrivals are within 5 % of the law's."""
    stream = a_stream(law=Law(rate_per_s=50.0, cv=cv))
    arrivals = [one.arrival_us for one in generate([stream], seconds=400, seed=3)]
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert mean(gaps) == pytest.approx(20_000, rel=0.05)
    assert stdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.05)


def test_the_same_seed_gives_the_same_requests_whatever_is_beside_them() -> None:
    """A stream's requests depend on the seed and its name, not on other streams."""
    stream = a_stream(input=Span(least=1, most=10_000), tenants=(("a", 3), ("b", 1)), obey_permille=500)

    def own(requests: tuple[Request, ...]) -> list[tuple[int, str, int, bool, int]]:
        return [
            (one.arrival_us, one.tenant, one.input_tokens, one.obeys, one.spread)
            for one in requests
            if one.stream == "s"
        ]

    alone = own(generate([stream], seconds=100, seed=5))
    mixed = own(generate([a_stream(name="other"), stream], seconds=100, seed=5))
    assert len(alone) > 50
    assert alone == mixed
    assert alone != own(generate([stream], seconds=100, seed=6))


def test_streams_are_mixed_in_order_and_within_their_times() -> None:
    """Arrivals of all streams are sorted, indexed in order, and lie between from and until."""
    early, late = a_stream(name="early", until_s=30), a_stream(name="late", from_s=20)
    requests = generate([early, late], seconds=60, seed=1)
    assert [one.index for one in requests] == list(range(len(requests)))
    assert [one.arrival_us for one in requests] == sorted(one.arrival_us for one in requests)
    assert max(one.arrival_us for one in requests if one.stream == "early") < 30_000_000
    assert min(one.arrival_us for one in requests if one.stream == "late") >= 20_000_000
    assert {one.stream for one in requests} == {"early", "late"}


def test_tenants_and_obedience_come_in_their_shares() -> None:
    """Of 4,000 requests, 3 in 4 are the tenant's that has 3 shares, and 9 in 10 obey."""
    stream = a_stream(law=Law(rate_per_s=40.0), tenants=(("a", 3), ("b", 1)), obey_permille=900)
    requests = generate([stream], seconds=100, seed=2)
    assert sum(one.tenant == "a" for one in requests) / len(requests) == pytest.approx(0.75, abs=0.03)
    assert sum(one.obeys for one in requests) / len(requests) == pytest.approx(0.9, abs=0.02)


def test_a_limit_cuts_what_the_engine_writes() -> None:
    """Nobody is written more than the client's own limit."""
    stream = a_stream(output=Span(least=1, most=500), limit_tokens=100)
    outputs = [one.output_tokens for one in generate([stream], seconds=200, seed=1)]
    assert max(outputs) == 100
    assert min(outputs) < 100


def test_lengths_are_drawn_from_a_trace(tmp_path: Path) -> None:
    """A law with `lengths` has the sizes of that trace's rows, input and output together."""
    lengths = a_trace(tmp_path, (0, 11, 1), (0, 22, 2))
    stream = a_stream(input=None, output=None, lengths=lengths)
    found = {(one.input_tokens, one.output_tokens) for one in generate([stream], seconds=60, seed=1)}
    assert found == {(11, 1), (22, 2)}


def test_a_law_without_lengths_is_refused() -> None:
    """A law says when, not how long."""
    with pytest.raises(StreamInvalid, match="lengths=FILE"):
        generate([a_stream(output=None)], seconds=60, seed=1)


def test_a_written_stream_is_read_in_full() -> None:
    """Every key ends up where it belongs."""
    stream = parse_stream(
        "gamma:4:2.5,tenant=a:3+b,lane=bulk,model=m,rate=2,lengths=x.csv,input=5-9,output=7,limit=50,"
        "from=10,until=20,obey=0,attempts=6,timeout=1.5,repeat=yes,name=flood",
        is_law=True,
    )
    assert stream == Stream(
        name="flood",
        tenants=(("a", 3), ("b", 1)),
        law=Law(rate_per_s=4.0, cv=2.5),
        rate=2.0,
        lengths=Path("x.csv"),
        input=Span(least=5, most=9),
        output=Span(least=7, most=7),
        model="m",
        lane=Lane.BULK,
        limit_tokens=50,
        from_s=10.0,
        until_s=20.0,
        obey_permille=0,
        attempts=6,
        timeout_s=1.5,
        repeat=True,
    )
    assert parse_stream("data/x.csv.gz,tenant=a", is_law=False).name == "x"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("poisson:4", "tenant"),
        ("poisson:0,tenant=a", "rate is 0"),
        ("poisson:nan,tenant=a", "rate is nan"),
        ("weibull:1,tenant=a", "weibull:1"),
        ("poisson:4,tenant=a,colour=red", "colour=red"),
        ("poisson:4,tenant=a,lane", "'lane'"),
        ("poisson:4,tenant=a,lane=fast", "lane is 'fast'"),
        ("poisson:4,tenant=a,tenant=b", "tenant is given twice"),
        ("poisson:4,tenant=a:0", "tenant is 0"),
        ("poisson:4,tenant=a,input=9-5", "input is '9-5'"),
        ("poisson:4,tenant=a,obey=1001", "obey is 1001"),
        ("poisson:4,tenant=a,from=-1", "from is -1"),
        ("poisson:4,tenant=a,repeat=maybe", "repeat is 'maybe'"),
        ("poisson:4,tenant=a,attempts=1.5", "attempts is '1.5'"),
    ],
)
def test_a_stream_that_is_not_understood_is_refused_by_name(text: str, named: str) -> None:
    """The message names the part and its value."""
    with pytest.raises(StreamInvalid, match=named):
        parse_stream(text, is_law=True)


def test_two_streams_of_one_name_are_refused() -> None:
    """Names decide what is drawn, so they must differ."""
    with pytest.raises(StreamInvalid, match="'s'"):
        check_names([a_stream(), a_stream(name="t"), a_stream()])


def test_drawing_does_not_touch_the_shared_dice() -> None:
    """A simulation leaves the process's random numbers alone."""
    random.seed(1)
    before = random.getstate()
    generate([a_stream()], seconds=60, seed=1)
    assert random.getstate() == before
