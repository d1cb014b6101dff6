"""The schema of policy files: documented in full, in step with its documents, and the same for editors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from extproc.adapters.policy_file import (
    check_policy,
    check_text,
    effective_document,
    load_policy,
    policy_json_schema,
)
from extproc.adapters.policy_file.schema import PolicySpec
from extproc.adapters.policy_file.values import Wait, WorkUnits
from extproc.adapters.policy_file.yaml_text import read_document

SAMPLES = Path(__file__).parents[2] / "deploy" / "policies"
POLICIES = Path(__file__).parents[1] / "policies"


def document(path: Path) -> dict[str, Any]:
    """The plain values of a policy file."""
    value = read_document(path.read_text()).value
    assert isinstance(value, dict)
    return value


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the definition that it or one of its choices refers to."""
    for choice in (schema, *schema.get("anyOf", ())):
        if "$ref" in choice:
            definition: Mapping[str, Any] = policy_json_schema()["$defs"][
                choice["$ref"].removeprefix("#/$defs/")
            ]
            return definition
    return schema


def missing(schema: Mapping[str, Any], values: list[Any], place: str = "") -> Iterator[str]:
    """Keys of the schema that none of the values at its place has."""
    schema = resolved(schema)
    for key, inner in schema.get("properties", {}).items():
        found = [value[key] for value in values if key in value]
        if not found:
            yield f"{place}.{key}"
        yield from missing(inner, found, f"{place}.{key}")
    if "propertyNames" in schema:
        yield from missing(
            schema["additionalProperties"],
            [item for value in values for item in value.values()],
            f"{place}.*",
        )
    if schema.get("type") == "array":
        yield from missing(schema["items"], [item for value in values for item in value], f"{place}[]")


def test_the_full_sample_has_every_key_of_the_schema() -> None:
    """Whoever looks for a key finds it in full.yaml, at its place; other sources of identity as comments."""
    absent = set(missing(policy_json_schema(), [document(SAMPLES / "full.yaml")]))
    commented = {
        f".tenants.identity.{key}" for key in ("header", "metadata", "metadata.namespace", "metadata.path")
    }
    assert absent == commented
    text = (SAMPLES / "full.yaml").read_text()
    for place in commented:
        assert re.search(rf"^ *# .*\b{place.rsplit('.', 1)[1]}:", text, re.MULTILINE), place


def test_the_effective_policy_has_every_key_of_the_schema() -> None:
    """Nothing that a policy says is left out of what is shown, versioned and printed for programs."""
    effective = effective_document(load_policy(SAMPLES / "full.yaml"))
    absent = set(missing(policy_json_schema(), [effective]))
    assert {place for place in absent if not place.startswith(".tenants.identity.")} == set()


def test_the_alternatives_in_the_full_sample_can_be_switched_on() -> None:
    """The commented sources of identity are right as they stand."""
    text = (SAMPLES / "full.yaml").read_text()
    chosen = "    api_key:\n      header: authorization\n"
    assert chosen in text
    without_keys = re.sub(r"( +)key_sha256:(?: \[.*\]\n|\n(?: +- .*\n)+)", "", text.replace(chosen, ""))
    for start, source in (("header:", "x-tenant-id"), ("metadata:", "envoy.filters.http.jwt_authn")):
        switched = re.sub(
            rf"^    # ({start}(?:.*\n    #  )*.*)$", _uncommented, without_keys, flags=re.MULTILINE
        )
        checked = check_text(switched, base_dir=SAMPLES)
        assert source in str(checked.policy.identity)
        assert not checked.warnings


def _uncommented(match: re.Match[str]) -> str:
    return re.sub(r"^    # ", "    ", match[0], flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["small.yaml", "full.yaml"])
def test_the_samples_load_without_warnings(name: str) -> None:
    """A sample is something to start from."""
    assert check_policy(SAMPLES / name).warnings == ()


def test_the_small_sample_can_be_read_in_a_minute() -> None:
    """About thirty lines."""
    assert len((SAMPLES / "small.yaml").read_text().splitlines()) <= 32


def test_every_key_and_every_mapping_is_documented() -> None:
    """Editors and the reference have a sentence for everything."""
    schema = policy_json_schema()
    for name, definition in {"": schema, **schema["$defs"]}.items():
        assert definition.get("description"), name
        for key, value in definition.get("properties", {}).items():
            assert value.get("description", "").endswith("."), f"{name}.{key}"


def plain(value: Any) -> Any:
    """A document as an editor's JSON Schema validator sees it."""
    return json.loads(json.dumps(value, default=float))


@pytest.mark.parametrize(
    "path", [*SAMPLES.glob("*.yaml"), POLICIES / "good.yaml"], ids=lambda path: path.stem
)
def test_editors_accept_what_is_accepted(path: Path) -> None:
    """A usable policy is valid by the JSON Schema, grouped digits and units included."""
    jsonschema.Draft202012Validator(policy_json_schema()).validate(plain(document(path)))


@pytest.mark.parametrize("name", ["bad_shape", "bad_values", "bad_nobody"])
def test_editors_refuse_what_is_refused_for_its_shape(name: str) -> None:
    """The JSON Schema underlines at least the lines that `check` names, contradictions aside."""
    text = (POLICIES / f"{name}.yaml").read_text()
    value = read_document(text)
    validator = jsonschema.Draft202012Validator(policy_json_schema())
    found = set()
    for error in validator.iter_errors(plain(value.value)):
        path = tuple(error.absolute_path)
        # Both an unknown and a missing key are reported at their parent.
        found.add(value.line_of(path))
        if "propertyNames" in error.absolute_schema_path:
            found.add(value.line_of((*path, error.instance)))
        if error.validator == "additionalProperties":
            found.update(value.line_of((*path, key)) for key in error.instance)
    named = {int(line) for line in re.findall(r"^#! line (\d+): ", text, re.MULTILINE)}
    assert named <= found, sorted(named - found)


def test_json_schema_and_reader_agree_on_amounts() -> None:
    """What the JSON Schema says about an amount is what the reader does with it."""
    for kind in (Wait, WorkUnits):
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        validator = jsonschema.Draft202012Validator(adapter.json_schema())
        for value in (
            0,
            1,
            1.5,
            3_600_000,
            3_600_001,
            10**10,
            10**10 + 1,
            "1_000",
            "10_00",
            "_1",
            "1s",
            "1.5 s",
            "s",
            "",
        ):
            try:
                adapter.validate_python(Decimal(str(value)) if isinstance(value, float) else value)
                accepted = True
            except ValidationError:
                accepted = False
            assert validator.is_valid(value) == accepted, (kind, value)


def test_the_policy_spec_is_what_the_schema_describes() -> None:
    """The JSON Schema has the keys of the model that reads files."""
    assert list(policy_json_schema()["properties"]) == list(PolicySpec.model_fields)
