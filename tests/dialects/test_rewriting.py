"""Naming another model in a body: only that value changes, whatever the body looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects.rewriting import (
    LARGEST_CHANGED_BYTES,
    LARGEST_WALKED_BYTES,
    LARGEST_WALKED_QUOTES,
    with_model,
)

TEXTS = st.text(alphabet=st.sampled_from('model"\\{}[]:, \n\té😀a'), max_size=12)
KEYS = st.one_of(st.sampled_from(["model", "models", "messages", "a"]), TEXTS)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS, st.just("model")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)
NAMES = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@given(
    before=st.dictionaries(KEYS, VALUES, max_size=4),
    after=st.dictionaries(KEYS, VALUES, max_size=4),
    model=TEXTS,
    name=NAMES,
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]),
    ascii_only=st.booleans(),
)
def test_the_body_means_the_same_with_another_model(
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    model: str,
    name: str,
    separators: tuple[str, str],
    ascii_only: bool,
) -> None:
    """Parsed again, the object has the new model and nothing else has changed."""
    members = {key: value for key, value in before.items() if key != "model"}
    members["model"] = model
    members |= {key: value for key, value in after.items() if key != "model"}
    raw = json.dumps(members, separators=separators, ensure_ascii=ascii_only).encode()

    new = with_model(raw, name)

    assert new is not None
    assert json.loads(new) == members | {"model": name}
    assert with_model(new, model) == with_model(raw, model)


@pytest.mark.parametrize(
    ("raw", "new"),
    [
        (b'{"model":"tiny"}', b'{"model":"big"}'),
        (b' { "model" :\n "tiny" , "n": 1.0e2 } ', b' { "model" :\n "big" , "n": 1.0e2 } '),
        (b'\xef\xbb\xbf{"model":"tiny"}', b'\xef\xbb\xbf{"model":"big"}'),
        (b'{"mod\\u0065l":"tiny"}', b'{"mod\\u0065l":"big"}'),
        (b'{"model":"t\\"i\\\\","a":{"model":"x"}}', b'{"model":"big","a":{"model":"x"}}'),
        (b'{"a":[{"model":"x"}],"model":"tiny"}', b'{"a":[{"model":"x"}],"model":"big"}'),
        (b'{"a":"\\"model\\":","model":"tiny"}', b'{"a":"\\"model\\":","model":"big"}'),
        (b'{"a":"model","model":"model"}', b'{"a":"model","model":"big"}'),
        (b'{"model":null,"model":"tiny"}', b'{"model":"big","model":"big"}'),
        (b'{"model":7,"model": "tiny" }', b'{"model":"big","model": "big" }'),
        (b'{"model":"tiny","t":1e400,"s":"\\/"}', b'{"model":"big","t":1e400,"s":"\\/"}'),
    ],
)
def test_every_other_byte_stays(raw: bytes, new: bytes) -> None:
    """White space, escapes, number forms, nested namesakes and byte order marks are the client's."""
    assert with_model(raw, "big") == new


def test_a_name_is_written_as_json() -> None:
    """Quotation marks and backslashes in a model's name cannot end the value."""
    assert with_model(b'{"model":"tiny"}', 'a"\\b') == b'{"model":"a\\"\\\\b"}'


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":{"a":1},"model":"tiny"}',
        b'{"model":[],"model":"tiny"}',
        b'{"model":"tiny","b":"model","a":[' + b'"",' * (LARGEST_WALKED_QUOTES // 2) + b'""]}',
        b'{"model":"tiny","b":"model","a":"' + b"x" * LARGEST_WALKED_BYTES + b'"}',
    ],
)
def test_what_cannot_be_rewritten_is_left_alone(raw: bytes) -> None:
    """A model that is no name, or more to walk through than there is time for."""
    assert with_model(raw, "big") is None


@pytest.mark.parametrize("size_bytes", [1_000, 4 * LARGEST_WALKED_BYTES])
def test_the_only_model_of_a_body_is_found_whatever_its_size(size_bytes: int) -> None:
    """Behind the prompt as well as before it."""
    prompt = b'"a":"' + b'\\"x\\\\' * (size_bytes // 5) + b'"'
    for raw in (b'{"model" : "t\\"y",%s}', b'{%s,"model" : "t\\"y"}', b'{%s,"model":"t\\\\"}'):
        new = with_model(raw % prompt, "big")
        assert new is not None
        assert json.loads(new) == json.loads(raw % prompt) | {"model": "big"}
        assert prompt in new


def test_a_body_of_megabytes_stays_what_it_is() -> None:
    """The largest that is changed, and one byte more."""
    raw = b'{"model":"tiny","prompt":"%s"}'
    largest = raw % (b"x" * (LARGEST_CHANGED_BYTES - len(raw % b"")))
    assert with_model(largest, "big") == largest.replace(b"tiny", b"big")
    assert with_model(largest + b" ", "big") is None
