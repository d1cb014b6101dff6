"""Typed Envoy messages to YAML text for people and for Envoy, and the other way round."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import yaml
from betterproto2 import Casing, Message
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap
from envoy_data_plane.google.protobuf import Any as AnyMessage

WIDTH = 110
"""Columns that a value on one line may reach, and that a comment is wrapped at."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper for Envoy's YAML 1.1 reader, to which a bare `y` or `n` is a boolean."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Line breaks as escapes: a folded string would not survive being moved to another indentation."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^[yYnN]$"), list("yYnN"))


def packed(message: Message) -> AnyMessage:
    """`message` as the typed configuration of an extension."""
    return AnyMessage.pack(message)


def duration(milliseconds: int) -> timedelta:
    """Milliseconds as the type that configuration messages take."""
    return timedelta(milliseconds=milliseconds)


def to_yaml(bootstrap: Bootstrap, comments: Mapping[str, str]) -> str:
    """The configuration as YAML with the field names of Envoy's documentation.

    What fits on a line is on one line. `comments` go above the field that they are about: its key is the field's
    name, or its owner's and its own as `owner.name`; a list's element goes by its `name` in brackets.
    """
    plain = bootstrap.to_dict(casing=Casing.SNAKE)
    return "\n".join(_block(plain, owner="", indent=0, comments=comments)) + "\n"


def from_yaml(text: str) -> Bootstrap:
    """Reads configuration text into the typed form; a field or type that does not exist raises."""
    return Bootstrap.from_dict(yaml.safe_load(text))


def _block(value: Any, *, owner: str, indent: int, comments: Mapping[str, str]) -> Iterator[str]:
    """The lines of a mapping or a list that does not fit on one line."""
    entries = value.items() if isinstance(value, dict) else [(None, element) for element in value]
    for key, child in entries:
        name = _name(child) if key is None else key
        yield from _comment(owner, name, indent, comments)
        lead = " " * indent + ("- " if key is None else f"{_flow(key)}: ")
        flow = _flow(child)
        short = len(lead) + len(flow) <= WIDTH and not _has_comment(child, name, comments)
        if short or child in ({}, []):
            yield lead + flow
            continue
        if not isinstance(child, dict | list):
            yield lead + (_long(child, indent + 2) if isinstance(child, str) else flow)
            continue
        lines = _block(child, owner=name, indent=indent + 2, comments=comments)
        if key is None:
            # The element's first field stands right behind the dash, but for a comment above it.
            yield f"{lead}{next(lines).lstrip()}"
        else:
            yield lead.rstrip()
        yield from lines


def _long(text: str, indent: int) -> str:
    """A string over several lines, in double quotes, where a backslash joins a line with the next one."""
    lines = []
    for piece in _pieces(text, WIDTH - indent - 2):
        inner = _flow(piece, style='"')[1:-1]
        # A space at a line's start would be taken for indentation.
        lines.append(rf"\{inner}" if inner.startswith(" ") else inner)
    return '"' + f"\\\n{' ' * indent}".join(lines) + '"'


def _pieces(text: str, width: int) -> Iterator[str]:
    """`text` cut behind spaces and alternatives, into pieces of at most `width` characters where it has any."""
    while len(text) > width:
        cut = 1 + max(text.rfind(" ", 0, width), text.rfind("|", 0, width))
        if not cut:
            break
        yield text[:cut]
        text = text[cut:]
    yield text


def _name(element: Any) -> str:
    return f"[{element['name']}]" if isinstance(element, dict) and "name" in element else "[]"


def _comment(owner: str, name: str, indent: int, comments: Mapping[str, str]) -> Iterator[str]:
    text = comments.get(f"{owner}.{name}") or comments.get(name)
    if text is not None:
        prefix = " " * indent + "# "
        yield from textwrap.wrap(text, WIDTH, initial_indent=prefix, subsequent_indent=prefix)


def _has_comment(value: Any, owner: str, comments: Mapping[str, str]) -> bool:
    """Whether a comment belongs to anything inside `value`."""
    if isinstance(value, dict):
        named: list[tuple[str, Any]] = list(value.items())
    elif isinstance(value, list):
        named = [(_name(element), element) for element in value]
    else:
        return False
    return any(
        name in comments or f"{owner}.{name}" in comments or _has_comment(child, name, comments)
        for name, child in named
    )


def _flow(value: Any, style: str | None = None) -> str:
    """`value` on one line, quoted where a reader could take it for something else."""
    # In a list, so that a plain scalar is not written as a document of its own.
    text: str = yaml.dump(
        [value],
        Dumper=_Dumper,
        default_flow_style=True,
        default_style=style,
        sort_keys=False,
        width=float("inf"),
    )
    return text.strip()[1:-1]
