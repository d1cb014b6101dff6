"""Expressions for `tiktoken`'s engine: the same splits in fewer steps, and a search for characters.

That engine hands what is regular in an expression to an automaton, and steps through the rest itself: of an
alternation with one look-around, it tries the alternatives one after the other. `grouped` writes neighbours that
need no look-around as one alternative, `a|b|c(?!d)` as `(?:a|b)|c(?!d)`, which means the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tiktoken._tiktoken import CoreBPE

NEVER_IN_TEXT = "\U0010fffe\U0010ffff\U0010fffe\U0010ffff"
"""`tiktoken` searches for special tokens at every position unless it has one to search for: four noncharacters."""

NONE_SPECIAL: frozenset[str] = frozenset()

_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_SETS_FLAGS = re.compile(r"\(\?[a-zA-Z-]+\)")
_MARKS = re.compile(r"\\.|[\[\]()|]|[^\\\[\]()|]+", re.DOTALL)


def grouped(expression: str) -> str:
    """`expression` with its neighbouring alternatives that do not look around as one alternative each."""
    if _SETS_FLAGS.search(expression):  # a flag holds for the alternatives after it: a group would end it
        return expression
    groups: list[list[str]] = []
    regular_before = False
    for alternative in _alternatives(expression):
        regular = _LOOKS_AROUND.search(alternative) is None
        if regular and regular_before:
            groups[-1].append(alternative)
        else:
            groups.append([alternative])
        regular_before = regular
    if len(groups) == 1:
        return expression
    return "|".join(group[0] if len(group) == 1 else f"(?:{'|'.join(group)})" for group in groups)


def _alternatives(expression: str) -> list[str]:
    """The alternatives at the top of `expression`."""
    found = [""]
    parentheses = brackets = 0
    for mark in _MARKS.findall(expression):
        if mark == "[":
            brackets += 1
        elif mark == "]" and brackets:
            brackets -= 1
        elif not brackets and mark == "(":
            parentheses += 1
        elif not brackets and mark == ")":
            parentheses -= 1
        elif mark == "|" and not brackets and not parentheses:
            found.append("")
            continue
        found[-1] += mark
    return found


class CharacterSearch:
    """Does a text hold what an expression describes? Without the interpreter lock, ten times faster than `re`.

    `tiktoken` makes tokens of what its expression matches and skips the rest: no token, no match.
    """

    def __init__(self, expression: str) -> None:
        self._core = CoreBPE({bytes([byte]): byte for byte in range(256)}, {NEVER_IN_TEXT: 256}, expression)

    def finds_in(self, text: str) -> bool:
        """Whether there is a match. `text` must have no lone surrogates."""
        return memoryview(self._core.encode_to_tiktoken_buffer(text, NONE_SPECIAL)).nbytes > 0


def character_class(codes: Iterable[int]) -> str:
    """The characters with these ascending numbers, as an expression; without surrogates, which no text holds."""
    ranges = _ranges(code for code in codes if not 0xD800 <= code < 0xE000)
    return "[" + "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges) + "]"


def _ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for number in numbers:
        if first is None or last is None:
            first = number
        elif number != last + 1:
            yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last
