"""Streams as people write them on a command line: `SOURCE,key=value,...`.

data/conversations.csv.gz,tenant=acme,lane=interactive,rate=2,limit=1000
poisson:4,lengths=data/documents.jsonl.gz,tenant=crawler:3+reports,lane=bulk,from=60,until=600
gamma:4:3,input=100-2000,output=50-400,tenant=acme,obey=0,attempts=5,timeout=60
"""

from __future__ import annotations

from pathlib import Path

from extproc.domain.policy import Lane
from extproc.sim.workload import Law, Span, Stream, StreamInvalid


def parse_stream(text: str, *, is_law: bool) -> Stream:
    """A stream from `SOURCE,key=value,...`, where SOURCE is a trace file, or a law.

    Laws are `poisson:RATE` and `gamma:RATE:CV`, with RATE in requests per second. Raises StreamInvalid.
    """
    source, *pairs = text.split(",")
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals or not value or key not in _KEYS:
            raise StreamInvalid(f"{pair!r} in {text!r}: write key=value with one of {', '.join(_KEYS)}")
        if key in values:
            raise StreamInvalid(f"{key} is given twice in {text!r}; once is enough")
        values[key] = value.strip()
    trace = None if is_law else Path(source)
    return Stream(
        name=values.get("name") or (source if trace is None else trace.name.split(".")[0]),
        tenants=_tenants(values.get("tenant", "")),
        law=_law(source) if is_law else None,
        trace=trace,
        rate=_number("rate", values.get("rate", "1")),
        lengths=Path(values["lengths"]) if "lengths" in values else None,
        input=_span("input", values.get("input")),
        output=_span("output", values.get("output")),
        model=values.get("model"),
        lane=_lane(values.get("lane")),
        limit_tokens=_whole("limit", values["limit"], least=1) if "limit" in values else None,
        from_s=_number("from", values.get("from", "0"), zero=True),
        until_s=_number("until", values["until"]) if "until" in values else None,
        obey_permille=_whole("obey", values.get("obey", "900"), least=0, most=1000),
        attempts=_whole("attempts", values.get("attempts", "3"), least=1, most=1000),
        timeout_s=_number("timeout", values["timeout"]) if "timeout" in values else None,
        repeat=_yes("repeat", values.get("repeat", "no")),
    )


_KEYS = (
    "tenant",
    "lane",
    "model",
    "rate",
    "lengths",
    "input",
    "output",
    "limit",
    "from",
    "until",
    "obey",
    "attempts",
    "timeout",
    "repeat",
    "name",
)


def _law(source: str) -> Law:
    kind, *numbers = source.split(":")
    if kind == "poisson" and len(numbers) == 1:
        return Law(rate_per_s=_number("rate", numbers[0]))
    if kind == "gamma" and len(numbers) == 2:
        return Law(rate_per_s=_number("rate", numbers[0]), cv=_number("cv", numbers[1]))
    raise StreamInvalid(f"the law {source!r} is not known; write poisson:RATE or gamma:RATE:CV")


def _tenants(text: str) -> tuple[tuple[str, int], ...]:
    tenants: list[tuple[str, int]] = []
    for part in text.split("+"):
        name, colon, share = part.partition(":")
        if not name:
            raise StreamInvalid("tenant is missing; write tenant=NAME, or NAME:SHARE+NAME:SHARE")
        tenants.append((name, _whole("tenant", share, least=1) if colon else 1))
    return tuple(tenants)


def _lane(text: str | None) -> Lane | None:
    if text is None:
        return None
    try:
        return Lane(text)
    except ValueError:
        raise StreamInvalid(f"lane is {text!r}; it must be one of {', '.join(Lane)}") from None


def _yes(key: str, text: str) -> bool:
    if text not in {"yes", "no"}:
        raise StreamInvalid(f"{key} is {text!r}; it must be yes or no")
    return text == "yes"


def _span(key: str, text: str | None) -> Span | None:
    if text is None:
        return None
    least, dash, most = text.partition("-")
    span = Span(
        least=_whole(key, least, least=1),
        most=_whole(key, most if dash else least, least=1),
    )
    if span.least > span.most:
        raise StreamInvalid(f"{key} is {text!r}; the smaller number comes first")
    return span


def _whole(key: str, text: str, *, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise StreamInvalid(f"{key} is {text!r}; it must be a whole number") from None
    if value < least or (most is not None and value > most):
        raise StreamInvalid(
            f"{key} is {value}; it must be at least {least}" + (f", at most {most}" if most else "")
        )
    return value


def _number(key: str, text: str, *, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        raise StreamInvalid(f"{key} is {text!r}; it must be a number") from None
    if not 0 <= value < float("inf") or (value == 0 and not zero):
        raise StreamInvalid(f"{key} is {text}; it must be {'0 or more' if zero else 'above 0'}")
    return value
