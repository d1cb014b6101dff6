"""Converted in pieces as in one go, wherever the pieces end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.tokens import by_turns
from extproc.adapters.tokens.by_turns import decoded, encoded

TEXTS = st.text(alphabet=st.sampled_from("aé河😀\ud800\udc00"), max_size=12)


@pytest.fixture(autouse=True, params=[1, 2, 5], scope="module")
def tiny(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pieces of a few bytes."""
    before, by_turns.AT_ONCE = by_turns.AT_ONCE, request.param
    yield
    by_turns.AT_ONCE = before


@given(text=TEXTS)
def test_texts_are_encoded_as_whole(text: str) -> None:
    """The same bytes, or refused as well."""
    try:
        whole = text.encode()
    except UnicodeEncodeError:
        with pytest.raises(UnicodeEncodeError):
            encoded(text)
    else:
        assert encoded(text) == whole


@given(data=st.one_of(TEXTS.map(lambda text: text.encode(errors="surrogatepass")), st.binary(max_size=8)))
def test_bytes_are_decoded_as_whole(data: bytes) -> None:
    """The same text, or refused as well."""
    try:
        whole = data.decode()
    except UnicodeDecodeError:
        with pytest.raises(UnicodeDecodeError):
            decoded(data)
    else:
        assert decoded(data) == whole
