"""From a policy file to the policy in force: read, checked as a whole, and swapped as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from extproc.adapters.policy_file.build import policy_of
from extproc.adapters.policy_file.effective import effective_document, version_of
from extproc.adapters.policy_file.engine_checks import ENGINE_CHECKS
from extproc.adapters.policy_file.files import read_model_files
from extproc.adapters.policy_file.media_checks import MEDIA_CHECKS
from extproc.adapters.policy_file.problems import (
    Finding,
    PolicyError,
    Problem,
    path_text,
    shown,
    without_credentials,
)
from extproc.adapters.policy_file.serving_checks import SERVING_CHECKS
from extproc.adapters.policy_file.shape import Shaped, shape
from extproc.adapters.policy_file.tenant_checks import TENANT_CHECKS
from extproc.adapters.policy_file.yaml_text import (
    LARGEST_FILE_BYTES,
    Document,
    UnreadableText,
    read_document,
)
from extproc.domain.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPolicy:
    """A policy that can be used, and what in it is likely not meant."""

    policy: Policy
    warnings: tuple[Problem, ...]


def load_policy(path: Path) -> Policy:
    """The policy in the file at `path`. Raises `PolicyError` with all that is wrong."""
    return check_policy(path).policy


def parse_policy(text: str, base_dir: Path) -> Policy:
    """The policy in `text`; relative paths in it start at `base_dir`. Raises `PolicyError`."""
    return check_text(text, base_dir=base_dir).policy


def check_policy(path: Path) -> CheckedPolicy:
    """The policy in the file at `path`, with warnings. Raises `PolicyError` with all that is wrong."""
    return check_text(_read(path), base_dir=path.absolute().parent, source=str(path))


def check_text(text: str, *, base_dir: Path, source: str | None = None) -> CheckedPolicy:
    """The policy in `text`, with warnings; `source` names it in errors. Raises `PolicyError`."""
    try:
        document = read_document(text)
    except UnreadableText as error:
        raise _unreadable(str(error), source=source, line=error.line) from None
    shaped = shape(document.value, already_broken=(finding.path for finding in document.findings))
    findings = [*document.findings, *shaped.findings]
    digests: Mapping[str, Mapping[str, str]] = {}
    if shaped.spec is not None:
        files = read_model_files(shaped.spec.models, base_dir=base_dir)
        digests = files.digests
        concluded = chain(
            files.findings,
            *(
                check(shaped.spec)
                for check in (*SERVING_CHECKS, *ENGINE_CHECKS, *MEDIA_CHECKS, *TENANT_CHECKS)
            ),
        )
        findings.extend(_sound(concluded, shaped))
    errors = [finding for finding in findings if not finding.is_warning]
    if errors or shaped.spec is None:
        raise PolicyError(_problems(errors, document), source=source)
    policy = policy_of(shaped.spec, base_dir=base_dir, version="")
    version = version_of(effective_document(policy), digests)
    warnings = (finding for finding in findings if finding.is_warning)
    return CheckedPolicy(policy=replace(policy, version=version), warnings=_problems(warnings, document))


class PolicyFile:
    """Which policy is in force? The last one that could be used, whatever is in the file by now.

    Reading and checking takes tens of milliseconds (tokenizer files are read as well): call `reload` on a
    thread. The policy in force is replaced as one value, so readers on other threads see the old one or
    the new one.
    """

    def __init__(self, path: Path) -> None:
        """Load the file for the first time. Raises `PolicyError`: without a policy there is no service."""
        self._path = path
        self._checked = check_policy(path)
        self._last_error: str | None = None

    @property
    def current(self) -> Policy:
        """The policy in force."""
        return self._checked.policy

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """What in the policy in force is likely not meant."""
        return self._checked.warnings

    @property
    def last_error(self) -> str | None:
        """Why the last reload was refused; `None` if it was not."""
        return self._last_error

    def reload(self, prepare: Callable[[Policy], object] | None = None) -> Policy:
        """Read the file again and put it in force.

        `prepare` gets the new policy ready, such as by loading its tokenizers, before it is in force. Raises
        `PolicyError` or whatever `prepare` raises; the last good policy then stays, and `last_error` says why.
        """
        try:
            checked = check_policy(self._path)
            if prepare is not None:
                prepare(checked.policy)
        except Exception as error:
            self._last_error = str(error) or type(error).__name__
            raise
        self._checked = checked
        self._last_error = None
        return checked.policy


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _unreadable(
            f"cannot be read ({reason}); check the path and its permissions", source=str(path)
        ) from None
    if len(content) > LARGEST_FILE_BYTES:
        raise _unreadable(
            f"is larger than {LARGEST_FILE_BYTES} bytes; a policy must be smaller", source=str(path)
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _unreadable("is not UTF-8 text; save it as UTF-8", source=str(path), line=line) from None


def _unreadable(message: str, *, source: str | None, line: int | None = None) -> PolicyError:
    return PolicyError([Problem(path="", message=message, line=line)], source=source)


def _sound(findings: Iterable[Finding], shaped: Shaped) -> Iterable[Finding]:
    """The findings whose grounds are what the file says, with their places in the file."""
    for finding in findings:
        path = shaped.original(finding.path)
        if not any(shaped.is_broken(shaped.original(about)) for about in (*finding.about, finding.path)):
            yield replace(finding, path=path)


def _problems(findings: Iterable[Finding], document: Document) -> tuple[Problem, ...]:
    problems = [
        Problem(
            path=path_text(finding.path),
            message=without_credentials(finding.message),
            value=shown(finding.value, finding.path),
            line=document.line_of(finding.path),
        )
        for finding in findings
    ]
    return tuple(
        sorted(set(problems), key=lambda problem: (problem.line or 0, problem.path, problem.message))
    )
