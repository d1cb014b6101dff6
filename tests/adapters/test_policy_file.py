"""Policy files: what is wrong with one is said all at once, and what is right becomes the policy in force."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.adapters.policy_file import (
    PolicyError,
    PolicyFile,
    check_policy,
    check_text,
    files,
    load_policy,
    parse_policy,
)
from extproc.adapters.policy_file.yaml_text import LARGEST_FILE_BYTES, read_document
from extproc.domain.policy import (
    ApiKeyIdentity,
    HeaderIdentity,
    Lane,
    MetadataIdentity,
    Policy,
    Posture,
    Replica,
)

POLICIES = Path(__file__).parents[1] / "policies"
SAMPLES = Path(__file__).parents[2] / "deploy" / "policies"
API_KEY = "sk-test-Zq8fLw2"
RANDOM_KEY = "Zq8fLw2NcV5xTb7RyKd3Mh6PgWs9"


def good() -> dict[str, Any]:
    """The document of the good policy, to change one thing of."""
    value = read_document((POLICIES / "good.yaml").read_text()).value
    assert isinstance(value, dict)
    return value


def everything() -> dict[str, Any]:
    """A document with a value at every key: the full sample, with all other sources of identity as well."""
    value = read_document((SAMPLES / "full.yaml").read_text()).value
    assert isinstance(value, dict)
    return value


def as_text(document: object) -> str:
    """JSON is YAML."""
    return json.dumps(document, default=float)


def load(document: object, base_dir: Path = POLICIES) -> Policy:
    """The policy that a document means."""
    return parse_policy(as_text(document), base_dir)


def problems(document: object, base_dir: Path = POLICIES) -> list[str]:
    """What is wrong with a document, without line numbers."""
    with pytest.raises(PolicyError) as caught:
        load(document, base_dir)
    return [str(problem).split(": ", 1)[1] for problem in caught.value.problems]


def said_about(document: object) -> str:
    """Whatever loading a document of the samples' folder says: errors, or warnings."""
    try:
        checked = check_text(as_text(document), base_dir=SAMPLES)
    except PolicyError as error:
        return str(error)
    return "\n".join(map(str, checked.warnings))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every scalar."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from leaves(inner, (*path, position))
    else:
        yield path


def one_of_each_kind(document: Any) -> list[tuple[Any, ...]]:
    """One leaf for each key of the schema, whatever the models, pools, tiers and members are called."""
    kinds: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for path in leaves(document):
        named_at = {"models": 1, "pools": 1, "tenants": 2}.get(path[0])
        kinds.setdefault(tuple(step for position, step in enumerate(path) if position != named_at), path)
    return list(kinds.values())


def replaced(document: Any, path: tuple[Any, ...], value: object) -> Any:
    """The document with another value at `path`."""
    changed = copy.deepcopy(document)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return changed


