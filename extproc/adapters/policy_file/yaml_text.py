"""YAML text as plain values that remember their lines, less what YAML allows and a policy must not.

Scalars follow the YAML 1.2 core schema, so that `no`, `1:30` and `2024-01-01` are text and nothing is an
octal number. Keys are always text. Numbers with a point are `Decimal`, exact as they are written.
Repeated keys, tags and merge keys are errors; anchors work, and count at full size each time they are used.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal

import yaml

from extproc.adapters.policy_file.problems import Finding, Path

LARGEST_FILE_BYTES = 4 * 1024 * 1024
"""Ten thousand tenants with an API key each need about 1.5 MB."""

MOST_NODES = 400_000
"""Keys and values together, anchors expanded."""

DEEPEST_NESTING = 24
"""A policy needs seven levels."""

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_TEXT_TAGS = frozenset({"!", "tag:yaml.org,2002:str"})
_INTEGER = re.compile(r"[-+]?[0-9]{1,100}")
_DECIMAL = re.compile(r"[-+]?(?:\.[0-9]{1,50}|[0-9]{1,50}(?:\.[0-9]{0,50})?)(?:[eE][-+]?[0-9]{1,4})?")
_WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    **dict.fromkeys(("null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class UnreadableText(Exception):
    """The text cannot be read as one YAML document. The message says why and what to do."""

    def __init__(self, message: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A YAML document: its value, the line of each key and item, and what is wrong with its form."""

    value: object
    lines: dict[Path, int]
    findings: tuple[Finding, ...]

    def line_of(self, path: Path) -> int | None:
        """The line of `path`, or of its nearest ancestor that is in the file."""
        for length in range(len(path), -1, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return line
        return None


def read_document(text: str) -> Document:
    """Read one YAML document. Raises `UnreadableText` where the rest of the text cannot be trusted."""
    if len(text) > LARGEST_FILE_BYTES:
        raise UnreadableText(f"is larger than {LARGEST_FILE_BYTES} bytes; a policy must be smaller")
    reading = _Reading(events=_events(text))
    try:
        value = reading.document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # `str(error)` would quote the line, and with it whatever secret stands on it.
        message = " ".join(part for part in (error.context, error.problem) if part)
        line = None if mark is None else mark.line + 1
        raise UnreadableText(f"is not YAML: {message}; mend the syntax", line=line) from None
    except yaml.YAMLError:
        raise UnreadableText("is not YAML: it has characters that YAML does not allow; remove them") from None
    return Document(value=value, lines=reading.lines, findings=tuple(reading.findings))


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None, "parsed events have marks"
    return event.start_mark.line + 1


def _events(text: str) -> Iterator[yaml.Event]:
    # libyaml reads from bytes in any case; an unpaired surrogate is its error to report, not ours.
    yield from yaml.parse(text.encode("utf-8", "replace"), Loader=_LOADER)


@dataclass(slots=True, kw_only=True)
class _Reading:
    events: Iterator[yaml.Event]
    lines: dict[Path, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    anchors: dict[str, tuple[object, int]] = field(default_factory=dict)
    nodes: int = 0
    depth: int = 0

    def document(self) -> object:
        """Read the one document that the text must be."""
        value: object = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise UnreadableText(
                        "has more than one YAML document; keep one and remove the `---` between them",
                        line=_line(event),
                    )
            elif not isinstance(event, yaml.StreamStartEvent | yaml.StreamEndEvent | yaml.DocumentEndEvent):
                value = self._value(event, path=())
        return value

    def _value(self, event: yaml.Event, *, path: Path | None) -> object:
        """The value that starts with `event`. A `path` of `None` is read over and not remembered."""
        line = _line(event)
        self._count(1, line)
        if path is not None:
            self.lines.setdefault(path, line)
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(event.anchor or "", line)
        nodes_before = self.nodes
        self.depth += 1
        if self.depth > DEEPEST_NESTING:
            raise UnreadableText(f"is nested deeper than {DEEPEST_NESTING} levels; make it flat", line=line)
        value: object
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._refuse_tag(event, path)
            value = self._sequence(path)
        elif isinstance(event, yaml.MappingStartEvent):
            self._refuse_tag(event, path)
            value = self._mapping(path)
        else:  # pragma: no cover - libyaml's grammar has no other event here
            raise UnreadableText("is not YAML: unexpected structure", line=line)
        self.depth -= 1
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - nodes_before)
        return value

    def _sequence(self, path: Path | None) -> list[object]:
        items: list[object] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._value(event, path=None if path is None else (*path, len(items))))
        return items

    def _mapping(self, path: Path | None) -> dict[str, object]:
        mapping: dict[str, object] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            line = _line(event)
            key = self._key(event, path)
            inner = None if path is None or key is None else (*path, key)
            if inner is not None and key in mapping:
                self.findings.append(
                    Finding(
                        path=inner,
                        message=f"appears again on line {line}; keep one of the two",
                        about=(inner,),
                    )
                )
                self._value(next(self.events), path=None)
                continue
            if inner is not None:
                self.lines[inner] = line
            value = self._value(next(self.events), path=inner)
            if key is not None:
                mapping[key] = value
        return mapping

    def _key(self, event: yaml.Event, path: Path | None) -> str | None:
        if isinstance(event, yaml.ScalarEvent) and (event.value != "<<" or event.style):
            self._count(1, _line(event))
            return str(event.value)
        if isinstance(event, yaml.ScalarEvent):
            message = "merge keys (`<<`) are not supported; write the keys out"
        else:
            message = "a key must be plain text; write a word before the colon"
            self._value(event, path=None)
        if path is not None:
            self.findings.append(Finding(path=path, message=message, about=(path,)))
        return None

    def _scalar(self, event: yaml.ScalarEvent, path: Path | None) -> object:
        text = str(event.value)
        if event.tag is not None:
            if event.tag not in _TEXT_TAGS:
                self._refuse_tag(event, path)
            return text
        # Only plain scalars are implicit in the first sense; quoted ones are text whatever they look like.
        return _plain(text) if event.implicit[0] and not event.style else text

    def _refuse_tag(self, event: yaml.NodeEvent, path: Path | None) -> None:
        tag = getattr(event, "tag", None)
        if tag is not None and path is not None:
            self.findings.append(
                Finding(
                    path=path, message="YAML tags (`!…`) are not supported; remove the tag", about=(path,)
                )
            )

    def _aliased(self, anchor: str, line: int) -> object:
        known = self.anchors.get(anchor)
        if known is None:
            raise UnreadableText(
                f"uses `*{anchor}` where no `&{anchor}` is complete; write it out", line=line
            )
        value, size = known
        self._count(size, line)
        return copy.deepcopy(value)  # each use is a value of its own: one may be wrong where another is not

    def _count(self, nodes: int, line: int) -> None:
        self.nodes += nodes
        if self.nodes > MOST_NODES:
            raise UnreadableText(
                f"has more than {MOST_NODES} values once its anchors are expanded; use fewer", line=line
            )


def _plain(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return Decimal(text)
    return text
