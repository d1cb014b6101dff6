"""The service's log: one line per event, as JSON for machines or as text for people.

A line is made of parts that cannot hold a prompt or a credential, whatever the code around them does:

- the event, which is the constant text of the log call; arguments are never formatted into it,
- fields from `FIELDS`, each of a known type and length; others are left out, and named as left out,
- of an exception its type and the places it passed, never its text, because texts quote what failed,
- of foreign loggers the first line of their constant text.

Lines are formatted where they are logged and written by a thread: a reader that does not read holds nobody
up, and what does not fit is dropped and counted. One place in the code logs at most `BURST` lines in
`WINDOW_S`; what it is denied is counted on its next line.
"""

from __future__ import annotations

import datetime as dt
import logging
import logging.handlers
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal, TextIO

import orjson

from extproc.adapters.telemetry.export_queue import ExportQueue

SERVICE = "extproc"

FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "address": str,
    "check": str,
    "child": str,
    "code": (int, str),
    "detail": str,
    "duration_ms": int,
    "error": str,
    "event": str,
    "fallback": str,
    "fault": str,
    "held": int,
    "host": str,
    "input_tokens": int,
    "lane": str,
    "leases": int,
    "ledger": str,
    "level": str,
    "model": str,
    "observer": str,
    "open_streams": int,
    "page": str,
    "pause_ms": int,
    "policy_version": str,
    "pool": str,
    "port": int,
    "posture": str,
    "problem": str,
    "reason": str,
    "replica": str,
    "requests": int,
    "reservation": str,
    "retry_after_ms": int,
    "signal": str,
    "state": str,
    "tenant": str,
    "tokens": int,
    "trace_id": str,
    "used_input_tokens": int,
    "verb": str,
    "version": str,
    "worker": int,
    "workers": int,
}
"""All fields that a line may have. `error` is for faults in what an operator wrote, such as a policy file."""

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_USER_INFO = re.compile(r"://[^/@\s]*@")
"""Name and password in an address: an operator writes them into a store's URL, and no line repeats them."""

FIELD_CHARS = 300
EVENT_CHARS = 120
FRAMES = 8
BURST = 20
WINDOW_S = 10.0


class LineFormatter:
    """Makes a line of a record. Has the shape of `logging.Formatter`."""

    def __init__(self, *, as_json: bool, colour: bool = False) -> None:
        self._as_json = as_json
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        line = line_of(record)
        if self._as_json:
            return orjson.dumps(line).decode()
        return _console(line, colour=self._colour)


def line_of(record: logging.LogRecord) -> dict[str, object]:
    """The parts of a record that are fit to be written."""
    at = dt.datetime.fromtimestamp(record.created, dt.UTC)
    line: dict[str, object] = {
        "at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": _event(record),
    }
    unlisted = []
    for name, value in vars(record).items():
        if name in STANDARD:
            continue
        kind = FIELDS.get(name)
        if kind is not None and isinstance(value, kind):
            line[name] = _one_line(value, FIELD_CHARS) if isinstance(value, str) else value
        elif name == "suppressed":
            line[name] = value
        else:
            unlisted.append(name)
    if unlisted:
        line["unlisted"] = sorted(unlisted)
    if record.exc_info and record.exc_info[1] is not None:
        line["exception"] = [type(one).__name__ for one in _chain(record.exc_info[1])]
        line["frames"] = _frames(record.exc_info[2])
    return line


class Burst:
    """A logging filter that lets each place in the code say only so much at a time."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._places: dict[tuple[str, int], _Place] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Whether the record may be written; tells it how many before it were not."""
        now_s = self._now_s()
        place = self._places.setdefault((record.pathname, record.lineno), _Place(now_s))
        if now_s - place.since_s >= WINDOW_S:
            place.since_s, place.said = now_s, 0
        if place.said >= BURST:
            place.unsaid += 1
            return False
        place.said += 1
        if place.unsaid:
            record.suppressed = place.unsaid
            place.unsaid = 0
        return True


class _Place:
    __slots__ = ("said", "since_s", "unsaid")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.said = 0
        self.unsaid = 0


class Log:
    """The process's log from `install_log` to `close`."""

    def __init__(self, queue: ExportQueue[str], handler: logging.Handler) -> None:
        self._queue = queue
        self._handler = handler

    @property
    def dropped(self) -> int:
        """Lines that were not written because nobody read them in time."""
        return self._queue.dropped

    def close(self, within_s: float = 1.0) -> None:
        """Write what is left, and log no more."""
        logging.getLogger().removeHandler(self._handler)
        self._queue.close(within_s)


Style = Literal["auto", "json", "console"]
"""How lines look: `auto` is text on a terminal and JSON otherwise."""


def install_log(*, style: Style = "auto", level: str = "info", stream: TextIO | None = None) -> Log:
    """Send every logger's records to `stream` (standard error), ours from `level` and others' from warning."""
    stream = stream or sys.stderr
    on_terminal = stream.isatty()
    as_json = style == "json" or (style == "auto" and not on_terminal)

    def write(lines: Sequence[str]) -> bool:
        stream.write("".join(line + "\n" for line in lines))
        stream.flush()
        return True

    queue: ExportQueue[str] = ExportQueue(
        name="logs", export=write, cut=lambda: None, most_items=4_096, batch_items=256, delay_s=0.05
    )
    handler = logging.handlers.QueueHandler(_Lines(queue))  # type: ignore[arg-type]  # it needs no more of a queue
    handler.setFormatter(LineFormatter(as_json=as_json, colour=on_terminal))  # type: ignore[arg-type]  # see there
    handler.addFilter(Burst())
    root = logging.getLogger()
    for other in list(root.handlers):
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(SERVICE).setLevel(level.upper())
    return Log(queue, handler)


class _Lines:
    """The part of a queue that `QueueHandler` uses; records arrive with their line as message."""

    def __init__(self, lines: ExportQueue[str]) -> None:
        self._lines = lines

    def put_nowait(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())


def _event(record: logging.LogRecord) -> str:
    """The constant text of the call, without its arguments."""
    return _one_line(str(record.msg).partition("\n")[0], EVENT_CHARS)


def _one_line(text: str, most_chars: int) -> str:
    text = _USER_INFO.sub("://", text)
    cut = text if len(text) <= most_chars else text[: most_chars - 1] + "…"
    return "".join(char if char.isprintable() else " " for char in cut)


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and len(chain) < FRAMES and one not in chain:
        chain.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return chain


def _frames(trace: TracebackType | None) -> list[str]:
    frames: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        name = code.co_filename.rpartition("/")[2]
        frames.append(f"{name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return frames[-FRAMES:]


_COLOURS = {"debug": "\x1b[2m", "info": "\x1b[36m", "warning": "\x1b[33m", "error": "\x1b[31m"}


def _console(line: dict[str, object], *, colour: bool) -> str:
    level = str(line.pop("level"))
    at, logger, message = str(line.pop("at"))[11:23], line.pop("logger"), line.pop("message")
    shown = f"{_COLOURS.get(level, '')}{level:<7}\x1b[0m" if colour else f"{level:<7}"
    rest = "".join(f" {name}={_shown(value)}" for name, value in line.items())
    return f"{at} {shown} {message}{rest} ({logger})"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return orjson.dumps(text).decode() if " " in text or "=" in text or not text else text
