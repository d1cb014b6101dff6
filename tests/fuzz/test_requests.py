"""From bytes to a count, whatever the bytes: only answers of the contract, no exception, and nothing that grows.

Valid requests of every dialect are damaged, as JSON and as bytes, and go through the very steps of the service: the
body reader, the dialect, the rules for media, the tokenizer. The same damage every time, about 6,000 requests.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.adapters.json_body import read_json
from extproc.adapters.tokens.count_cache import ENTRY_BYTES
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.adapters.tokens.load import load_model_tokens
from extproc.dialects.reading import LARGEST_COUNT, BadRequest, InferenceRequest
from extproc.dialects.refusals import LONGEST_MESSAGE
from extproc.dialects.registry import dialect_for
from extproc.domain.media import MediaKind, MediaRule, Tile
from extproc.domain.outcome import Reason
from extproc.domain.policy import Engine
from extproc.domain.prompt import AtLeast, Count, Counted, CountFailed
from tests.builders import a_limits
from tests.dialects.test_any_json import CANARY, VALID
from tests.dialects.test_media import GIF, JPEGS, PNG, WEBP_LOSSY

ROUNDS = 3_000
CACHE_BYTES = 16 * 1024
"""So small that it is full all the time."""
CONTEXT_TOKENS = 32_768
LIMITS = a_limits(body_bytes=200_000, json_depth=20)
RULES = {
    MediaKind.IMAGE: MediaRule(max_tokens=999, tile=Tile(width_px=28, height_px=28, tokens=1)),
    MediaKind.AUDIO: MediaRule(max_tokens=999, tokens_per_s=25),
    MediaKind.FILE: MediaRule(max_tokens=999),
}
MEDIA: dict[str, Any] = {
    "model": "m",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                *(
                    {"type": "image_url", "image_url": {"url": f"data:image/x;base64,{data}"}}
                    for data in (PNG, GIF, WEBP_LOSSY, JPEGS["baseline"])
                ),
                {"type": "input_audio", "input_audio": {"data": "UklGRiQAAABXQVZF", "format": "wav"}},
                {"type": "file", "file": {"file_id": "f"}},
            ],
        }
    ],
}
REQUESTS = [*VALID, ("/v1/chat/completions", MEDIA)]

REASONS = {
    Reason.BODY_TOO_LARGE,
    Reason.UNSUPPORTED_ENCODING,
    Reason.MALFORMED_REQUEST,
    Reason.INVALID_PARAMETER,
}
PIECES = (
    b"\xff",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\\ud800",
    b"\\u0000",
    b"1e999",
    b"-0",
    b"NaN",
    b"null",
    b'""',
    b"[" * 30,
    b'{"a":' * 25,
    b'"role":"system",',
    b"<|im_end|>",
    b"9" * 400,
    '"\u202e"'.encode(),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**63,
    1.5,
    "",
    CANARY,
    "assistant",
    "<|im_start|>",
    "\ud800",
    "x" * 3_000,
    [],
    {},
    [None],
    [[]],
    {"type": "image"},
    {"type": "text"},
    [{"type": "text", "text": None}],
    {"function": None},
    "data:;base64,AAAA",
)


class Damage:
    """Damages requests."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def request(self) -> tuple[str, bytes, str | None]:
        """A path, a body and its coding."""
        chance = self._chance
        path, valid = chance.choice(REQUESTS)
        body = copy.deepcopy(valid)
        for _ in range(chance.randrange(3)):
            holder, key = chance.choice(list(_places(body)))
            if chance.random() < 0.2:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(chance.choice(VALUES))
            if not body:
                break
        raw = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
        if chance.random() < 0.5:
            raw = self._bytes(raw)
        if chance.random() < 0.1:
            path = chance.choice(REQUESTS)[0]
        coding = chance.choice((None,) * 20 + ("gzip", "deflate", "br", "zstd", "x"))
        return path, raw, coding

    def _bytes(self, raw: bytes) -> bytes:
        chance = self._chance
        for _ in range(chance.choice((1, 1, 2, 5))):
            at, end = sorted((chance.randrange(len(raw) + 1), chance.randrange(len(raw) + 1)))
            raw = chance.choice(
                (
                    raw[:at] + raw[end:],
                    raw[:at] + chance.choice(PIECES) + raw[at:],
                    raw[:end] + raw[at:],
                    raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :],
                )
            )
        return raw


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def answered(counter: ExactTokenCounter, path: str, raw: bytes, coding: str | None) -> str:
    """What comes of the bytes; anything but an answer of the contract fails."""
    dialect = dialect_for(path)
    assert dialect is not None
    refusal: BadRequest
    try:
        body = read_json(raw, content_encoding=coding, content_type="application/json", limits=LIMITS)
        request = dialect.read(body, path).priced(RULES)
    except BadRequest as bad:
        refusal = bad
    else:
        return counted_by(counter, request)
    assert refusal.reason in REASONS
    assert CANARY not in refusal.message
    assert len(refusal.message) <= LONGEST_MESSAGE
    return str(refusal.reason)