@pytest.mark.parametrize("path", sorted(POLICIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_problem_of_a_file_is_reported_at_once_and_in_these_words(path: Path) -> None:
    """A file's `#!` lines are exactly what is wrong with it, its `#?` lines exactly what is doubtful in it."""
    lines = path.read_text().replace("{here}", str(POLICIES)).splitlines()
    wrong = [line[3:] for line in lines if line.startswith("#! ")]
    doubtful = [line[3:] for line in lines if line.startswith("#? ")]
    if wrong:
        with pytest.raises(PolicyError) as caught:
            load_policy(path)
        assert [str(problem) for problem in caught.value.problems] == wrong
        assert str(caught.value).startswith(f"{path} has {len(wrong)} problem")
    else:
        assert [str(warning) for warning in check_policy(path).warnings] == doubtful


def test_a_policy_file_becomes_the_policy_it_says() -> None:
    """Every key of the full sample arrives in the domain's policy, in the domain's units."""
    policy = load_policy(SAMPLES / "full.yaml")
    llama, qwen = policy.models["llama-3.1-8b"], policy.models["qwen3-32b"]
    assert policy.names["llama"] is llama
    assert policy.names["meta-llama/Llama-3.1-8B-Instruct"] is llama
    assert (llama.context_tokens, llama.default_output_tokens, llama.cost_factor_permille) == (
        131_072,
        4_096,
        1000,
    )
    assert llama.lanes == {Lane.INTERACTIVE: "chat", Lane.BULK: "batch", Lane.OVERFLOW: "long"}
    assert qwen.cost_factor_permille == 3500
    assert Path(qwen.tokenizer).is_absolute()
    assert qwen.chat_template is not None
    assert Path(qwen.chat_template).read_text().startswith("{%")

    interactive, overflow = policy.lanes[Lane.INTERACTIVE], policy.lanes[Lane.OVERFLOW]
    assert (interactive.deadline_ms, interactive.residence_ms) == (10_000, 2_000)
    assert (interactive.posture, overflow.posture) == (Posture.LOCAL, Posture.CLOSED)
    assert overflow.max_input_tokens >= llama.context_tokens
    assert policy.longest_residence_ms == 30_000

    chat = policy.pools["chat"]
    assert chat.cluster == "llama-chat"
    assert chat.replicas[0] == Replica(name="chat-0", ceiling_tokens=96_000, address="10.0.1.10:8000")
    assert (chat.prefill_window_ms, policy.pools["long"].prefill_window_ms) == (1_500, 60_000)
    assert policy.pools["batch"].cluster == "batch"

    gold, silver = policy.tenants["acme"].tier, policy.tenants["globex"].tier
    assert (gold.quota.tokens_per_minute, gold.quota.burst_tokens) == (1_200_000, 2_400_000)
    assert silver.quota.burst_tokens == silver.quota.tokens_per_minute
    assert (gold.quota.requests_per_minute, gold.quota.inflight_tokens) == (1_200, 400_000)
    assert (gold.quota.inflight_requests, gold.weight, gold.lanes) == (128, 8, frozenset(Lane))
    assert silver.lanes == {Lane.INTERACTIVE, Lane.BULK}
    assert policy.identity == ApiKeyIdentity(header="authorization")
    assert policy.tenants_by_key[policy.tenants["acme"].key_sha256[1]] is policy.tenants["acme"]
    assert policy.anonymous is policy.tenants["public"]
    assert not policy.tenants["initech"].enabled
    assert (policy.limits.body_bytes, policy.limits.json_depth) == (8 * 1024**2, 64)
    assert (policy.limits.prefill_weight_permille, policy.limits.lease_ttl_ms) == (250, 15_000)
    assert policy.limits.orphan_grace_ms == 600_000
    assert policy.request_headers.intent == "x-request-intent"
    assert policy.request_headers.deadline_ms == "x-request-deadline-ms"


def test_the_other_sources_of_identity() -> None:
    """A header or metadata can say who the tenant is, and unknown callers are refused unless told otherwise."""
    document = good()
    assert load(document).identity == HeaderIdentity(header="x-tenant-id")
    assert load(document).anonymous is None
    document["tenants"]["identity"] = {"metadata": {"namespace": "jwt", "path": ["payload", "sub"]}}
    assert load(document).identity == MetadataIdentity(namespace="jwt", path=("payload", "sub"))


@pytest.mark.parametrize(
    ("written", "meant_ms"),
    [
        (250, 250),
        ("250ms", 250),
        ("2s", 2_000),
        ("1.5s", 1_500),
        ("1 min", 60_000),
        ("0.5h", 1_800_000),
        ("1_000", 1_000),
    ],
)
def test_durations_may_carry_their_unit(written: object, meant_ms: int) -> None:
    """A bare number is milliseconds; text says its own unit."""
    policy = load(replaced(good(), ("lanes",), {"bulk": {"residence_ms": 0, "deadline_ms": written}}))
    assert policy.lanes[Lane.BULK].deadline_ms == meant_ms


@pytest.mark.parametrize("written", ["0.5ms", "1.0005s", "-1s", "2d", "s", "1e3s", "61min", 0])
def test_durations_that_are_none(written: object) -> None:
    """Fractions of a millisecond, unknown units and times beyond an hour are refused."""
    (problem,) = problems(replaced(good(), ("lanes",), {"interactive": {"deadline_ms": written}}))
    assert problem.startswith("lanes.interactive.deadline_ms = ")


@pytest.mark.parametrize(("written", "permille"), [(1.001, 1_001), (4.35, 4_350), (0.001, 1), (3, 3_000)])
def test_cost_factors_are_exact(written: float, permille: int) -> None:
    """A factor is the decimal that is written, not the nearest binary fraction."""
    policy = load(replaced(good(), ("models", "tiny", "cost_factor"), written))
    assert policy.models["tiny"].cost_factor_permille == permille


def test_limits_may_touch() -> None:
    """What is as large as it may be is no contradiction."""
    document = good()
    document["lanes"] = {
        "interactive": {
            "max_input_tokens": 20_000,
            "residence_ms": 5_000,
            "deadline_ms": 5_000,
            "floor_permille": 500,
        },
        "bulk": {"max_input_tokens": 20_000, "floor_permille": 500, "share_permille": 500},
    }
    document["limits"] = {"lease_ttl_ms": 20_000, "orphan_grace_ms": 20_000}
    document["models"]["tiny"] |= {"context_tokens": 513, "default_output_tokens": 512}
    document["tenants"]["tiers"]["gold"] = {"tokens_per_minute": 513, "inflight_tokens": 513}
    assert check_text(as_text(document), base_dir=POLICIES).warnings == ()
    for path in (
        ("lanes", "interactive", "max_input_tokens"),
        ("lanes", "interactive", "residence_ms"),
        ("lanes", "interactive", "floor_permille"),
        ("limits", "lease_ttl_ms"),
        ("models", "tiny", "default_output_tokens"),
    ):
        holder: Any = document
        for step in path:
            holder = holder[step]
        assert len(problems(replaced(document, path, holder + 1))) == 1, path


@pytest.mark.parametrize(("written", "meant"), [(2048, 2048), ("512KiB", 524_288), ("1.5MiB", 1_572_864)])
def test_sizes_may_carry_their_unit(written: object, meant: int) -> None:
    """A bare number is bytes; text says its own unit."""
    assert load(replaced(good(), ("limits",), {"body_bytes": written})).limits.body_bytes == meant


@pytest.mark.parametrize("path", list(leaves(good())), ids=lambda path: ".".join(map(str, path)))
def test_one_slip_is_one_problem(path: tuple[Any, ...]) -> None:
    """Whatever single value is of the wrong kind, that is all that is reported, and at its place."""
    reported = problems(replaced(good(), path, {"not": "a scalar"}))
    assert len(reported) == 1, reported
    expected = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    assert reported[0].startswith(f"{expected.removeprefix('.')} = (a mapping)")


def test_one_unknown_key_is_one_problem() -> None:
    """A misspelt optional key does not make its default contradict something else."""
    document = good()
    document["lanes"] = {"interactive": {"deadline_ms": 1_000, "residence": 500}}
    (problem,) = problems(document)
    assert problem == (
        "lanes.interactive.residence: is not a known key; did you mean `residence_ms`?; known here: "
        "max_input_tokens, max_output_tokens, deadline_ms, residence_ms, share_permille, queue_requests, "
        "queue_tokens, floor_permille, prefill_share_permille, spare_replicas, posture"
    )


def test_shape_and_contradictions_are_reported_together() -> None:
    """A wrong value in one place does not hide contradictions elsewhere, nor shift list positions."""
    document = good()
    document["models"]["tiny"]["context_tokens"] = "many"
    document["models"]["tiny"]["lanes"]["bulk"] = "batch"
    replicas = document["pools"]["chat"]["replicas"]
    replicas[:0] = ["odd", {"name": "c", "address": 7, "ceiling_tokens": 1_000}]
    replicas.append({"name": "b", "address": "127.0.0.1:8003", "ceiling_tokens": 96_000})
    document["tenants"]["members"]["globex"] = {"tier": "silver"}
    document["limits"] = {"orphan_grace_ms": "1s"}
    reported = problems(document)
    assert [problem.split(":")[0].split(" = ")[0] for problem in reported] == [
        "limits.orphan_grace_ms",
        "models.tiny.context_tokens",
        "models.tiny.lanes.bulk",
        "pools.chat.replicas[0]",
        "pools.chat.replicas[1].address",
        "pools.chat.replicas[4].name",
        "tenants.members.globex.tier",
    ]


@pytest.mark.parametrize("secret", [API_KEY, RANDOM_KEY])
@pytest.mark.parametrize("path", one_of_each_kind(everything()), ids=lambda path: ".".join(map(str, path)))
def test_a_credential_in_the_wrong_place_is_never_repeated(path: tuple[Any, ...], secret: str) -> None:
    """Whichever value or key somebody replaces by an API key, no error or warning contains it."""
    if secret == RANDOM_KEY and path[-1] in ("tokenizer", "chat_template"):
        return  # folders of model caches look like this
    document = everything()
    mangled = [replaced(document, path, value) for value in (secret, {secret: secret}, [secret])]
    if isinstance(path[-1], str):
        mangled.append(replaced(document, (*path[:-1], secret), secret))
    for document in mangled:
        assert secret not in said_about(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("tenants", "members", "acme", "key_sha256"), ["hunter2"]),
        (("tenants", "members", "acme", "key_sha256"), "hunter2"),
        (("tenants", "members", "acme", "key_sha256"), [1234567]),
        (("tenants", "members", "acme", "api_key"), "hunter2"),
        (("tenants", "identity", "api_key"), "hunter2"),
    ],
)
def test_where_keys_are_expected_no_value_is_shown(path: tuple[Any, ...], value: object) -> None:
    """A key of any form, written where its digest or its header belongs, is hidden."""
    said = said_about(replaced(everything(), path, value))
    assert ".".join(path) in said
    assert "hunter2" not in said
    assert "1234567" not in said


