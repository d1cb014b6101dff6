"""How a field of a request body is read: absent and null are the same, anything of a wrong type is refused.

JSON's `true` is not 1 and `16.0` is not 16 here, although the engines' parsers coerce them: a number that two
readers may read differently is not a number to reserve by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.dialects.reading import LARGEST_COUNT, BadRequest, Truncation
from extproc.domain.outcome import Reason

LONGEST_MODEL_NAME = 256

_DICT = frozenset({dict})


def bounded_integer(
    fields: Mapping[str, Any], name: str, *, at_least: int = 0, prefix: str = ""
) -> int | None:
    """A whole number from `at_least` to `LARGEST_COUNT`. `prefix` is where the fields stand in the body."""
    value = fields.get(name)
    if value is None:
        return None
    param = prefix + name
    if type(value) is not int:
        raise BadRequest(f"`{param}` must be a whole number", param=param)
    if not at_least <= value <= LARGEST_COUNT:
        raise BadRequest(f"`{param}` must be from {at_least} to {LARGEST_COUNT}", param=param)
    return value


def boolean(fields: Mapping[str, Any], name: str, *, default: bool, prefix: str = "") -> bool:
    """`true` or `false`."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"`{prefix}{name}` must be true or false", param=prefix + name)
    return value


def text(fields: Mapping[str, Any], name: str, *, prefix: str = "") -> str | None:
    """A string."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRequest(f"`{prefix}{name}` must be a string", param=prefix + name)
    return value


def mapping(fields: Mapping[str, Any], name: str, *, prefix: str = "") -> Mapping[str, Any] | None:
    """A JSON object."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadRequest(f"`{prefix}{name}` must be an object", param=prefix + name)
    return value


def mappings(
    fields: Mapping[str, Any], name: str, *, prefix: str = "", may_be_empty: bool = False
) -> list[Mapping[str, Any]] | None:
    """A list of JSON objects, not empty unless that may be."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not (
        set(map(type, value)) <= _DICT or all(isinstance(item, Mapping) for item in value)
    ):
        raise BadRequest(f"`{prefix}{name}` must be a list of objects", param=prefix + name)
    if not value and not may_be_empty:
        raise BadRequest(f"`{prefix}{name}` must not be empty", param=prefix + name)
    return value


def needed_text(fields: Mapping[str, Any], name: str, *, prefix: str = "") -> str:
    """A string that must be there."""
    value = text(fields, name, prefix=prefix)
    if value is None:
        raise BadRequest(f"`{prefix}{name}` must be a string", param=prefix + name)
    return value


def required(name: str) -> BadRequest:
    """The refusal of a body that lacks `name`."""
    return BadRequest(f"`{name}` is required", param=name, reason=Reason.MALFORMED_REQUEST)


def model_name(body: Mapping[str, Any], name: str = "model") -> str:
    """The model that the request names; it must name one."""
    value = optional_model_name(body, name)
    if value is None:
        raise required(name)
    return value


def optional_model_name(body: Mapping[str, Any], name: str = "model") -> str | None:
    """The model that the request names, in the APIs where it need not."""
    value = text(body, name)
    if value is not None and not 1 <= len(value) <= LONGEST_MODEL_NAME:
        raise BadRequest(f"`{name}` must have 1 to {LONGEST_MODEL_NAME} characters", param=name)
    return value


def choices(fields: Mapping[str, Any], *, prefix: str = "") -> int:
    """How many answers the engine will make: `n`, or `best_of` where it makes more and shows `n` of them."""
    shown = bounded_integer(fields, "n", at_least=1, prefix=prefix)
    made = bounded_integer(fields, "best_of", at_least=1, prefix=prefix)
    return max(shown or 1, made or 1)


def truncation(fields: Mapping[str, Any], name: str = "truncate_prompt_tokens") -> Truncation | None:
    """What the client asks the engine to cut; -1 is vLLM's word for "to the context window"."""
    if fields.get(name) == -1 and type(fields[name]) is int:
        return Truncation(keep_tokens=None)
    keep_tokens = bounded_integer(fields, name)
    return None if keep_tokens is None else Truncation(keep_tokens=keep_tokens)
