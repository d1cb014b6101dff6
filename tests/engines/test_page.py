"""Metrics pages: what is read of those of real engines, of many versions and ranks, and of those that lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.engine_probe.names import ALL_NAMES
from extproc.adapters.engine_probe.page import (
    LARGEST_LINE_BYTES,
    LARGEST_PAGE_BYTES,
    MOST_SERIES,
    PageError,
    PageReader,
)
from tests.engines.engine import GOOD, read, recorded, told


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("vllm-0.32-queueing", (16, 8, 1)),
        ("vllm-0.32-kv-pressure", (3, 3, 769)),
        ("llama.cpp-queueing", (4, 4, None)),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 4_096, 1 << 20])
def test_recorded_pages(page: str, expected: tuple[int, int, int | None], piece_bytes: int) -> None:
    """As real engines wrote them, in pieces of every size."""
    signal = read(recorded(page), "tiny", piece_bytes=piece_bytes)
    assert signal is not None
    assert (signal.waiting_requests, signal.running_requests, signal.kv_used_permille) == expected
    assert signal.at_ms == 7


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("vllm:kv_cache_usage_perc 0.25\n", (None, None, 250)),
        ("vllm:gpu_cache_usage_perc 0.75\n", (None, None, 750)),
        ("vllm:gpu_cache_usage_perc 0.75\nvllm:kv_cache_usage_perc 0.25\n", (None, None, 250)),
        ("sglang:token_usage 0.5\nsglang:num_queue_reqs 2\nsglang:num_running_reqs 9\n", (2, 9, 500)),
        ("sglang_token_usage 0.5\nsglang_num_queue_reqs 2\nsglang_num_running_reqs 9\n", (2, 9, 500)),
        ("tgi_queue_size 5\ntgi_batch_current_size 12\n", (5, 12, None)),
        ("llamacpp:requests_deferred 1\nllamacpp:kv_cache_usage_ratio 0.125\n", (1, None, 125)),
    ],
)
def test_names_of_every_engine_and_version(page: str, expected: tuple[int | None, ...]) -> None:
    """The new name wins; what is not told is unknown."""
    assert told(page) == expected


@pytest.mark.parametrize(
    "page",
    [
        "",
        "# only a comment\n",
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 3\n',
        "xvllm:num_requests_waiting 3\n",
        "# vllm:num_requests_waiting 3\n",
        "vllm:num_requests_waiting\n",
        "vllm:num_requests_waiting{} \n",
        "process_cpu_seconds_total 3\n",
        *(f"vllm:num_requests_waiting {lie}\n" for lie in ("NaN", "-1", "+Inf", "1e300", "many", "2e6")),
        *(f"vllm:kv_cache_usage_perc {lie}\n" for lie in ("85", "-0.1", "Inf", "1.2")),
    ],
)
def test_what_tells_nothing_believable_is_unknown(page: str) -> None:
    """Never zero."""
    assert read(page) is None


def test_a_share_a_little_over_one_is_full() -> None:
    assert told("vllm:kv_cache_usage_perc 1.0000002\n") == (None, None, 1000)


def test_ranks_add_up_and_the_fullest_cache_counts() -> None:
    """Two data-parallel engines behind one endpoint."""
    page = """\
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.9
"""
    assert told(page, "m") == (7, None, 900)


def test_tensor_parallel_ranks_repeat_and_count_once() -> None:
    """Eight data-parallel ranks of four processes each."""
    page = "".join(
        f'sglang:num_queue_reqs{{model_name="m",tp_rank="{tp}",dp_rank="{dp}",pp_rank="0"}} {dp}\n'
        for dp in range(8)
        for tp in range(4)
    )
    assert told(page) == (28, None, None)


def test_other_models_of_the_endpoint_do_not_count() -> None:
    """Where a name is the policy's, only such; where none is, the engine serves under a name of its own."""
    page = """\
vllm:num_requests_waiting{engine="0",model_name="ours"} 2
vllm:num_requests_waiting{engine="0",model_name="theirs"} 40
vllm:kv_cache_usage_perc{engine="0",model_name="ours"} 0.1
vllm:kv_cache_usage_perc{engine="0",model_name="theirs"} 1
"""
    assert told(page, "ours", "alias") == (2, None, 100)
    assert told(page, "ours", "theirs") == (42, None, 1000)
    assert told(page, "/models/llama") == (42, None, 1000)


def test_labels_may_hold_anything() -> None:
    """Quotes, braces, commas, equals signs and escapes in a value end nothing."""
    hostile = r'a\"b\\c}{,x="y'
    page = f'vllm:num_requests_waiting{{engine="0",model_name="{hostile}"}} 3 1700000000000\n'
    assert told(page) == (3, None, None)


def test_windows_line_ends_and_tabs() -> None:
    assert told("vllm:num_requests_waiting\t3\r\n") == (3, None, None)


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([b"vllm:num_requests_waiting 1"], "the page was cut off"),
        ([b"x" * (LARGEST_LINE_BYTES + 1)], "a line is too long"),
        ([b"#" * 10_000 + b"\n"] * (LARGEST_PAGE_BYTES // 10_000 + 1), "the page is too large"),
        (
            [b'vllm:num_requests_waiting{engine="%d"} 1\n' % number for number in range(MOST_SERIES + 1)],
            "there are too many series",
        ),
    ],
)
def test_bounds(pieces: list[bytes], problem: str) -> None:
    """A page without an end, a line without one, one without shape: an error, early, and no memory."""
    reader = PageReader(frozenset())
    with pytest.raises(PageError) as caught:  # noqa: PT012 - the bound may be passed in any piece
        for piece in pieces:
            reader.feed(piece)
        reader.signal(0)
    assert str(caught.value) == problem


@given(st.binary(max_size=2_000), st.integers(1, 60))
def test_any_bytes_are_a_page_or_an_error(raw: bytes, piece_bytes: int) -> None:
    """Nothing else is raised, and pieces make no difference."""
    try:
        whole = read(raw)
    except PageError:
        whole = None
    try:
        assert read(raw, piece_bytes=piece_bytes) == whole
    except PageError:
        assert whole is None


lines = st.builds(
    "{}{} {}".format,
    st.sampled_from([*ALL_NAMES, "other"]),
    st.sampled_from(["", "{}", '{engine="0"}', '{engine="1",model_name="m"}', '{tp_rank="3"', "}"]),
    st.sampled_from(["0", "3", "0.5", "NaN", "-2", "1e400", "x", ""]),
)


@given(st.lists(lines, max_size=30), st.integers(1, 60))
def test_pieces_make_no_difference(page: list[str], piece_bytes: int) -> None:
    text = "".join(line + "\n" for line in page)
    signal = read(text)
    assert read(text, piece_bytes=piece_bytes) == signal
    if signal is not None:
        assert signal.waiting_requests is None or signal.waiting_requests >= 0
        assert signal.kv_used_permille is None or 0 <= signal.kv_used_permille <= 1000


def test_the_good_page_of_the_stand_in_is_good() -> None:
    assert told(GOOD) == (3, 4, 500)