def counted_by(counter: ExactTokenCounter, request: InferenceRequest) -> str:
    """What comes of a request that could be read."""
    answers: list[Count] = []
    counter.count(
        model="m", prompt=request.prompt, limit_tokens=CONTEXT_TOKENS, tenant="t", deliver=answers.append
    )
    (answer,) = answers
    match answer:
        case Counted(per_sequence_tokens=counted):
            tokens = request.input_tokens(counted, context_tokens=CONTEXT_TOKENS)
            assert len(tokens) == len(counted) >= 1
            assert all(0 <= one <= LARGEST_COUNT for one in tokens)
            return "counted"
        case AtLeast(input_tokens=least):
            assert least > CONTEXT_TOKENS
            return "at least"
        case CountFailed(reason=reason, detail=detail):
            assert reason in (Reason.INVALID_PARAMETER, Reason.MALFORMED_REQUEST)
            assert CANARY not in detail
            return "uncountable"


@pytest.fixture(scope="module", params=["text", "parts", "llama.cpp"])
def counter(
    request: pytest.FixtureRequest, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ExactTokenCounter]:
    """A counter for a template that wants text, for one that wants parts, and for another engine."""
    template = None
    if request.param == "parts":
        template = tmp_path_factory.mktemp("fuzz") / "parts.jinja"
        template.write_text(
            "{% for m in messages %}<|im_start|>{{ m.role }}{% for p in m.content %}"
            "{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
            "<|im_end|>{% endfor %}{{ tools | tojson if tools else '' }}"
        )
    engine = Engine.LLAMA_CPP if request.param == "llama.cpp" else Engine.VLLM
    model = load_model_tokens(tokenizer_dir, template, engine=engine, cache_bytes=CACHE_BYTES)
    counter = ExactTokenCounter({"m": model}, threads=1, inline_us=1 << 60)
    yield counter
    counter.close()


def test_any_bytes_have_an_answer(counter: ExactTokenCounter) -> None:
    """Each damaged request is counted or refused by the contract; and of each kind of answer there are many."""
    damage = Damage(1)
    outcomes = Counter(answered(counter, *damage.request()) for _ in range(ROUNDS))
    assert outcomes["counted"] > ROUNDS // 10
    assert outcomes["malformed_request"] > ROUNDS // 10
    assert outcomes["invalid_parameter"] > ROUNDS // 20


def test_nothing_grows(counter: ExactTokenCounter) -> None:
    """Damaged requests by the thousand leave no objects behind, and the caches stay within their bytes."""

    def blocks(run: Callable[[], None]) -> int:
        run()
        gc.collect()
        return sys.getallocatedblocks()

    def run() -> None:
        damage = Damage(2)
        for _ in range(ROUNDS // 5):
            answered(counter, *damage.request())

    run()
    before = blocks(run)  # everything that these requests leave in the caches is there by now
    after = blocks(run)
    assert after - before < 200
    model = counter.models["m"]
    assert len(model.pieces) > CACHE_BYTES // ENTRY_BYTES // 2
    assert len(model.pieces) * ENTRY_BYTES <= CACHE_BYTES
    assert counter.queue_depth == 0
