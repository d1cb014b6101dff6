"""The configuration reference, written from the schema: one source for editors, documentation and checks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from extproc.adapters.policy_file import policy_json_schema

_INTRODUCTION = """\
<!-- Written by `extproc schema --markdown`; change the schema, not this file. -->
# Policy files

A policy says which models run where, how much of them, and for whom. It is one YAML file:
[small.yaml](small.yaml) can be read in a minute, [full.yaml](full.yaml) explains every key.

    extproc check FILE                 is it good? shows the policy with every default, and its version
    extproc check FILE --strict        the same, and warnings fail, too (for CI)
    extproc check FILE --tokenizers    also loads tokenizers and chat templates, as the service will
    extproc check FILE --json          the same for programs
    extproc schema                     the JSON Schema, for editors

[policy.schema.json](policy.schema.json) is that schema; the first line of both samples points editors to it.

- Everything that is wrong is listed at once, with line, key, value and remedy. A file with an error is never
  used: on a reload the last good policy stays in force.
- The version is a hash of what the policy means, tokenizers and chat templates included. It changes with every
  change that can change a decision, and with no other.
- Amounts are whole numbers and may be grouped (`96_000`). Keys in `_ms` and `_bytes` also take a number with
  its unit: `500ms`, `2s`, `10min`, `1h`; `512KiB`, `16MiB`. `_permille` is in thousandths.
- YAML is read as YAML 1.2: `no` is text. Repeated keys, tags and merge keys are errors.
"""

_NAMES: Mapping[str, str] = {
    "models": "MODEL",
    "pools": "POOL",
    "tenants.tiers": "TIER",
    "tenants.members": "TENANT",
}
"""What stands for the names that a policy is free to choose, by where they are."""


def as_json() -> str:
    """The JSON Schema of policy files."""
    return json.dumps(policy_json_schema(), indent=2, ensure_ascii=False) + "\n"


def as_markdown() -> str:
    """The configuration reference: every key with its values, its default and its meaning."""
    schema = policy_json_schema()
    definitions: Mapping[str, Any] = schema["$defs"]
    parts = [_INTRODUCTION]
    for place, mapping in _mappings(schema, definitions, "", ()):
        parts.append(f"## {place}\n\n{mapping['description']}\n" if place else "## The file\n")
        parts.append("\n".join(_rows(mapping, definitions)) + "\n")
    return "\n".join(parts)


def _mappings(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], place: str, above: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each mapping with fixed keys, outermost first, with its place: `pools.NAME.replicas[]`."""
    if "properties" in schema:
        yield place, schema
        for key, value in schema["properties"].items():
            yield from _mappings(value, definitions, f"{place}.{key}" if place else key, above)
    if "propertyNames" in schema:
        yield from _mappings(schema["additionalProperties"], definitions, f"{place}.{_NAMES[place]}", above)
    if "items" in schema:
        yield from _mappings(schema["items"], definitions, f"{place}[]", above)
    for choice in (schema, *schema.get("anyOf", ())):
        name = choice.get("$ref", "").removeprefix("#/$defs/")
        if name and name not in above:
            yield from _mappings(definitions[name], definitions, place, (*above, name))


def _rows(mapping: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    yield "| key | values | default | meaning |"
    yield "|---|---|---|---|"
    required = mapping.get("required", ())
    for key, value in mapping["properties"].items():
        default = "**required**" if key in required else _default(value)
        meaning = " ".join(value["description"].split()).replace("|", "\\|")
        yield f"| `{key}` | {_values(value, definitions)} | {default} | {meaning} |"


def _default(value: Mapping[str, Any]) -> str:
    if "default" not in value:
        return ""
    default = value["default"]
    if isinstance(default, list):
        return f"`[{', '.join(map(str, default))}]`"
    if isinstance(default, bool):
        return "`true`" if default else "`false`"
    return f"`{default:_}`" if isinstance(default, int) else f"`{default}`"


def _values(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """The values a key takes, in a few words."""
    reference = value.get("$ref", "").removeprefix("#/$defs/")
    if reference:
        return _values(definitions[reference], definitions)
    if "anyOf" in value:
        kinds = [choice for choice in value["anyOf"] if choice.get("type") != "null"]
        return _values(kinds[0], definitions)
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{item}`" for item in value["enum"])
    kind = value.get("type")
    if kind in ("integer", "number"):
        return f"{value['minimum']:_} to {value['maximum']:_}"
    if kind == "array":
        return f"list of {_values(value['items'], definitions)}"
    if kind == "boolean":
        return "`true`, `false`"
    if kind == "string":
        return "text"
    return "mapping by name" if "propertyNames" in value else "mapping"
