"""The log: what a line may hold, that it holds nobody up, and that nothing secret can get into it."""

from __future__ import annotations

import ast
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import extproc
from extproc.adapters.telemetry.logs import BURST, FIELDS, WINDOW_S, Burst, Log, install_log, line_of
from extproc.adapters.telemetry.refusal_log import QUIET_S, RefusalLog
from extproc.domain.outcome import Outcome, Reason
from tests.telemetry.facts import a_decision

SECRET = "sk-live-1234 the patient's name is"


class Written(io.StringIO):
    """A stream that a test reads; writing waits while it is blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()

    def write(self, text: str) -> int:
        self.free.wait()
        return super().write(text)


@pytest.fixture
def stream() -> Written:
    return Written()


@pytest.fixture
def logged(stream: Written) -> Iterator[Log]:
    """The process's log, as JSON, for one test."""
    root, ours = logging.getLogger(), logging.getLogger("extproc")
    before = (list(root.handlers), root.level, ours.level)
    log = install_log(style="json", level="info", stream=stream)
    yield log
    log.close()
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])


def _fail() -> None:
    try:
        dict[str, str]()[SECRET]
    except KeyError as error:
        raise ValueError(SECRET) from error


def lines(log: Log, stream: Written) -> list[dict[str, Any]]:
    log.close(5)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object(logged: Log, stream: Written) -> None:
    """Time, level, logger, message and the listed fields, on one line."""
    logging.getLogger("extproc.app").info("serving", extra={"address": "unix:/run/x", "port": 9902})
    (line,) = lines(logged, stream)

    assert line.pop("at").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "extproc.app",
        "message": "serving",
        "address": "unix:/run/x",
        "port": 9902,
    }


def test_nothing_but_listed_fields_and_constant_texts_is_written(logged: Log, stream: Written) -> None:
    """Arguments, unlisted fields, wrong types and the texts of exceptions cannot reach a line."""
    log = logging.getLogger("extproc.driver")
    log.warning("failed on %s", SECRET)
    log.warning("failed", extra={"prompt": SECRET, "port": SECRET, "tenant": {"key": SECRET}})
    try:
        _fail()
    except ValueError:
        log.exception("exchange failed")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", SECRET)
    written = lines(logged, stream)

    assert SECRET not in stream.getvalue()
    assert "sk-live" not in stream.getvalue()
    assert [line["message"] for line in written] == [
        "failed on %s",
        "failed",
        "exchange failed",
        "Task exception was never retrieved",
    ]
    assert written[1]["unlisted"] == ["port", "prompt", "tenant"]
    assert written[2]["exception"] == ["ValueError", "KeyError"]
    assert written[2]["frames"][-1].startswith("test_logs.py:")


def test_a_password_in_an_address_is_left_out(logged: Log, stream: Written) -> None:
    """An address that an operator wrote with name and password is logged without them."""
    log = logging.getLogger("extproc.app")
    log.info("connected", extra={"address": "rediss://admin:s3cr%40t@cache.internal:6380/0"})
    (line,) = lines(logged, stream)
    assert line["address"] == "rediss://cache.internal:6380/0"


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), st.text() | st.integers(), max_size=4))
def test_a_field_is_one_printable_line(fields: dict[str, Any]) -> None:
    """Whatever is in a field, the line stays one line and of bounded length."""
    record = logging.makeLogRecord({"name": "extproc", "msg": "event", "levelname": "INFO", **fields})
    for name, value in line_of(record).items():
        if isinstance(value, str):
            assert value.isprintable(), name
            assert len(value) <= 300


def test_every_log_call_of_the_service_is_constant_and_listed() -> None:
    """No call formats anything into its text, and every field that any call adds is a listed one."""
    checked = 0
    for path in Path(extproc.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("log", "logger")
                and node.func.attr in ("debug", "info", "warning", "error", "exception", "critical", "log")
            ):
                continue
            texts = node.args[1:] if node.func.attr == "log" else node.args
            where = f"{path.name}:{node.lineno}"
            assert len(texts) == 1, f"{where}: pass values as extra fields"
            assert isinstance(texts[0], ast.Constant), f"{where}: the text must be constant"
            checked += 1
            for keyword in node.keywords:
                if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
                    names = {key.value for key in keyword.value.keys if isinstance(key, ast.Constant)}
                    assert names <= set(FIELDS), f"{where}: {names - set(FIELDS)}"
    assert checked > 10


def test_a_reader_that_does_not_read_holds_nobody_up(logged: Log, stream: Written) -> None:
    """While the stream is blocked lines are dropped and counted; callers go on."""
    stream.free.clear()
    logs = [logging.getLogger(f"extproc.part{number}") for number in range(5_000)]
    for number, log in enumerate(logs):
        # Each from a place of its own, so that only the queue's bound is met.
        log.handle(log.makeRecord(log.name, logging.INFO, f"file{number}", number, "event", (), None))
    assert logged.dropped > 0
    stream.free.set()
    logged.close(5)
    assert len(stream.getvalue().splitlines()) + logged.dropped == 5_000


def test_one_place_says_only_so_much_at_a_time() -> None:
    """A fault in every request is a few lines in ten seconds, and the next line tells how many it was."""
    now_s = 0.0
    burst = Burst(lambda: now_s)

    def said() -> tuple[bool, Any]:
        record = logging.makeLogRecord({"pathname": "driver.py", "lineno": 86, "msg": "exchange failed"})
        return burst(record), getattr(record, "suppressed", None)

    assert [said() for _ in range(BURST + 480)].count((True, None)) == BURST
    now_s = WINDOW_S
    assert said() == (True, 480)
    assert said() == (True, None)


def test_refusals_are_logged_as_samples(caplog: pytest.LogCaptureFixture) -> None:
    """One line per reason and ten seconds, which tells how many requests it stands for; admissions none."""
    caplog.set_level(logging.INFO, logger="extproc.refusals")
    now_s = 100.0
    observer = RefusalLog(lambda: now_s)

    def refuse(reason: Reason, times: int = 1) -> None:
        for _ in range(times):
            observer.decided(a_decision(outcome=Outcome.REFUSED, reason=reason, retry_after_ms=500))

    observer.decided(a_decision())
    refuse(Reason.QUEUE_FULL, 50)
    refuse(Reason.TENANT_RATE)
    now_s += QUIET_S
    refuse(Reason.QUEUE_FULL)

    said = [(vars(record)["reason"], vars(record)["requests"]) for record in caplog.records]
    assert said == [("queue_full", 1), ("tenant_rate", 1), ("queue_full", 50)]


def test_a_redirect_is_logged_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """The line of a refusal that sends the client to another region names the region."""
    caplog.set_level(logging.INFO, logger="extproc.refusals")
    RefusalLog().decided(
        a_decision(outcome=Outcome.REFUSED, reason=Reason.QUEUE_FULL, fallback="region:https://eu.example")
    )
    (record,) = caplog.records
    assert line_of(record)["fallback"] == "region:https://eu.example"


def test_people_get_text(stream: Written) -> None:
    """On a console a line reads from left to right: when, how bad, what, and the facts."""
    root, ours = logging.getLogger(), logging.getLogger("extproc")
    before = (list(root.handlers), root.level, ours.level)
    try:
        log = install_log(style="console", stream=stream)
        logging.getLogger("extproc.app").warning("draining", extra={"open_streams": 3, "error": "a b"})
        log.close(5)
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])
    assert stream.getvalue()[13:] == 'warning draining open_streams=3 error="a b" (extproc.app)\n'
