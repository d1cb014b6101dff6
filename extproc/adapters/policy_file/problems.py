"""What is wrong with a policy file, said so that it can be mended: where, which value, and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the file down to a value."""

ABSENT: object = object()
"""Stands for "there is no value to show" (a missing key, or a value that is nobody's business)."""

LONGEST_SHOWN_CHARS = 48

_CREDENTIAL = re.compile(r"(?i)\b(?:sk|pk|rk|hf|ghp)[-_][a-z0-9]|\b(?:bearer|basic)\s|\beyJ[a-z0-9]")
_HIGH_ENTROPY = re.compile(r"(?=[A-Za-z0-9_+=-]*[0-9])(?=[A-Za-z0-9_+=-]*[A-Za-z])[A-Za-z0-9_+=]{24,}")
_WORD = re.compile(r"[^\s/\"'`;,()\[\]{}]+")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, or that is likely not meant.

    `value` is shortened, and `None` where there is none or where it may be a secret. `line` counts from 1;
    it is the nearest line that the file has for `path`, and `None` if there is no file content at all.
    """

    path: str
    message: str
    value: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = self.path or "(the file)"
        if self.value is not None:
            where = f"{where} = {self.value}"
        place = "" if self.line is None else f"line {self.line}: "
        return f"{place}{where}: {self.message}"


class PolicyError(Exception):
    """The policy cannot be used. `problems` has every reason at once, in the order of the file."""

    def __init__(self, problems: Iterable[Problem], *, source: str | None = None) -> None:
        self.problems = tuple(problems)
        self.source = source
        count = len(self.problems)
        head = f"{source or 'the policy'} has {count} problem{'' if count == 1 else 's'}"
        super().__init__("\n".join([f"{head}:", *(f"  {problem}" for problem in self.problems)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem on its way: still by path, and with the paths of all values that it was concluded from.

    A conclusion from a value that is itself wrong is dropped, so that one slip is reported once.
    """

    path: Path
    message: str
    value: object = ABSENT
    about: tuple[Path, ...] = ()
    is_warning: bool = False


def path_text(path: Path) -> str:
    """`pools.chat.replicas[0].address`; keys that are not plain words are quoted in brackets."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif _PLAIN_KEY.fullmatch(step) and not _looks_secret(step):
            text += f".{step}" if text else step
        else:
            text += f"[{quoted(step)}]"
    return text


def shown(value: object, path: Path) -> str | None:
    """A value as it may be shown in an error: short, on one line, and never a credential."""
    if value is ABSENT:
        return None
    if isinstance(value, dict):
        return "(a mapping)" if value else "{}"
    if isinstance(value, list | tuple):
        return "(a list)" if value else "[]"
    # Keys are found where their digests belong, and where only the header that has them is named.
    if value is not None and ("key_sha256" in path or path[-1:] == ("api_key",)):
        return f"(hidden, {len(str(value))} characters)"
    if isinstance(value, str):
        return f'"{value}"' if _is_plain_path(value, path) else quoted(value)
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | Decimal):
        text = str(value)
        return text if len(text) <= LONGEST_SHOWN_CHARS else f"{text[:LONGEST_SHOWN_CHARS]}…"
    return None


def quoted(text: str) -> str:
    """Text from the file as it may be shown: in quotes, on one line, and never a credential."""
    if _looks_secret(text):
        return f"(hidden, {len(text)} characters)"
    short = text if len(text) <= LONGEST_SHOWN_CHARS else f"{text[:LONGEST_SHOWN_CHARS]}…"
    # JSON escapes keep control characters, and with them terminal sequences, out of logs and screens.
    quoted = json.dumps(short, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in quoted)


def without_credentials(message: str) -> str:
    """A message in which nothing that has the form of a credential is left, wherever it came from."""
    return _WORD.sub(lambda word: "(hidden)" if _CREDENTIAL.search(word[0]) else word[0], message)


def _is_plain_path(text: str, path: Path) -> bool:
    """Folders of model caches are named by hashes: for paths, that is no sign of a secret."""
    is_path = path[:1] == ("models",) and path[-1] in ("tokenizer", "chat_template")
    return is_path and text.isprintable() and '"' not in text and not _CREDENTIAL.search(text)


def _looks_secret(text: str) -> bool:
    return bool(_CREDENTIAL.search(text) or _HIGH_ENTROPY.search(text))
