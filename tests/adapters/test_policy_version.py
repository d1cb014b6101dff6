"""The policy version: it changes with everything that can change a decision, and with nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.adapters.policy_file import (
    PolicyError,
    effective_document,
    load_policy,
    parse_policy,
    without_key_digests,
)
from extproc.adapters.policy_file.schema import BulkLane, InteractiveLane, LimitsSpec, OverflowLane, PoolSpec
from extproc.adapters.policy_file.yaml_text import read_document
from extproc.domain.policy import Policy

SAMPLES = Path(__file__).parents[2] / "deploy" / "policies"
DIGESTS = ["a1" * 32, "b2" * 32]


def write_model_files(folder: Path) -> None:
    """A stand-in for a model's files: what it is does not matter, only that it stays the same."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    """A folder with a tokenizer and a chat template in it."""
    write_model_files(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    return tmp_path


def a_document() -> dict[str, Any]:
    """A policy in which every key has a value, and every number can go up or down by one."""
    value = read_document((SAMPLES / "full.yaml").read_text()).value
    assert isinstance(value, dict)
    for model in value["models"].values():
        model["tokenizer"] = "tokenizer.json"
    value["models"]["qwen3-32b"]["chat_template"] = "chat.jinja"
    value["lanes"]["interactive"]["share_permille"] = 900
    value["tenants"]["tiers"]["gold"]["lanes"] = ["interactive", "bulk"]
    value["tenants"]["members"]["initech"]["key_sha256"] = ["c3" * 32]
    value["tenants"]["members"]["public"]["key_sha256"] = ["d4" * 32]
    return value


def load(document: object, base_dir: Path) -> Policy:
    """The policy that a document means."""
    return parse_policy(json.dumps(document, default=float), base_dir)


def version(document: object, base_dir: Path) -> str:
    """Its version."""
    return load(document, base_dir).version


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every scalar."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for position, inner in enumerate(value) for leaf in leaves(inner, (*path, position))]
    return [path]


def variants(value: object, path: tuple[Any, ...]) -> list[object]:
    """Other values that may be at a path of an effective document."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [value + 0.5]
    others = {
        "posture": ["local", "closed", "open"],
        "engine": ["vllm", "llama.cpp", "tgi", "sglang"],
        "lanes": ["chat", "batch", "long", "large", "interactive", "bulk", "overflow"],
        "fallback": ["chat", "long", "spare", "https://us.example.org"],
        "tier": ["gold", "silver", "open"],
        "anonymous": ["refuse"],
        "address": ["10.9.9.9:9"],
        "key_sha256": DIGESTS,
    }
    key = next((step for step in reversed(path) if step in others), None)
    return [other for other in others.get(str(key), [f"{value}-x"]) if other != value]


def test_every_effective_change_changes_the_version(base_dir: Path) -> None:
    """Each single value of the effective policy, changed to another usable one, gives another version."""
    written = a_document()
    written["models"]["spare"] = written["models"]["llama-3.1-8b"] | {"aliases": ["other"]}
    document = effective_document(load(written, base_dir))
    first = version(document, base_dir)
    seen = {first}
    untried = []
    for path in leaves(document):
        if path == ("version",) or path[-1] in ("tokenizer", "chat_template"):
            continue
        tried = 0
        holder = changed = copy.deepcopy(document)
        for step in path[:-1]:
            holder = holder[step]
        for other in variants(holder[path[-1]], path):
            holder[path[-1]] = other
            try:
                found = version(changed, base_dir)
            except PolicyError:
                continue
            tried += 1
            assert found not in seen, f"{path} = {other} changes nothing"
            seen.add(found)
        if not tried:
            untried.append(path)
    # The anonymous tenant has to be enabled.
    assert untried == [("tenants", "members", "public", "enabled")]
    assert len(seen) > 100


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["models"].pop("qwen3-32b"),
        lambda document: document["models"]["llama-3.1-8b"].pop("default_output_tokens"),
        lambda document: document["models"]["llama-3.1-8b"]["aliases"].append("new"),
        lambda document: document["models"]["llama-3.1-8b"]["lanes"].pop("overflow"),
        lambda document: document["pools"]["chat"]["replicas"].reverse(),
        lambda document: document["pools"]["chat"]["replicas"][0].pop("address"),
        lambda document: document["tenants"]["tiers"]["gold"].pop("inflight_tokens"),
        lambda document: document["tenants"]["members"]["acme"]["key_sha256"].pop(),
        lambda document: document["tenants"].update(identity={"api_key": {"header": "x-api-key"}}),
    ],
)
def test_added_and_removed_entries_change_the_version(
    change: Callable[[Any], object], base_dir: Path
) -> None:
    """What is there or not there counts as much as what it says."""
    document = a_document()
    change(document)
    assert version(document, base_dir) != version(a_document(), base_dir)


def _spell_out_defaults(document: dict[str, Any]) -> None:
    for lane, spec in (("interactive", InteractiveLane), ("bulk", BulkLane), ("overflow", OverflowLane)):
        document["lanes"][lane] = spec().model_dump(mode="json")
    document["limits"] = LimitsSpec().model_dump(mode="json")
    document["pools"]["chat"]["request_cap"] = PoolSpec(replicas=()).request_cap


def _leave_out_defaults(document: dict[str, Any]) -> None:
    del document["lanes"], document["limits"], document["pools"]["chat"]["request_cap"]


def test_writing_a_default_or_leaving_it_out_is_the_same_policy(base_dir: Path) -> None:
    """A default has no version of its own."""
    spelled_out, left_out = a_document(), a_document()
    _spell_out_defaults(spelled_out)
    _leave_out_defaults(left_out)
    assert version(spelled_out, base_dir) == version(left_out, base_dir)


def test_what_decides_nothing_does_not_change_the_version(base_dir: Path) -> None:
    """Comments, spelling of amounts, order of keys and sets, and tiers that nobody has are not content."""
    document = a_document()
    first = version(document, base_dir)

    reordered = {key: document[key] for key in reversed(document)}
    reordered["models"] = dict(reversed(document["models"].items()))
    reordered["tenants"] = document["tenants"] | {
        "members": dict(reversed(document["tenants"]["members"].items())),
        "tiers": document["tenants"]["tiers"] | {"unused": {"weight": 3}},
    }
    assert version(reordered, base_dir) == first

    respelled = a_document()
    respelled["limits"]["body_bytes"] = 8 * 1024 * 1024
    respelled["lanes"]["bulk"]["deadline_ms"] = "600s"
    respelled["models"]["llama-3.1-8b"]["aliases"].reverse()
    respelled["models"]["llama-3.1-8b"]["cost_factor"] = 1.0
    respelled["tenants"]["members"]["acme"]["key_sha256"].reverse()
    respelled["tenants"]["tiers"]["gold"]["lanes"].reverse()
    respelled["pools"]["batch"]["cluster"] = "batch"
    assert version(respelled, base_dir) == first

    commented = f"# a comment\n{json.dumps(document, indent=3, default=float)}\n# and another\n"
    assert parse_policy(commented, base_dir).version == first


def test_model_files_count_by_content_and_not_by_place(base_dir: Path) -> None:
    """A moved tokenizer is the same policy; a changed one, or a changed file beside it, is another."""
    document = a_document()
    first = version(document, base_dir)

    write_model_files(base_dir / "elsewhere")
    for model in document["models"].values():
        model["tokenizer"] = str(base_dir / "elsewhere" / "tokenizer.json")
    assert version(document, base_dir) == first

    seen = {first}
    for name, content in (
        ("elsewhere/tokenizer.json", '{"model": {"vocab": {"a": 1}}}'),
        ("elsewhere/special_tokens_map.json", '{"eos_token": "</s>"}'),
        ("elsewhere/tokenizer_config.json", '{"bos_token": "<s>"}'),
        ("elsewhere/tokenizer_config.json", '{"bos_token": "<t>"}'),
        ("elsewhere/chat_template.jinja", "{{ messages }}"),
        ("elsewhere/chat_template.jinja", "{{ messages[0] }}"),
        ("chat.jinja", "{{ messages[1] }}"),
    ):
        (base_dir / name).write_text(content)
        found = version(document, base_dir)
        assert found not in seen, name
        seen.add(found)
    (base_dir / "elsewhere" / "vocab.txt").write_text("nothing that is read")
    assert version(document, base_dir) in seen


@pytest.mark.parametrize("name", ["small.yaml", "full.yaml"])
def test_the_effective_policy_is_the_same_policy(name: str) -> None:
    """Saved as a file, the effective document loads as an equal policy with the same version."""
    policy = load_policy(SAMPLES / name)
    again = load(effective_document(policy), Path("/"))
    assert again.version == policy.version
    assert effective_document(again) == effective_document(policy)
    assert again.models.keys() == policy.models.keys()
    assert again.lanes == policy.lanes
    assert again.pools == policy.pools
    assert {id_: tenant.tier for id_, tenant in again.tenants.items()} == {
        id_: tenant.tier for id_, tenant in policy.tenants.items()
    }


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.fixed_dictionaries(
        {
            "factor": st.integers(1, 1_000_000),
            "deadline_ms": st.integers(30_000, 3_600_000),
            "share_permille": st.integers(100, 1000),
            "ceiling_tokens": st.integers(20, 10**10),
            "guard_band_permille": st.integers(0, 900),
            "tokens_per_minute": st.integers(10**4, 10**10),
            "weight": st.integers(1, 1000),
            "body_bytes": st.integers(1024, 1024**3),
        }
    )
)
def test_amounts_survive_the_round_trip(numbers: dict[str, int]) -> None:
    """Whatever the amounts are, the effective document means the same policy, to the last digit."""
    document = a_document()
    document["models"]["llama-3.1-8b"]["tokenizer"] = str(
        SAMPLES.parents[1] / "extproc/sim/tokenizer/tokenizer.json"
    )
    del document["models"]["qwen3-32b"]
    document["models"]["llama-3.1-8b"]["cost_factor"] = numbers["factor"] / 1000
    document["lanes"]["bulk"] |= {key: numbers[key] for key in ("deadline_ms", "share_permille")}
    document["pools"]["chat"]["guard_band_permille"] = numbers["guard_band_permille"]
    for replica in document["pools"]["chat"]["replicas"]:
        replica["ceiling_tokens"] = numbers["ceiling_tokens"]
    gold = document["tenants"]["tiers"]["gold"]
    gold |= {key: numbers[key] for key in ("tokens_per_minute", "weight")}
    document["tenants"]["tiers"] = {"gold": {k: v for k, v in gold.items() if k != "burst_tokens"}}
    document["tenants"]["members"] = {"acme": document["tenants"]["members"]["acme"]}
    document["tenants"]["anonymous"] = "refuse"
    document["limits"]["body_bytes"] = numbers["body_bytes"]
    policy = load(document, Path("/"))
    assert policy.models["llama-3.1-8b"].cost_factor_permille == numbers["factor"]
    assert policy.pools["chat"].replicas[0].ceiling_tokens == numbers["ceiling_tokens"]
    assert policy.tenants["acme"].tier.quota.burst_tokens == numbers["tokens_per_minute"]
    again = load(effective_document(policy), Path("/"))
    assert again.version == policy.version
    assert (again.lanes, again.pools, again.tenants) == (policy.lanes, policy.pools, policy.tenants)


def test_key_digests_can_be_left_out_of_what_is_shown() -> None:
    """What is printed names keys by their first characters only, and nothing else is cut."""
    document = effective_document(load_policy(SAMPLES / "full.yaml"))
    printed = without_key_digests(document)
    for id_, member in document["tenants"]["members"].items():
        assert printed["tenants"]["members"][id_]["key_sha256"] == [
            f"{key[:8]}…" for key in member["key_sha256"]
        ]
        assert not any(digest in json.dumps(printed) for digest in member["key_sha256"])
    assert {key for key in printed if printed[key] != document[key]} == {"tenants"}
