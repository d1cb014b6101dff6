"""`extproc check` and `extproc schema`, as people and CI run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.adapters.policy_file import check_text, load_policy
from extproc.cli import build_app

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "deploy" / "policies"
POLICIES = ROOT / "tests" / "policies"

HEAVY = (
    "google.protobuf",
    "grpc",
    "jinja2",
    "opentelemetry",
    "redis",
    "tokenizers",
    "yaml",
    "rich.table",
    "orjson",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def extproc(*arguments: str | Path) -> Done:
    """Run the command in this process."""
    result = CliRunner().invoke(build_app(), [str(argument) for argument in arguments])
    return Done(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def extproc_process(*arguments: str | Path) -> Done:
    """Run the command as a process of its own, from the root of the project."""
    done = subprocess.run(
        [sys.executable, "-m", "extproc", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        timeout=60,
        check=False,
    )
    return Done(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


def test_a_good_policy_is_shown_with_its_defaults_and_version() -> None:
    """Exit code 0, every part of the effective policy on standard output, nothing on standard error."""
    done = extproc_process("check", SAMPLES / "small.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "qwen3-8b",
        "default",
        "interactive → chat, bulk → chat",
        "600_000",
        "trial",
        "x-tenant-id",
    ):
        assert words in done.stdout, words
    assert re.search(r"^ *chat +interactive +172_800 +20_480 +16_384", done.stdout, re.MULTILINE)
    assert re.search(r"^ *chat +bulk +120_960 +32_768 +32_768", done.stdout, re.MULTILINE)
    assert re.search(
        r"^ *paid +2 +600_000 +600_000 +- +- +64 +4 +interactive, bulk, overflow", done.stdout, re.MULTILINE
    )
    assert "message timeout must be longer than 30 s" in done.stdout
    assert done.stdout.rstrip().endswith(f"policy version {load_policy(SAMPLES / 'small.yaml').version}")


def test_a_bad_policy_is_refused_with_all_its_problems() -> None:
    """Exit code 1, every problem on standard error with its line and remedy, nothing on standard output."""
    done = extproc_process("check", "tests/policies/bad_names.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    expected = re.findall(
        r"^#! line (\d+): ([^ :]+)", (POLICIES / "bad_names.yaml").read_text(), re.MULTILINE
    )
    assert f"tests/policies/bad_names.yaml: {len(expected)} problems" in done.stderr
    for line, path in expected:
        assert re.search(rf"^ *line {line} +{re.escape(path)}", done.stderr, re.MULTILINE), path
    assert 'models.tiny.lanes.interactive = "chta"' in done.stderr
    assert 'is not a pool; did you mean "chat"?' in done.stderr
    assert "Traceback" not in done.stderr


def test_tokenizers_can_be_loaded_as_the_service_will(tmp_path: Path) -> None:
    """`--tokenizers` finds what only loading finds, and says how each model's tokens will be counted."""
    done = extproc("check", SAMPLES / "small.yaml", "--tokenizers")
    assert done.returncode == 0
    assert "Tokens of qwen3-8b are counted piece by piece with `tiktoken`." in done.stdout

    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    policy = tmp_path / "policy.yaml"
    text = (SAMPLES / "small.yaml").read_text().replace("../../extproc/sim/tokenizer/", "")
    policy.write_text(text)
    assert extproc("check", policy).returncode == 0
    done = extproc("check", policy, "--tokenizers")
    assert (done.returncode, done.stdout) == (1, "")
    assert "models.qwen3-8b.tokenizer" in done.stderr
    assert f"{tmp_path}/tokenizer.json" in done.stderr.replace("\n      ", "")


def test_brackets_in_a_policy_are_not_markup(tmp_path: Path) -> None:
    """Names and values are shown as they are written, not read as styles."""
    text = (SAMPLES / "small.yaml").read_text().replace("aliases: [default]", 'aliases: ["[red]m[/red]"]')
    text = text.replace("../../", f"{ROOT}/")
    policy = tmp_path / "policy.yaml"
    policy.write_text(text)
    assert "[red]m[/red]" in extproc("check", policy).stdout
    policy.write_text(text.replace("tier: trial", 'tier: "[red]t[/red]"'))
    done = extproc("check", policy)
    assert 'tenants.members.visitor.tier = "[red]t[/red]"' in done.stderr