def test_a_shown_value_is_short_and_cannot_steer_a_terminal() -> None:
    """Control characters are escaped and long values cut."""
    document = replaced(good(), ("tenants", "members", "acme", "tier"), "\x1b[2J" + "x " * 500)
    (problem,) = problems(document)
    assert "\x1b" not in problem
    assert "\\u001b[2J" in problem
    assert len(problem) < 300


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    """Files that cannot be read are problems like all others."""
    absent, folder, binary, large = (tmp_path / name for name in ("absent", "folder", "binary", "large"))
    folder.mkdir()
    binary.write_bytes(b"version: 1\nname: \xff\xfe\n")
    large.write_bytes(b"#" * (LARGEST_FILE_BYTES + 1))
    said = {}
    for path in (absent, folder, binary, large):
        with pytest.raises(PolicyError) as caught:
            load_policy(path)
        (problem,) = caught.value.problems
        said[path.name] = str(problem)
    assert said == {
        "absent": "(the file): cannot be read (No such file or directory); check the path and its permissions",
        "folder": "(the file): cannot be read (Is a directory); check the path and its permissions",
        "binary": "line 2: (the file): is not UTF-8 text; save it as UTF-8",
        "large": f"(the file): is larger than {LARGEST_FILE_BYTES} bytes; a policy must be smaller",
    }


