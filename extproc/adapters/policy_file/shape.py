"""Reading plain values into the schema: everything that is wrong with their shape, and what is left.

One pass over the values finds every error of shape. The wrong values are then taken out, so that the rest
can still be checked for contradictions in the same run: defaults or the simplest right values stand in for
them. `Shaped.is_broken` says which paths must not be concluded from any more.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from extproc.adapters.policy_file.problems import ABSENT, Finding, Path, shown
from extproc.adapters.policy_file.schema import PolicySpec, policy_json_schema
from extproc.adapters.policy_file.values import REFUSED

_MOST_PASSES = 12
"""What stands in for a wrong value can lack keys of its own: one pass per level, and there are seven."""

_UNKNOWN_KEY_HINTS: Mapping[Path, str] = {
    ("lanes", "overflow", "max_input_tokens"): "overflow takes every size; remove it",
    ("lanes", "overflow", "max_output_tokens"): "overflow takes every size; remove it",
}

_GONE = object()


@dataclass(slots=True, kw_only=True)
class Shaped:
    """What could be read. `spec` is `None` when nothing can be concluded from the rest."""

    spec: PolicySpec | None = None
    findings: list[Finding] = field(default_factory=list)
    _broken: set[Path] = field(default_factory=set)
    _above_broken: set[Path] = field(default_factory=set)
    _positions: dict[Path, list[int]] = field(default_factory=dict)

    def mark_broken(self, path: Path) -> None:
        """Nothing may be concluded from the value at `path`, from what is in it, or from what it is in."""
        self._broken.add(path)
        self._above_broken.update(path[:length] for length in range(len(path)))

    def is_broken(self, path: Path) -> bool:
        """Whether the value at `path` is not, or not wholly, what the file says."""
        return path in self._above_broken or any(
            path[:length] in self._broken for length in range(len(path) + 1)
        )

    def original(self, path: Path) -> Path:
        """The place in the file of what is at `path` in `spec`: list items may have moved up."""
        found: Path = ()
        for step in path:
            positions = self._positions.get(found)
            moved = isinstance(step, int) and positions is not None and step < len(positions)
            found = (*found, positions[step] if moved and positions is not None else step)  # type: ignore[index]
        return found

    def remember_positions(self, path: Path, kept: list[int]) -> None:
        """The list at `path` now has only the items that were at the positions `kept`."""
        before = self._positions.get(path)
        self._positions[path] = kept if before is None else [before[position] for position in kept]


def shape(value: object, *, already_broken: Iterable[Path] = ()) -> Shaped:
    """Read a document's value into the schema, as far as it goes."""
    shaped = Shaped()
    for path in already_broken:
        shaped.mark_broken(path)
    if not isinstance(value, dict):
        shaped.findings.append(
            Finding(
                path=(), message=f"must be a mapping with the keys {_keys_of(())}", value=_or_absent(value)
            )
        )
        return shaped
    rest = copy.deepcopy(value)
    for number in range(_MOST_PASSES):
        try:
            shaped.spec = PolicySpec.model_validate(rest)
            break
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=False)
            if number == 0:
                shaped.findings.extend(_finding(detail) for detail in details)
            for detail in details:
                _take_out(rest, detail, shaped)
            _compact(rest, (), shaped)
    return shaped


def _take_out(rest: dict[str, Any], detail: ErrorDetails, shaped: Shaped) -> None:
    """Remove a wrong value, or put the simplest right one in its place if there has to be one."""
    path = _path(detail)
    shaped.mark_broken(shaped.original(path))
    holder: Any = rest
    for step in path[:-1]:
        if isinstance(holder, dict) and step not in holder:
            return  # went with what it is in: the name of an entry and its content may both be wrong
        holder = holder[step]
        if holder is _GONE:
            return
    last = path[-1]
    if detail["type"] == "extra_forbidden":
        # It may be a misspelling of any key that is not there, so their defaults are not what was meant.
        for key in _schema_at(path[:-1])["properties"]:
            if key not in holder:
                shaped.mark_broken((*shaped.original(path[:-1]), key))
    if isinstance(holder, list):
        holder[int(last)] = _GONE
    elif last in _schema_at(path[:-1]).get("required", ()):
        holder[last] = _stand_in(_schema_at(path))
    else:
        holder.pop(last, None)


