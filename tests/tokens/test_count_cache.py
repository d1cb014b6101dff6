"""The cache of counts: bounded, in order of use, and without any text."""

from __future__ import annotations

import gc
from threading import Thread

from extproc.adapters.tokens.count_cache import ENTRY_BYTES, CountCache
from extproc.adapters.tokens.model_tokens import ModelTokens
from tests.tokens.counting import chat, count, count_text


def test_a_count_is_known_once_it_was_told() -> None:
    """What was remembered is known under the same text's key, and under no other's."""
    cache = CountCache(100 * ENTRY_BYTES)
    one, two = cache.key(b"one"), cache.key(b"two")
    assert cache.known([one, two]) == [None, None]
    cache.remember(one, 7)
    cache.remember(two, 0)
    assert cache.known([two, one, cache.key(b"three")]) == [0, 7, None]
    assert (cache.hits, cache.misses) == (2, 3)


def test_the_least_recently_used_go_first() -> None:
    """The cache stays within its bytes; what was asked for lately stays in it."""
    cache = CountCache(3 * ENTRY_BYTES)
    keys = [cache.key(bytes([number])) for number in range(5)]
    for key in keys[:3]:
        cache.remember(key, 1)
    cache.known([keys[0]])
    cache.remember(keys[3], 1)
    assert cache.known(keys[:4]) == [1, None, 1, 1]
    cache.remember(keys[0], 1)
    cache.remember(keys[4], 1)
    assert cache.known(keys) == [1, None, None, 1, 1]
    assert len(cache) == 3


def test_keys_differ_between_caches() -> None:
    """A key is no hash that somebody else could compute."""
    assert CountCache(1000).key(b"text") != CountCache(1000).key(b"text")


def test_threads_share_a_cache() -> None:
    """Under use by many threads at once nothing fails and the bound holds."""
    cache = CountCache(50 * ENTRY_BYTES)
    wrong: list[object] = []

    def use(start: int) -> None:
        for number in range(start, start + 2_000):
            key = cache.key(str(number % 120).encode())
            (known,) = cache.known([key])
            if known not in (None, number % 120):
                wrong.append(known)
            cache.remember(key, number % 120)

    threads = [Thread(target=use, args=(start,)) for start in range(0, 80, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache) == 50


def test_a_model_keeps_no_text_of_any_prompt(tiny: ModelTokens) -> None:
    """After counting, no string or bytes that hold a word of the prompt can be reached from the model."""
    word = "xylophonist" + "ical"
    count(tiny, chat(f"{word} one", f"two {word}"))
    count_text(tiny, f"<|im_start|>{word}")
    seen: set[int] = set()
    pending: list[object] = [tiny]
    while pending:
        item = pending.pop()
        if id(item) in seen or type(item).__name__ in {"module", "function", "type", "frame"}:
            continue
        seen.add(id(item))
        if isinstance(item, str):
            assert word not in item
        elif isinstance(item, bytes):
            assert word.encode() not in item
        else:
            pending += gc.get_referents(item)
    assert len(seen) > 1_000


def test_the_model_finds_again_what_it_counted(tiny: ModelTokens) -> None:
    """A prompt that is sent again is known as a whole; one with a new last turn but for that turn."""
    turns = [f"turn number {number} of the conversation" for number in range(5)]
    count(tiny, chat(*turns))
    known, pieces = tiny.prompts.hits, tiny.pieces.misses
    assert count(tiny, chat(*turns)) == count(tiny, chat(*turns))
    assert (tiny.prompts.hits - known, tiny.pieces.misses - pieces) == (2, 0)
    count(tiny, chat(*turns, "a new one"))
    assert tiny.pieces.misses - pieces == 1
