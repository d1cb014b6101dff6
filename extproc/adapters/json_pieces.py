"""A JSON object read in small pieces, so that nobody has to wait for a large one.

A parser in C holds the interpreter from the first byte to the last, and with it every other thread. So a long text
is cut into pieces that are each parsed at once, by `orjson` like any short text, and put together again. What is
accepted, refused and understood is what `orjson` accepts, refuses and understands of the whole.

Where to cut. Between two commas of one list or object there are whole values if, and only if, what is between them
is valid in brackets of its own. So a likely place may be guessed and tried; where the guess is wrong, a pattern finds
the place. A value that is too large for a piece is opened and read from inside; a text is cut between characters.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import orjson

PIECE_BYTES = 16 * 1024
"""How much of lists and objects is parsed at once: at most some 8,000 values, half a millisecond."""

TEXT_PIECE_BYTES = 4 * PIECE_BYTES
"""How much of one text is parsed at once."""

LARGEST_NUMBER_BYTES = 64 * 1024
"""No number has more digits: it would have to be parsed in one piece."""

PIECE_US = 400
"""About how long a piece takes."""

LARGEST_CONTAINERS = 32_768
"""How many lists and objects a body may hold. An empty list takes three bytes of a body and sixty of memory, and
Python's garbage collector walks through all of them in one go; a conversation of 10,000 messages with a part each
has to pass."""

LARGEST_VALUES = 270_000
"""How many values lists and objects may hold together. They are given back in one go, which takes 15 ns for each; a
prompt of token ids as long as a context of 262,144 has to pass."""

_SPACES = b" \t\r\n"
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^ \t\r\n,:\[\]{}\"]*")

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*"'
_NESTED = 4
"""How deep the pattern looks into lists and objects; what is deeper is opened."""


def _members() -> bytes:
    """The pattern of everything between two commas.

    Every repetition ends at a character that nothing inside it can be, so that a mismatch is found in linear time;
    runs of characters give nothing back once they have ended. Groups do, although they need not: Python before
    3.11.5 goes on at a wrong place after a possessive group of which the last turn failed halfway.
    """
    inside = rb"[^\"\[\]{}]*+(?:" + _STRING + rb"[^\"\[\]{}]*+)*"
    for _ in range(_NESTED - 1):
        inside = rb"[^\"\[\]{}]*+(?:(?:" + _STRING + rb"|[\[{]" + inside + rb"[\]}])[^\"\[\]{}]*+)*"
    return rb"[^,\"\[\]{}]*+(?:(?:" + _STRING + rb"|[\[{]" + inside + rb"[\]}])[^,\"\[\]{}]*+)*"


_RUN = re.compile(rb"(?:" + _members() + rb",)*", re.DOTALL)
_LAST = re.compile(_members() + rb"(?=[\]}])", re.DOTALL)

_ESCAPE_BYTES = 6
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LONGEST_ESCAPE_BYTES = 12

_GUESSES = {ord("{"): b"},", ord("["): b"],", ord('"'): b'",'}
_CLOSES = {ord("{"): ord("}"), ord("["): ord("]")}
_WRONG_GUESSES = 8


class NotJson(ValueError):
    """The text is no JSON value in UTF-8. Says nothing about the text."""


class TooMuch(ValueError):
    """The text is refused for what it holds too much of; `args[0]` says so to the client."""


class _Open:
    """A list or an object that is being read."""

    __slots__ = ("begun", "closes", "value")

    def __init__(self, opens: int) -> None:
        self.value: Any = {} if opens == ord("{") else []
        self.closes = _CLOSES[opens]
        self.begun = False
        """Has there been a comma? Then a member has to follow."""


Steps = Generator[int, None, dict[str, Any]]
"""Yields about how many microseconds the next step takes; returns the object."""


def read_pieces(
    text: bytes | bytearray, *, start: int = 0, depth: int, piece_bytes: int = PIECE_BYTES
) -> Steps:
    """The JSON object that `text` is from `start` on, nested at most `depth` deep.

    Its steps raise `NotJson` or `TooMuch`. `text` must not change meanwhile.
    """
    return _Pieces(text, start, depth, piece_bytes).steps()


class _Pieces:
    def __init__(self, text: bytes | bytearray, start: int, depth: int, piece_bytes: int) -> None:
        self._text = text
        self._at = start
        self._depth = depth
        self._piece_bytes = piece_bytes
        self._text_bytes = max(2 * _LONGEST_ESCAPE_BYTES, 4 * piece_bytes)
        self._stack: list[_Open] = []
        self._census = _Census(text)
        self._guessed = 0
        self._wrong = 0
        self._ended = False
        """Has a member ended? Then a comma or an end has to follow; else a member begins."""

    def steps(self) -> Steps:
        self._skip_space()
        if self._next() != ord("{"):
            raise NotJson
        root = self._open()
        while self._stack:
            yield PIECE_US
            if not self._take_run():
                yield from self._take_one()
            if self._ended:
                self._take_end()
        self._skip_space()
        if self._at != len(self._text):
            raise NotJson
        value: dict[str, Any] = root.value
        return value

    def _next(self) -> int:
        """The next byte, 0 at the end: no JSON has it."""
        return self._text[self._at] if self._at < len(self._text) else 0

    def _skip_space(self) -> None:
        while True:
            end = min(self._at + TEXT_PIECE_BYTES, len(self._text))
            match = _SPACE.match(self._text, self._at, end)
            assert match is not None
            self._at = match.end()
            if self._at < end or end == len(self._text):
                return

    def _open(self) -> _Open:
        """Open the list or object that begins here."""
        if len(self._stack) == self._depth:
            raise TooMuch(f"the body is nested more than {self._depth} levels deep")
        opened = _Open(self._text[self._at])
        self._census.add_container()
        self._stack.append(opened)
        self._at += 1
        return opened

    # As many members as go into a piece.

    def _take_run(self) -> bool:
        """Parse as many members as there are whole ones in the next piece. False if there is none."""
        top, at = self._stack[-1], self._at
        end = min(at + self._piece_bytes, len(self._text))
        self._ended = False
        cut = self._guess(top, at, end)
        if cut is not None:
            self._take_comma(top, cut)
            return True
        end = self._before_open_text(at, end)
        match = _RUN.match(self._text, at, end)
        assert match is not None
        last = _LAST.match(self._text, match.end(), end)
        if last is None and match.end() == at:
            return False
        cut = match.end() - 1 if last is None else last.end()
        if not self._parsed(top, at, cut):
            raise NotJson
        if last is None:
            self._take_comma(top, cut)
        else:
            self._at = cut
            self._ended = True
        return True

    def _before_open_text(self, at: int, end: int) -> int:
        """Where the text begins that `end` would cut: no member ends in it. Else `end`.

        A pattern takes fifty times as long to read a text as a search for its quotes.
        """
        piece = self._with_bare_quotes(at, end)
        return at + piece.rfind(b'"') if piece.count(b'"') % 2 else end

    def _with_bare_quotes(self, at: int, end: int) -> bytes:
        """As many bytes as from `at` to `end`, in which all quotes stand around texts: those inside are dots.

        `at` must not be inside an escape.
        """
        piece = bytes(self._text[at:end])
        return piece.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in piece else piece

    def _guess(self, top: _Open, at: int, end: int) -> int | None:
        """The last comma of the piece, guessed and proved by parsing what is before it."""
        if self._wrong > _WRONG_GUESSES + self._guessed:
            return None
        if type(top.value) is dict:
            cut = self._text.rfind(b',"', at, end)
        else:
            mark = _GUESSES.get(self._text[at] if at < end else 0, b",")
            cut = self._text.rfind(mark, at, end) + len(mark) - 1
        if cut <= at:
            return None
        if self._parsed(top, at, cut):
            self._guessed += 1
            return cut
        self._wrong += 1
        return None

    def _parsed(self, top: _Open, at: int, cut: int) -> bool:
        """Add the members between two places to what is open; False if they are none."""
        text = bytes(self._text[at:cut])
        try:
            read = (
                orjson.loads(b"{" + text + b"}")
                if type(top.value) is dict
                else orjson.loads(b"[" + text + b"]")
            )
        except ValueError:
            return False
        # Nothing at all is fine only where nothing was before and nothing follows.
        if not read and (top.begun or self._text[cut] == ord(",")):
            return False
        brackets = self._census.add_piece(at, cut)
        left = self._depth - len(self._stack) + 1
        if brackets >= left and is_deeper(read, left):
            raise TooMuch(f"the body is nested more than {self._depth} levels deep")
        if type(top.value) is dict:
            top.value.update(read)
        else:
            top.value.extend(read)
        return True

    # A member that is larger than a piece, or deeper than the pattern looks.

    def _take_one(self) -> Generator[int, None, None]:
        self._skip_space()
        top = self._stack[-1]
        self._ended = True
        if self._next() == top.closes and not top.begun:
            return
        key = None
        if type(top.value) is dict:
            key = yield from self._take_text()
            self._skip_space()
            if self._next() != ord(":"):
                raise NotJson
            self._at += 1
            self._skip_space()
        value: Any
        begins = self._next()
        if begins in _CLOSES:
            value = self._open().value
            self._ended = False
        elif begins == ord('"'):
            value = yield from self._take_text()
        else:
            value = self._take_scalar()
        if key is None:
            top.value.append(value)
        else:
            top.value[key] = value

    def _take_scalar(self) -> Any:
        match = _SCALAR.match(self._text, self._at, self._at + LARGEST_NUMBER_BYTES + 1)
        assert match is not None
        if match.end() - self._at > LARGEST_NUMBER_BYTES:
            raise TooMuch(f"the body holds a number of more than {LARGEST_NUMBER_BYTES} digits")
        scalar, self._at = match.group(), match.end()
        return _parse(scalar)

    def _take_text(self) -> Generator[int, None, str]:
        if self._next() != ord('"'):
            raise NotJson
        self._at += 1
        parts: list[str] = []
        while True:
            end = min(self._at + self._text_bytes, len(self._text))
            cut = self._text_end(end)
            if cut < len(self._text) and self._text[cut] == ord('"'):
                parts.append(_parse(b'"' + self._text[self._at : cut] + b'"'))
                self._at = cut + 1
                return "".join(parts)
            while cut > self._at and cut < len(self._text) and self._text[cut] & 0xC0 == 0x80:
                cut -= 1
            if cut == self._at:
                raise NotJson
            parts.append(_parse(b'"' + self._text[self._at : cut] + b'"'))
            self._at = cut
            yield PIECE_US // 4

    def _text_end(self, end: int) -> int:
        """Where the text ends, if it does before `end`; else where it can be cut."""
        piece = self._with_bare_quotes(self._at, end)
        quote = piece.find(b'"')
        if quote >= 0:
            return self._at + quote
        cut, escape = len(piece), piece.rfind(b"\\")
        if escape >= 0 and cut - escape < _ESCAPE_BYTES:
            cut = escape
        # Halves of a surrogate pair stay together: alone they are refused.
        if cut >= _ESCAPE_BYTES and _HIGH_SURROGATE.match(piece, cut - _ESCAPE_BYTES, cut):
            cut -= _ESCAPE_BYTES
        return self._at + cut

    # What follows a member.

    def _take_end(self) -> None:
        """Take what follows a member: the ends of all that ends with it, and a comma."""
        while self._stack:
            self._skip_space()
            top, byte = self._stack[-1], self._next()
            if byte == ord(","):
                self._take_comma(top, self._at)
                return
            if byte != top.closes:
                raise NotJson
            self._stack.pop()
            self._at += 1

    def _take_comma(self, top: _Open, at: int) -> None:
        top.begun = True
        self._census.add_comma()
        self._at = at + 1


def _parse(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        # Python's own exception would carry the text along.
        raise NotJson from None


class _Census:
    """Counts lists, objects and values: what is within strings is told apart only once there might be too many."""

    def __init__(self, text: bytes | bytearray) -> None:
        self._text = text
        self._containers = 0
        self._commas = 0
        self._unsure: list[tuple[int, int]] = []

    def add_container(self) -> None:
        self._containers += 1
        self._check()

    def add_comma(self) -> None:
        self._commas += 1
        self._check()

    def add_piece(self, start: int, end: int) -> int:
        """Count a piece of the text; how many lists and objects it has at most."""
        containers, commas = _marks(self._text, start, end)
        self._containers += containers
        self._commas += commas
        self._unsure.append((start, end))
        self._check()
        return containers

    def _check(self) -> None:
        if self._containers <= LARGEST_CONTAINERS and self._commas < LARGEST_VALUES:
            return
        for start, end in self._unsure:
            containers, commas = _marks(self._text, start, end)
            plain = bytes(self._text[start:end]).replace(b"\\\\", b"").replace(b'\\"', b"")
            outside = b" ".join(plain.split(b'"')[::2])
            real_containers, real_commas = _marks(outside, 0, len(outside))
            self._containers += real_containers - containers
            self._commas += real_commas - commas
        self._unsure.clear()
        if self._containers > LARGEST_CONTAINERS:
            raise TooMuch(f"the body holds more than {LARGEST_CONTAINERS} lists and objects")
        if self._commas >= LARGEST_VALUES:
            raise TooMuch(f"the body holds more than {LARGEST_VALUES} values")


def _marks(text: bytes | bytearray, start: int, end: int) -> tuple[int, int]:
    """How many lists and objects begin, and how many commas there are."""
    return text.count(b"[", start, end) + text.count(b"{", start, end), text.count(b",", start, end)


def is_deeper(value: dict[str, Any] | list[Any], depth: int) -> bool:
    """Whether containers are nested deeper than `depth`, level by level and without recursion."""
    level: list[Any] = [value]
    for _ in range(depth):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return False
    return True
