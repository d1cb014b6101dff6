r"""Expressions for `tiktoken`'s engine: the same splits in fewer steps, and a search for characters.

That engine hands what is regular in an expression to an automaton, and steps through the rest itself, with notes
that threads must lock each other out of: in a thread that is not the first, one look-around costs a third more.
Splitting expressions have one look-around, at their end: `\s+(?!\S)|\s+`. White space leaves its last character to
the word behind it. `Splitting` leaves the look-around out and marks those places in the text instead, by a special
token; few texts have such places, and a search tells.

Where that cannot be done, `grouped` writes neighbours that need no look-around as one alternative, `a|b|c(?!d)` as
`(?:a|b)|c(?!d)`, which means the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from tiktoken._tiktoken import CoreBPE

from extproc.adapters.tokens.added_tokens import WHITE_SPACE

NEVER_IN_TEXT = "\U0010fffe\U0010ffff\U0010fffe\U0010ffff"
"""`tiktoken` searches for special tokens at every position unless it has one to search for: four noncharacters."""

NONE_SPECIAL: frozenset[str] = frozenset()

CUT = "\x00\x1c\x7f\x00"
"""Marks a place to split at. ASCII, so that a text takes no more room with it than without."""

ONE_CUT = frozenset({CUT})

BEGINNING_CHARS = 512
"""Shorter texts than a search by `tiktoken` pays for."""

WINDOW_CHARS = 8_192
"""How much is marked at once: two milliseconds if every third character wants a mark."""

_NO_WHITE_SPACE = re.compile(f"[^{WHITE_SPACE}]")

_TAIL = [r"\s+(?!\S)", r"\s+"]
_LINE_ENDS = {r"\s*[\r\n]+", r"\s*[\r\n]"}
"""Alternatives that take white space as far as its last line end, whatever follows."""

_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_SETS_FLAGS = re.compile(r"\(\?[a-zA-Z-]+\)")
_ANCHORS = re.compile(r"\\[bBAzZG]|(?<!\\)\$|(?<![\\\[])\^")
"""What means another place in a text that is cut."""
_MARKS = re.compile(r"\\.|[\[\]()|]|[^\\\[\]()|]+", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How `tiktoken` is made to split: by `expression`, and where `marked` puts a `CUT`."""

    expression: str
    places: str = ""
    """What a text must hold to need a mark, as an expression for `CharacterSearch`. Empty: none ever does."""
    before_cut: re.Pattern[str] | None = None
    hints: tuple[str, ...] = ()
    """An ASCII text that needs a mark holds one of these."""

    def hinted_in(self, beginning: str) -> bool:
        """May ASCII need a mark? To be asked about few characters: Python looks for one hint after the other."""
        for hint in self.hints:  # noqa: SIM110 - `any` takes a third of a microsecond more, per piece of every chat
            if hint in beginning:
                return True
        return False

    def marked(self, text: str) -> tuple[str, int] | None:
        """`text` with a mark at each place, and how many there are. None if it holds the mark already."""
        if self.before_cut is None:
            return text, 0
        if CUT in text:
            return None
        cuts = 0
        marked: list[str] = []
        for window in _windows(text):
            parts = self.before_cut.split(window)
            parts[1::2] = [white + CUT for white in parts[1::2]]
            marked.append("".join(parts))
            cuts += len(parts) // 2
        return "".join(marked), cuts


def _windows(text: str) -> Iterator[str]:
    """`text` in parts that end in no white space: one call for all of it would hold the interpreter throughout."""
    start = 0
    while len(text) - start > WINDOW_CHARS:
        end = _NO_WHITE_SPACE.search(text, start + WINDOW_CHARS)
        if end is None:
            break
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def splittings(expression: str) -> Iterator[Splitting]:
    r"""Ways to split as `expression` does, the fastest first. All but the last have to be tried on texts.

    A run of white space before something else ends one character early, unless it ends in a line end that another
    alternative has taken. So the text splits before that character; and a text that ends there has no look-around
    left to do, as `\s+` takes what there is.
    """
    alternatives = _alternatives(expression)
    others, tail = alternatives[:-2], alternatives[-2:]
    regular = not (_SETS_FLAGS.search(expression) or _ANCHORS.search(expression))
    if others and tail == _TAIL and regular and not any(map(_LOOKS_AROUND.search, others)):
        leading = WHITE_SPACE if _LINE_ENDS.isdisjoint(others) else WHITE_SPACE.translate(_NO_LINE_ENDS)
        yield Splitting(
            expression="|".join([*others, _TAIL[1]]),
            places=f"{character_class(map(ord, WHITE_SPACE))}{character_class(map(ord, leading))}\\S",
            before_cut=re.compile(f"([{WHITE_SPACE}])(?=[{leading}][^{WHITE_SPACE}])"),
            hints=(
                *(white for white in _RARE if white in leading),
                *(first + white for first, white in product(_COMMON, repeat=2) if white in leading),
            ),
        )
    yield Splitting(expression=grouped(expression))


_RARE, _COMMON = "\t\x0b\x0c", " \n\r"
"""White space of ASCII: what is rare may stand alone as a hint, what is common in pairs only."""

_NO_LINE_ENDS = str.maketrans("", "", "\r\n")


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