def test_model_files_that_cannot_be_what_they_are_named(tmp_path: Path) -> None:
    """Pointers, empty files and templates that are not text are found before the policy is used."""
    document = good()
    model = document["models"]["tiny"] | {"chat_template": "template.jinja"}
    document["models"] = {
        name: model | {"tokenizer": f"{name}.json", "aliases": []}
        for name in ("pointer", "empty", "list", "fine")
    }
    (tmp_path / "pointer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    (tmp_path / "empty.json").touch()
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "fine.json").write_text('{"model": {}}')
    (tmp_path / "template.jinja").write_bytes(b"\xff{{ messages }}")
    said = [problem for problem in problems(document, tmp_path) if ".tokenizer" in problem]
    fetch = "fetch the file itself (`git lfs pull`)"
    wanted = "name the `tokenizer.json` that belongs to the model"
    empty, listed, pointer = (f"{tmp_path}/{name}.json" for name in ("empty", "list", "pointer"))
    assert said == [
        f'models.empty.tokenizer = "empty.json": {empty} is empty; {wanted}',
        f'models.list.tokenizer = "list.json": {listed} has no `model`; {wanted}',
        f'models.pointer.tokenizer = "pointer.json": {pointer} is only a Git LFS pointer; {fetch}',
    ]
    assert len(problems(document, tmp_path)) == len(said) + len(document["models"])


