"""Policy files: what may run where, how much of it, and for whom, as people write it (YAML, version 1)."""

from __future__ import annotations

from extproc.adapters.policy_file.effective import effective_document, without_key_digests
from extproc.adapters.policy_file.load import (
    CheckedPolicy,
    PolicyFile,
    check_policy,
    check_text,
    load_policy,
    parse_policy,
)
from extproc.adapters.policy_file.problems import PolicyError, Problem
from extproc.adapters.policy_file.schema import policy_json_schema

__all__ = [
    "CheckedPolicy",
    "PolicyError",
    "PolicyFile",
    "Problem",
    "check_policy",
    "check_text",
    "effective_document",
    "load_policy",
    "parse_policy",
    "policy_json_schema",
    "without_key_digests",
]
