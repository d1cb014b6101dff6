"""The bench of counting measures what it says, and judges it. Nothing here is about speed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.bench import tokens_bench
from tests.bench.tokens_bench import FROM_BYTES, LIFE, TARGETS, Bench, page
from tests.support.train_tokenizer import TOKENIZER_DIR


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(TOKENIZER_DIR, rounds=2)


def test_both_ways_agree_on_every_chat(bench: Bench) -> None:
    """Chats are counted, by both ways alike, and cost both something."""
    rows = {row["what"]: row for row in bench.chats()}
    assert FROM_BYTES in rows
    for row in rows.values():
        assert 0 < row["ours_best_us"] <= row["ours_us"]
        assert row["times"] == pytest.approx(row["plain_us"] / row["ours_us"], abs=0.06)


def test_a_conversations_life_grows_to_its_length(bench: Bench) -> None:
    """Each request holds the one before it; the last is as long as it should be, and no two lives are the same."""
    life, another = bench.life(), bench.life()
    assert len(life) == tokens_bench.LIFE_TURNS
    for before, after in pairwise(life):
        assert after.messages[: len(before.messages)] == before.messages
        assert len(after.messages) == len(before.messages) + 2
    assert 0.9 < bench.plain_chat(life[-1]) / tokens_bench.LIFE_TOKENS < 1.2
    assert not {message["content"] for message in life[-1].messages} & {
        message["content"] for message in another[-1].messages
    }


def test_targets_are_judged_and_told() -> None:
    """What is met, what is missed and what was not measured stand in the page."""
    report: dict[str, Any] = {
        "machine": {"date": "2026-01-01", "machine": "m", "python": "3", "cpus": 2, "load": 0.1},
        "packages": {"tiktoken": "1"},
        "load_s": 1.0,
        "rows": [
            {
                "what": what,
                "tokens": 1,
                "plain_us": 100.0,
                "ours_us": ours_us,
                "ours_best_us": 4.0,
                "times": 100.0,
            }
            for what, ours_us in ((LIFE, 1.0), (FROM_BYTES, 251.0))
        ],
        "beside_hostile_prompts": dict.fromkeys(
            ("hostile_counted", "busy_p50_us", "busy_p99_us", "idle_p50_us", "idle_p99_us"), 7
        ),
    }
    judged = [target.row(report) for target in TARGETS]
    assert [row["met"] for row in judged] == [None, None, None, True, False]
    text = page(report, judged)
    assert "| >= 20 | 100 | yes |" in text
    assert "| <= 250 | 251 | no |" in text
    assert text.count("not measured") == 3