def test_files_that_cannot_be_opened_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes, endless names, roots and huge files are named like all others, and never read to the end."""
    monkeypatch.setattr(files, "LARGEST_TOKENIZER_BYTES", 100)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("x" * 101)
    said = {}
    for written in ("pipe", "x" * 300, "x" * 300 + "/tokenizer.json", "/", "large"):
        (problem,) = problems(replaced(good(), ("models", "tiny", "tokenizer"), written), tmp_path)
        said[written] = problem.split(": ", 1)[1].replace(f"{tmp_path}/", "").split(";")[0]
    assert said == {
        "pipe": "pipe is not a regular file",
        "x" * 300: f"{'x' * 300} cannot be read (File name too long)",
        "x" * 300 + "/tokenizer.json": f"{'x' * 300}/tokenizer.json cannot be read (File name too long)",
        "/": "/ is a folder",
        "large": "large is larger than 100 bytes",
    }


def test_a_broken_file_beside_the_tokenizer_is_a_problem_of_the_tokenizer(tmp_path: Path) -> None:
    """Counting reads `tokenizer_config.json`, too, so it has to be JSON."""
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "tokenizer_config.json").write_text("{")
    (problem,) = problems(replaced(good(), ("models", "tiny", "tokenizer"), "tokenizer.json"), tmp_path)
    assert problem == (
        f'models.tiny.tokenizer = "tokenizer.json": {tmp_path}/tokenizer_config.json is not JSON; '
        "put the model's own there, or remove it"
    )


def test_a_pool_is_checked_against_the_largest_window_that_leads_to_it() -> None:
    """Whichever model comes first, the warning is about the one whose requests may not fit."""
    document = good()
    document["lanes"] = {"bulk": {"max_input_tokens": 200_000}}
    document["models"]["wide"] = document["models"]["tiny"] | {"context_tokens": 131_072, "aliases": []}
    (warning,) = check_text(as_text(document), base_dir=POLICIES).warnings
    assert warning.path == "models.wide.lanes.bulk"
    assert "up to 131072 tokens and the pool holds at most 86400" in warning.message


def test_what_an_anchor_repeats_is_wrong_in_each_place() -> None:
    """Two uses of one anchor are two values: both are reported, and the one use does not disturb the other."""
    text = (POLICIES / "good.yaml").read_text()
    text = text.replace(
        "    replicas:\n", "    replicas: &all\n      - 7\n      - {name: a, ceiling_tokens: 10}\n"
    )
    text = text.replace("tenants:\n", "  other:\n    replicas: *all\ntenants:\n")
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, POLICIES)
    assert [problem.path for problem in caught.value.problems] == [
        "pools.chat.replicas[0]",
        "pools.chat.replicas[2].name",
        "pools.other.replicas[0]",
        "pools.other.replicas[2].address",
        "pools.other.replicas[2].name",
        "pools.other.replicas[3].address",
    ]


def test_a_pool_is_bounded() -> None:
    """What a whole pool reads in its window has to stay a number that the ledger's scripts count exactly."""
    document = good()
    pool = document["pools"]["chat"]
    pool |= {"prefill_tokens_per_s": 1_000_000, "prefill_window_ms": 60_000}
    pool["replicas"] = [{"name": f"r{number}", "ceiling_tokens": 10**10} for number in range(1_001)]
    assert problems(document) == [
        "pools.chat.replicas: lists 1001 replicas; split the pool in parts of at most 1000"
    ]
    pool["replicas"].pop()
    chat = load(document).pools["chat"]
    parts_per_minute = chat.prefill_tokens_per_s * 60 * len(chat.replicas)
    assert parts_per_minute * chat.prefill_window_ms < 2**53


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"header": "user-agent"}, "is written by clients"),
        ({"header": "x-admission-tenant"}, "starts with x-admission-"),
        ({"header": "x-request-intent"}, "is also tenants.identity.header"),
        ({"header": "cookie"}, "holds a credential"),
        ({"api_key": {"header": "host"}}, "cannot hold an API key"),
    ],
)
def test_headers_that_cannot_say_who_is_asking(source: object, message: str) -> None:
    """What clients write, what this service strips, and what means something else is no identity."""
    document = replaced(good(), ("tenants", "identity"), source)
    assert any(message in problem for problem in problems(document))


