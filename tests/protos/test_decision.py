"""The versioned decision: generated code is current, and what the service writes is what the message says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import json_format

from extproc.adapters.envoy_codec import bytes_of
from extproc.adapters.envoy_parts import SCHEMA_VERSION
from extproc.domain.decision import Decision as DomainDecision
from extproc.domain.outcome import Outcome, Reason
from extproc.domain.policy import Lane
from extproc.exchange.events import Phase, Refuse, Route
from extproc.pb.admission.v1.decision_pb2 import Decision

ROOT = Path(__file__).resolve().parents[2]

# The compiler's own version is stamped on its output: a newer one that writes the same code is no difference.
STAMP = re.compile(r"^# Protobuf Python Version: .*$|^    \d+,$", re.MULTILINE)


def _modules(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): STAMP.sub("", path.read_text())
        for path in directory.rglob("*.py*")
        if "__pycache__" not in path.parts
    }


def test_the_committed_modules_are_what_the_protos_generate(tmp_path: Path) -> None:
    """Whoever changes a proto also commits what is generated from it."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(tmp_path / "pb")
    assert _modules(tmp_path / "pb") == _modules(ROOT / "extproc" / "pb")


def _written(answer: Route | Refuse) -> Decision:
    """The decision that `answer` leaves in dynamic metadata, read strictly: an unknown field is an error."""
    response = pb.ProcessingResponse.FromString(bytes_of(answer))
    metadata: dict[str, Any] = json_format.MessageToDict(response.dynamic_metadata)
    return json_format.ParseDict(metadata["extproc.admission"], Decision())


def test_an_admission_is_a_decision() -> None:
    """All that the service says about an admitted request has a field in the message."""
    decision = DomainDecision(
        outcome=Outcome.ADMITTED,
        lease_id="lease-1",
        tenant="acme",
        tier="gold",
        model="tiny",
        lane=Lane.BULK,
        pool="chat",
        replica="r0",
        dialect="openai_chat",
        input_tokens=14_000,
        output_tokens=4_000,
        work_units=7_500,
        predicted_ttft_ms=840,
        policy_version="0123456789ab",
    )
    route = Route(
        phase=Phase.REQUEST_BODY, set_headers=(), remove_headers=(), endpoint=None, decision=decision
    )
    assert _written(route) == Decision(
        schema_version=SCHEMA_VERSION,
        reservation="lease-1",
        decision="admitted",
        tenant="acme",
        tier="gold",
        model="tiny",
        dialect="openai_chat",
        lane="bulk",
        pool="chat",
        replica="r0",
        input_tokens=14_000,
        output_tokens=4_000,
        reserved_tokens=18_000,
        work_units=7_500,
        predicted_ttft_ms=840,
        policy_version="0123456789ab",
    )


def test_a_refusal_is_a_decision_without_what_it_does_not_know() -> None:
    """A refusal tells its reason and its wait; what was never known is absent, not zero."""
    decision = DomainDecision(
        outcome=Outcome.REFUSED,
        lease_id="lease-1",
        reason=Reason.TENANT_RATE,
        retry_after_ms=1_200,
        policy_version="0123456789ab",
    )
    written = _written(Refuse(status=429, headers=(), body={}, decision=decision))
    assert {field.name for field, _ in written.ListFields()} == {
        "schema_version",
        "reservation",
        "decision",
        "reason",
        "retry_after_ms",
        "policy_version",
    }
    assert (written.decision, written.reason, written.retry_after_ms) == ("refused", "tenant_rate", 1_200)
