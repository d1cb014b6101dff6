"""The benchmark's own arithmetic: what it reads from its tools, and that gaps stay visible in its tables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.bench.peers import litellm, table
from tests.bench.peers.client import encode, hang_up, read_wrk, two_bursts
from tests.bench.peers.measures import deviation, refusal
from tests.bench.peers.peer import Reply, Running, process_tree, read_metrics, tree_cpu_s
from tests.bench.peers.prompts import chat
from tests.bench.peers.upstream import running_upstream
from tests.support.marked import write_marked

COST = {"per_core_s": 500.0, "added_p50_ms": 1.0, "added_p95_ms": 2.0, "others_cores": 0.1}
FIGURES: dict[str, Any] = {
    "about": {
        "date": "2026-11-30",
        "command": "python -m tests.bench.peers --rounds 2 --seconds 5",
        "machine": "2 cores",
        "python": "3.11",
        "client": "wrk",
        "load_average_before": 0.1,
    },
    "peers": {
        "extproc": {
            "version": "this tree",
            "setting": "tokens",
            "costs": {
                "rounds": [
                    COST | {"per_core_s": 900.0, "cpu_us": {"envoy": 100, "service": 1000}},
                    {"not_measured": "of 9 requests 9 refused"},
                    COST | {"per_core_s": 1000.0, "cpu_us": {"envoy": 100, "service": 800}},
                ]
            },
            "peak_mb": 380,
            "inflight": {
                "let_in": 8,
                "let_in_of_second": 0,
                "most_open": 8,
                "refusal": {"status": 429, "headers": {"retry-after": "1"}, "body": "a | b `c`"},
            },
        },
        "litellm": {
            "version": "1.0",
            "setting": "keys",
            "costs": {
                "rounds": [
                    COST | {"per_core_s": per_core, "cpu_us": {"proxy": 1}} for per_core in (30, 1, 25)
                ]
            },
        },
        "gone": {"version": {"not_measured": "does not install here: no such package"}, "setting": "none"},
    },
}


def test_ratios_are_of_the_same_round_and_leave_gaps_out() -> None:
    """900 / 30 and 1000 / 25; the round in which one failed says nothing about the ratio."""
    peers = FIGURES["peers"]
    assert table.ratios(peers["extproc"], peers["litellm"]) == [30.0, 40.0]
    assert "measured 35.0 (30.0 to 40.0): **met**" in table.verdict(peers)
    assert "not measured in this run" in table.verdict({"extproc": peers["extproc"]})


def test_the_page_shows_what_is_missing_and_why() -> None:
    """A gap in a table has its reason in another, and cells cannot break out of theirs."""
    page = table.page(FIGURES)
    assert "by `python -m tests.bench.peers --rounds 2 --seconds 5` on a machine of 2 cores" in page
    assert "other work took 0.1 (0.1 to 0.1) cores" in page
    assert "| gone | version | does not install here: no such package |" in page
    assert "| extproc | cost, round 2 | of 9 requests 9 refused |" in page
    assert "| extproc | in flight | 429 | `retry-after: 1` | `a \\| b 'c'` |" in page
    assert "| extproc | 8 | 0 | 8 | - | - |" in page
    widths = {
        line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("| extproc | 8")
    }
    assert widths == {7}


def test_figures_replace_only_what_is_between_the_marks(tmp_path: Path) -> None:
    """And a README without marks is an error, not a README without figures."""
    begin, end = (
        "<!-- figures:begin (written by python -m tests.bench.peers --readme; do not edit) -->",
        "<!-- figures:end -->",
    )
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_marked(readme, "figures", "new\n")
    assert readme.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="no place for figures"):
        write_marked(readme, "figures", "new\n")
    assert begin in Path(__file__).with_name("README.md").read_text()


def test_wrk_and_prometheus_are_read_as_they_write() -> None:
    """The last line of the script, and samples added up over labels."""
    said = 'Running 2s test\n\n{"requests": 90, "refused": 30, "broken": 1, "microseconds": 2000000, "p50_us": 5}\n'
    loaded = read_wrk(said)
    assert (loaded.answered, loaded.broken, loaded.seconds) == (60, 1, 2.0)
    page = '# TYPE a gauge\na{x="1"} 2\na{x="2"} 3.0\nab 9\n'
    assert read_metrics(page, "a", "b") == {"a": 5.0, "b": 0.0}


def test_a_refusal_inside_a_200_is_a_refusal() -> None:
    """As vLLM gives it to those who stream."""
    inside = Reply(status=200, headers={}, body=b'data: {"error": {"code": 503}}')
    served = Reply(status=200, headers={}, body=b"data: {}")
    assert [reply.admitted for reply in (inside, served)] == [False, True]
    assert refusal([served, inside])["status"] == 200
    assert refusal([served]) == {"status": None}


def test_counts_are_compared_with_the_truth() -> None:
    """One equal, one half, one not counted."""
    rows: list[dict[str, Any]] = [
        {"counted": 10, "true": 10},
        {"counted": 5, "true": 10},
        {"counted": None, "true": 10},
    ]
    found = deviation(rows)
    assert (found["requests"], found["equal"], found["least_ratio"], found["sum_ratio"]) == (2, 1, 0.5, 0.75)
    headers = {"x-ratelimit-api_key-limit-tokens": "1000", "x-ratelimit-api_key-remaining-tokens": "880"}
    assert litellm.counted(Reply(status=200, headers=headers, body=b""), {"max_tokens": 100}) == 20
    assert litellm.counted(Reply(status=200, headers={}, body=b""), {"max_tokens": 100}) is None


def test_a_process_tree_costs_what_its_children_cost() -> None:
    """A shell that waits for a busy child has used the child's time."""
    busy = (
        "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    )
    process = subprocess.Popen(["sh", "-c", f"{sys.executable} -c '{busy}'; true"], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while tree_cpu_s(process.pid) < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(process_tree(process.pid)) == 2
    finally:
        os.killpg(process.pid, 9)
        process.wait()


async def test_the_upstream_knows_what_is_open_in_it() -> None:
    """Held answers are open together, and streams that clients leave are cut off."""
    with running_upstream(prompt_tokens=3, output_tokens=2) as upstream:
        peer = Running(url=upstream.url, parts={})
        first, second = await two_bursts(peer, "x", [encode(chat("[hold 300]"))] * 5, pause_s=0.1)
        assert all(b'"prompt_tokens": 3' in reply.body for reply in first + second)
        stats = upstream.stats()
        assert (stats["open"], stats["finished"], stats["cut_off"]) == (0, 10, 0)
        upstream.reset()
        assert await hang_up(peer, "x", encode(chat("[drip]", stream=True)), 20) == (20, 0)
        deadline = time.monotonic() + 30
        while upstream.stats() != {"open": 0, "peak": 20, "finished": 0, "cut_off": 20}:
            assert time.monotonic() < deadline, upstream.stats()
            time.sleep(0.05)