def test_the_warnings_of_the_policy_in_force() -> None:
    """Whoever runs a doubtful policy can ask what is doubtful about it."""
    assert len(PolicyFile(POLICIES / "odd_but_usable.yaml").warnings) == 13
    assert PolicyFile(POLICIES / "good.yaml").warnings == ()


def test_a_reload_that_fails_leaves_the_last_good_policy_in_force(tmp_path: Path) -> None:
    """A bad file is refused as a whole and remembered as an error; the next good file is put in force."""
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    document = good()
    document["models"]["tiny"]["tokenizer"] = "tokenizer.json"
    path = tmp_path / "policy.yaml"
    path.write_text(as_text(document))
    policy_file = PolicyFile(path)
    first = policy_file.current
    assert policy_file.last_error is None

    for bad in (
        "models: [",
        as_text(document | {"modles": {}}),
        as_text(replaced(document, ("tenants", "tiers", "gold", "tokens_per_minute"), -1)),
        as_text(replaced(document, ("models", "tiny", "lanes"), {})),
        as_text(replaced(document, ("models", "tiny", "tokenizer"), "gone.json")),
        "",
    ):
        path.write_text(bad)
        with pytest.raises(PolicyError) as caught:
            policy_file.reload()
        assert policy_file.current is first
        assert policy_file.last_error == str(caught.value)
    path.unlink()
    with pytest.raises(PolicyError):
        policy_file.reload()
    assert policy_file.current is first

    path.write_text(as_text(replaced(document, ("tenants", "tiers", "gold", "inflight_requests"), 65)))
    second = policy_file.reload()
    assert second is policy_file.current
    assert second.version != first.version
    assert policy_file.last_error is None


def test_a_policy_that_cannot_be_prepared_is_not_put_in_force(tmp_path: Path) -> None:
    """What the service needs for a policy is tried before the swap, and its failure is a failed reload."""
    path = tmp_path / "policy.yaml"
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    document = replaced(good(), ("models", "tiny", "tokenizer"), "tokenizer.json")
    path.write_text(as_text(document))
    policy_file = PolicyFile(path)
    first = policy_file.current
    prepared: list[Policy] = []

    def prepare(policy: Policy) -> None:
        assert policy_file.current is first
        prepared.append(policy)
        if len(prepared) == 1:
            raise RuntimeError("the tokenizer has no merges")

    path.write_text(as_text(replaced(document, ("models", "tiny", "context_tokens"), 16_384)))
    with pytest.raises(RuntimeError):
        policy_file.reload(prepare)
    assert policy_file.current is first
    assert policy_file.last_error == "the tokenizer has no merges"
    assert policy_file.reload(prepare) is prepared[1]
    assert policy_file.current is prepared[1]
    assert policy_file.last_error is None


def test_there_is_no_service_without_a_policy(tmp_path: Path) -> None:
    """The first load has no last good policy to fall back to."""
    with pytest.raises(PolicyError):
        PolicyFile(tmp_path / "absent.yaml")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["chat", "gold", "refuse", "acme", "interactive", "x-tenant-id", "2s", "16MiB", "tiny"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_document_is_answered_by_anything_but_a_policy_or_its_problems(data: st.DataObject) -> None:
    """However a document is mangled, loading ends in a policy or in a `PolicyError` that names a problem."""
    document = everything()
    for _ in range(data.draw(st.integers(1, 4))):
        paths = sorted(
            {path[:length] for path in leaves(document) for length in range(1, len(path) + 1)}, key=repr
        )
        if not paths:
            break
        path = data.draw(st.sampled_from(paths))
        document = replaced(document, path, data.draw(VALUES))
    try:
        outcome: Policy | PolicyError = load(document, SAMPLES)
    except PolicyError as error:
        outcome = error
    if isinstance(outcome, PolicyError):
        assert outcome.problems
        assert all(problem.message for problem in outcome.problems)
    else:
        assert len(outcome.version) == 12


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet=st.characters(codec="utf-8"), max_size=200)
    | st.text("ab:-[]{}&*!|>'\"#\n ?,<%@", max_size=60)
)
def test_no_text_is_answered_by_anything_but_problems(text: str) -> None:
    """Random text is no policy, and says so."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, POLICIES)
    assert caught.value.problems
