"""Where a text falls apart by itself: at the tokens that `tokenizers` cuts out before anything else.

What stands between added tokens is normalized, split and encoded on its own, so the count of a text is the number
of its added tokens plus the counts of the pieces between them. `tokenizers` looks in two rounds, the leftmost
and then longest first: in the text as it is for tokens that are not `normalized`, then in what is left, after
normalization, for those that are. A token with `lstrip` or `rstrip` swallows the white space beside it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from extproc.adapters.tokens.tokenizer_file import AddedToken

WHITE_SPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space, which is what `tokenizers` strips; Python's idea of space has four characters more."""


AT_ONCE_BYTES = 65_536
"""Longer texts are cut in a way that lets other threads run: some vocabularies take 150 ns per byte."""


class AddedTokenSplitter:
    """Cuts texts, as UTF-8, at the added tokens of one tokenizer."""

    def __init__(self, tokens: Sequence[AddedToken], *, normalizes: bool) -> None:
        """`normalizes`: does the tokenizer change text before it looks for `normalized` tokens?

        Those are then left in the pieces, for whoever encodes these.
        """
        self._rounds: list[tuple[re.Pattern[bytes], int]] = []
        for normalized in (False, True):
            contents = {token.content.encode() for token in tokens if token.normalized is normalized}
            if contents and not (normalized and normalizes):
                pattern = re.compile(b"(" + longest_of(contents - {b""}) + b")")
                self._rounds.append((pattern, max(map(len, contents))))
        self._strips_left = {token.content.encode() for token in tokens if token.lstrip}
        self._strips_right = {token.content.encode() for token in tokens if token.rstrip}
        self._keeps_spaces = not self._strips_left and not self._strips_right
        spaced = any(set(token.content) & set(WHITE_SPACE) for token in tokens)
        self.why_not = ""
        """Why texts cannot be cut by these rules; empty if they can."""
        if any(token.single_word for token in tokens):
            self.why_not = "an added token is matched as a single word only"
        elif spaced and not self._keeps_spaces:
            self.why_not = "added tokens strip white space and hold some"

    def split(self, text: bytes) -> tuple[list[bytes], int]:
        """The pieces between added tokens (none of them empty), and how many added tokens there are."""
        pieces = [text]
        tokens = 0
        for pattern, longest in self._rounds:
            cut: list[bytes] = []
            for piece in pieces:
                at_once = len(piece) <= AT_ONCE_BYTES
                parts = pattern.split(piece) if at_once else _split_by_turns(pattern, longest, piece)
                tokens += len(parts) // 2
                cut += parts[::2] if self._keeps_spaces else self._stripped(parts)
            pieces = cut
        return [piece for piece in pieces if piece], tokens

    def _stripped(self, parts: list[bytes]) -> list[bytes]:
        """The pieces of `piece, token, piece, ...`, without the white space that the tokens swallow."""
        for at in range(1, len(parts), 2):
            if parts[at] in self._strips_left:
                parts[at - 1] = parts[at - 1].decode().rstrip(WHITE_SPACE).encode()
            if parts[at] in self._strips_right:
                parts[at + 1] = parts[at + 1].decode().lstrip(WHITE_SPACE).encode()
        return parts[::2]


def _split_by_turns(pattern: re.Pattern[bytes], longest: int, text: bytes) -> list[bytes]:
    """What `pattern.split` gives, without holding the interpreter lock from the text's beginning to its end.

    `longest` is how many bytes a match has at most: one that begins in a window ends in what is looked at.
    """
    parts: list[bytes] = []
    piece_at = at = 0
    while at < len(text):
        match = pattern.search(text, at, at + AT_ONCE_BYTES + longest)
        if match is None or match.start() >= at + AT_ONCE_BYTES:
            at += AT_ONCE_BYTES
            continue
        parts += (text[piece_at : match.start()], match.group())
        piece_at = at = match.end()
    parts.append(text[piece_at:])
    return parts


def longest_of(texts: Collection[bytes]) -> bytes:
    """An expression for the longest of `texts` that fits at a place: a tree, so that it looks at each byte once."""
    heads: dict[int, set[bytes]] = {}
    for text in texts:
        if text:
            heads.setdefault(text[0], set()).add(text[1:])
    branches: list[bytes] = []
    for first, tails in sorted(heads.items()):
        shared = _shared_beginning(tails)
        rest = {tail[len(shared) :] for tail in tails}
        deeper = b"" if rest == {b""} else longest_of(rest)
        branches.append(re.escape(bytes([first]) + shared) + deeper)
    return b"(?:" + b"|".join(branches) + (b")?" if b"" in texts else b")")


def _shared_beginning(texts: Collection[bytes]) -> bytes:
    first, last = min(texts), max(texts)
    length = 0
    while length < len(first) and first[length] == last[length]:
        length += 1
    return first[:length]