def _stand_in(schema: Mapping[str, Any]) -> object:
    for form in (schema, *schema.get("anyOf", ())):
        if "const" in form:
            return form["const"]
        if form.get("type") == "integer":
            return form["minimum"]
    return {"object": {}, "array": []}.get(schema.get("type", ""), "x")


def _compact(value: object, path: Path, shaped: Shaped) -> None:
    """Close the gaps that removed items left in lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _compact(inner, (*path, key), shaped)
    elif isinstance(value, list):
        kept = [position for position, inner in enumerate(value) if inner is not _GONE]
        for position in kept:
            _compact(value[position], (*path, position), shaped)
        if len(kept) < len(value):
            value[:] = [value[position] for position in kept]
            shaped.remember_positions(shaped.original(path), kept)


def _finding(detail: ErrorDetails) -> Finding:
    path = _path(detail)
    value: object = detail["input"]
    kind = detail["type"]
    if kind == "missing":
        return Finding(path=path, message=f"is missing; add it: {_described(path)}")
    if kind == "extra_forbidden":
        return Finding(path=path, message=_unknown_key(path))
    if _is_key_error(detail):
        return Finding(path=path, message=f"the key {detail['msg']}")
    if value is None and kind != REFUSED:
        return Finding(path=path, message="is empty; fill it in or remove the key", value=value)
    return Finding(path=path, message=_wrong_value(path, detail), value=value)


def _wrong_value(path: Path, detail: ErrorDetails) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == REFUSED:
        return detail["msg"]
    if kind in ("enum", "literal_error"):
        *others, last = _allowed(path)
        wanted = f"{', '.join(others)} or {last}" if others else f"{last}; this release reads no other"
        return f"must be {wanted}{_nearest(value, [*others, last])}"
    if kind == "bool_type":
        return "must be true or false"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = _keys_of(path)
        return f"must be a mapping with the keys {keys}" if keys else "must be a mapping of names"
    if kind in ("tuple_type", "list_type"):
        return f"must be a list; write [{shown(value, path)}]" if isinstance(value, str) else "must be a list"
    return f"is not valid: {detail['msg']}"


def _unknown_key(path: Path) -> str:
    hint = _UNKNOWN_KEY_HINTS.get(path)
    if hint is not None:
        return hint
    known = list(_schema_at(path[:-1]).get("properties", {}))
    return f"is not a known key{_nearest(path[-1], known)}; known here: {', '.join(known)}"


def _nearest(word: object, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word)[:64], list(words), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _path(detail: ErrorDetails) -> Path:
    return detail["loc"][:-1] if _is_key_error(detail) else detail["loc"]


def _is_key_error(detail: ErrorDetails) -> bool:
    return bool(detail["loc"]) and detail["loc"][-1] == "[key]"


def _or_absent(value: object) -> object:
    return ABSENT if value is None or not isinstance(value, str | int | Decimal | list) else value


def _described(path: Path) -> str:
    description = str(_schema_at(path).get("description", "required"))
    return description[:1].lower() + description[1:].rstrip(".")


def _allowed(path: Path) -> list[str]:
    schema = _schema_at(path)
    return [str(schema["const"])] if "const" in schema else [str(value) for value in schema.get("enum", ())]


def _keys_of(path: Path) -> str:
    return ", ".join(_schema_at(path).get("properties", ()))


@lru_cache(maxsize=1)
def _json_schema() -> dict[str, Any]:
    return policy_json_schema()


def _schema_at(path: Path) -> Mapping[str, Any]:
    """What the JSON Schema says about the value at `path`; nothing if it has no such place."""
    schema: Mapping[str, Any] = _json_schema()
    for step in path:
        if isinstance(step, int):
            schema = schema.get("items", {})
        else:
            properties = schema.get("properties", {})
            entry = schema.get("additionalProperties")
            schema = properties.get(step) or (entry if isinstance(entry, dict) else {})
        schema = _resolved(schema)
    return schema


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    for choice in schema.get("anyOf", ()):
        if "$ref" in choice or choice.get("type") == "array":
            schema = {**choice, **schema}
    reference = schema.get("$ref")
    if reference is None:
        return schema
    return {**_json_schema()["$defs"][reference.removeprefix("#/$defs/")], **schema}
