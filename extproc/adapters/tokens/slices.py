"""Cutting a long text where its count does not notice, so that counting can pause and stop early.

A cut goes between a letter and a space or comma that is followed by another letter. Splitting expressions
end a part there, because they let white space and punctuation begin a part and never end one that holds letters;
and if no token of the vocabulary has such a place inside it, no merge can join what the cut takes apart, whatever
the expression does. The second is checked for every token, the first tried on the self-test's texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

SLICE_CHARS = 16_384
"""About 2 ms of `tiktoken`, 8 ms of `tokenizers`."""

_SEARCHED_CHARS = 32_768
"""How much is searched in one go: half a millisecond."""

_LETTER = "A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_BREAK = " ,\u3001\u3002\uff0c"
_CUT = re.compile(f"(?<=[{_LETTER}])(?=[{_BREAK}][{_LETTER}])")
_SPANS_CUT = re.compile(f"[{_LETTER}\ufffd][{_BREAK}]")


def tokens_respect_cuts(token_texts: str) -> bool:
    """Is there no token that a cut could go through? U+FFFD stands for bytes that may end a letter."""
    return _SPANS_CUT.search(token_texts) is None


def slices(text: str, size_chars: int) -> Iterator[str]:
    """`text` in consecutive slices of at least `size_chars`; longer where there is no place to cut."""
    start = 0
    while len(text) - start > size_chars:
        cut = _cut(text, start + size_chars)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _cut(text: str, start: int) -> int | None:
    """The first place to cut from `start` on. Looked for bit by bit: a search holds the interpreter to its end."""
    for at in range(start, len(text), _SEARCHED_CHARS):
        # A place needs two more characters to be known.
        found = _CUT.search(text, at, at + _SEARCHED_CHARS + 2)
        if found is not None:
            return found.start()
    return None
