"""More than a thousand requests of each of vLLM's APIs, counted by `extproc tokens` and answered by a real vLLM.

A slow lane of its own, by `make test-vllm`: it needs an environment of 3.5 GB and some minutes. The truth is the
`usage` of real answers; what vLLM says without answering (`/tokenize`, `count_tokens`) must be the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import ARGUMENTS
from tests.engines.vllm_facts import FACTS
from tests.engines.vllm_requests import Request, requests
from tests.support.vllm import CONTEXT_TOKENS, VllmServer, model_dir

PARTS_TEMPLATE = Path(__file__).parent / "parts.jinja"
BOS = "<|endoftext|>"
LONGEST_RUN_S = 900


@dataclass(frozen=True, kw_only=True)
class Model:
    """A vLLM, and the tokenizer of its model."""

    server: VllmServer
    directory: Path

    def compared(self, asked: list[Request], work: Path, *arguments: str) -> list[dict[str, Any]]:
        """What `extproc tokens --against` says about each request; it must have compared them all."""
        file = work / "requests.jsonl"
        file.write_text("".join(json.dumps({"url": path, "body": body}) + "\n" for path, body in asked))
        policy = work / "policy.yaml"
        policy.write_text(POLICY.format(tokenizer=self.directory / "tokenizer.json", context=CONTEXT_TOKENS))
        command = [sys.executable, "-m", "extproc", "tokens", str(file), f"--policy={policy}", "--json"]
        command += [f"--against={self.server.url}", "--concurrency=8", "--timeout=300", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_RUN_S)
        *rows, last = [json.loads(line) for line in done.stdout.splitlines()]
        unequal = [(row, asked[row["number"] - 1]) for row in rows if not row.get("equal")]
        assert not unequal, "\n".join(
            f"{row}\n    {json.dumps(request)[:2_000]}" for row, request in unequal[:10]
        )
        assert done.returncode == 0, done.stderr
        assert last["summary"]["compared"] == len(asked)
        return rows


POLICY = """
version: 1
models:
  tiny: {{tokenizer: {tokenizer}, context_tokens: {context}, lanes: {{interactive: only, bulk: only}}}}
lanes:
  interactive: {{max_input_tokens: 8_000, max_output_tokens: 64, deadline_ms: 60s, residence_ms: 0}}
  bulk: {{max_input_tokens: 8_000, max_output_tokens: 64, deadline_ms: 60s, residence_ms: 0}}
pools:
  only:
    replicas: [{{name: only-0, address: "127.0.0.1:9", ceiling_tokens: 64_000}}]
    prefill_tokens_per_s: 10_000
    decode_tokens_per_s: 100
    request_cap: 8
tenants: {{identity: {{header: x-tenant-id}}, tiers: {{paid: {{}}}}, members: {{acme: {{tier: paid}}}}}}
"""


@pytest.fixture(scope="module")
def qwen3_model(vllm_qwen3: VllmServer) -> Model:
    """Qwen3's tokenizer and template, which wants strings and thinks."""
    return Model(server=vllm_qwen3, directory=vllm_qwen3.model)


@pytest.fixture(scope="module")
def parts_model(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tokenizer that adds BOS, and a template that prints BOS, wants parts, and system turns only in front."""
    work = tmp_path_factory.mktemp("vllm-parts")
    directory = model_dir(tokenizer_dir, work / "model", chat_template=PARTS_TEMPLATE.read_text())
    document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    (bos_id,) = [token["id"] for token in document["added_tokens"] if token["content"] == BOS]
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos_id], "tokens": [BOS]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    arguments = (*ARGUMENTS, "--enable-prompt-tokens-details")
    with VllmServer(model=directory, log=work / "log", arguments=arguments) as server:
        yield Model(server=server, directory=directory)


def test_a_thousand_requests_to_qwen3(qwen3_model: Model, tmp_path: Path) -> None:
    """Chats, completions, responses and messages with all that clients send: not one count differs."""
    asked = list(requests(1_100, seed=1, kwargs=("enable_thinking",)))
    rows = qwen3_model.compared(asked, tmp_path, "--usage")
    assert len({row["dialect"] for row in rows}) == 5
    assert max(row["input_tokens"] for row in rows) > 1_000


def test_facts_of_vllm(qwen3_model: Model, tmp_path: Path) -> None:
    """What requests look like that are rare, or were counted wrongly once."""
    qwen3_model.compared(FACTS, tmp_path, "--usage")


def test_vllm_counts_without_answering_as_it_counts_answers(qwen3_model: Model, tmp_path: Path) -> None:
    """`/tokenize` and `count_tokens` by which operators check their policies before they send traffic."""
    asked = [request for request in requests(300, seed=2) if request[0] != "/inference/v1/generate"]
    qwen3_model.compared(asked, tmp_path)


def test_requests_to_a_model_of_another_kind(parts_model: Model, tmp_path: Path) -> None:
    """Content in parts, BOS by the tokenizer and by the template, system turns moved to the front, cached tokens."""
    asked = [request for request in requests(400, seed=3) if _suits_parts(request)]
    assert len(asked) > 300
    parts_model.compared(asked, tmp_path, "--usage")


def _suits_parts(request: Request) -> bool:
    """The template refuses late system messages, except of Anthropic's API, where vLLM moves them to the front."""
    path, body = request
    if path == "/v1/messages":
        return True
    turns = body.get("messages") or body.get("input")
    if not isinstance(turns, list):
        return True
    return path == "/v1/completions" or all(turn.get("role") != "system" for turn in turns[1:])