def test_a_file_that_is_not_there_is_a_problem_like_others() -> None:
    """Exit code 1 and a sentence, not a traceback."""
    done = extproc("check", "nowhere.yaml")
    assert done.returncode == 1
    assert "cannot be read (No such file or directory)" in done.stderr


def test_warnings_do_not_fail_unless_asked_to() -> None:
    """A doubtful policy can be used: exit code 0, or 1 with `--strict`; the warnings are on standard error."""
    lenient = extproc("check", POLICIES / "odd_but_usable.yaml")
    strict = extproc("check", POLICIES / "odd_but_usable.yaml", "--strict")
    assert (lenient.returncode, strict.returncode) == (0, 1)
    assert lenient.stderr == strict.stderr
    assert "13 warnings" in lenient.stderr
    assert "pools.spare" in lenient.stderr
    assert extproc("check", SAMPLES / "full.yaml", "--strict").returncode == 0


def test_the_effective_policy_as_json_is_a_policy() -> None:
    """`--json` prints the version and the policy; the policy, saved as a file, has that version."""
    done = extproc("check", "--json", SAMPLES / "small.yaml")
    assert done.returncode == 0
    printed = json.loads(done.stdout)
    assert printed["warnings"] == []
    assert printed["policy"]["lanes"]["interactive"]["deadline_ms"] == 10_000
    again = check_text(json.dumps(printed["policy"]), base_dir=Path("/"))
    assert again.policy.version == printed["version"] == load_policy(SAMPLES / "small.yaml").version


def test_what_is_printed_holds_no_whole_key_digest() -> None:
    """Neither tables nor JSON repeat the digests of API keys: short keys could be found from them."""
    digests = [
        digest
        for tenant in load_policy(SAMPLES / "full.yaml").tenants.values()
        for digest in tenant.key_sha256
    ]
    assert digests
    for arguments in (("--json",), ()):
        done = extproc("check", *arguments, SAMPLES / "full.yaml")
        assert not [digest for digest in digests if digest in done.stdout + done.stderr]


def test_problems_as_json() -> None:
    """`--json` also says what is wrong, with places that programs can use."""
    done = extproc("check", "--json", POLICIES / "bad_nobody.yaml")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"][0] == {
        "line": 3,
        "path": "models",
        "value": None,
        "message": "has no model; add at least one",
    }


@pytest.mark.parametrize(
    ("arguments", "file"), [(("schema",), "policy.schema.json"), (("schema", "--markdown"), "README.md")]
)
def test_the_documents_of_the_schema_are_in_sync(arguments: tuple[str, ...], file: str) -> None:
    """The committed schema and reference are what the command prints; print them again after a change."""
    done = extproc(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert (SAMPLES / file).read_text() == done.stdout, (
        f"run: extproc {' '.join(arguments)} > deploy/policies/{file}"
    )


def test_the_reference_lists_every_key_of_the_schema() -> None:
    """Each key has a row in the table of its place."""
    reference = (SAMPLES / "README.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL))
    schema = json.loads((SAMPLES / "policy.schema.json").read_text())
    rows = sorted(re.findall(r"^\| `(\w+)`", reference, re.MULTILINE))
    keys = sorted(key for part in (schema, *schema["$defs"].values()) for key in part.get("properties", ()))
    assert rows == keys
    assert "`deadline_ms` | 1 to 3_600_000 | `600_000`" in sections["lanes.bulk"]
    assert "`ceiling_tokens` | 1 to 10_000_000_000 | **required**" in sections["pools.POOL.replicas[]"]


def test_help_names_the_commands_and_imports_nothing_heavy() -> None:
    """`extproc --help` answers at once: what a command needs is imported when it runs."""
    program = (
        "import sys, extproc.cli\n"
        "sys.argv = ['extproc', '--help']\n"
        "try:\n    extproc.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert re.search(r"^ *check +Check a policy", done.stdout, re.MULTILINE)
    assert re.search(r"^ *schema +Print the JSON Schema", done.stdout, re.MULTILINE)


def test_the_version_of_the_program() -> None:
    """`--version` says which release this is."""
    assert extproc("--version").stdout.startswith("extproc 0.")
