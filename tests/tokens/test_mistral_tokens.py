"""Mistral's own tokenizers: the values that `mistral-common` gives, from request bodies of every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mistral_common
import pytest

from extproc.adapters.policy_file import PolicyError, parse_policy
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.adapters.tokens.errors import TokenizerUnusable
from extproc.adapters.tokens.load import load_tokens
from extproc.adapters.tokens.mistral_tokens import MistralTokens, is_mistral_file
from extproc.dialects.registry import dialect_for
from extproc.domain.prompt import Count, Counted, CountFailed

DATA = Path(mistral_common.__file__).parent / "data"
TEKKEN = DATA / "tekken_240911.json"
SPM_V3 = DATA / "mistral_instruct_tokenizer_240323.model.v3"
SPM_V7 = DATA / "mistral_instruct_tokenizer_241114.model.v7"

USER: dict[str, Any] = {"role": "user", "content": "Name three rivers."}
SCHEMA = {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]}
NAMED = {"name": "get_depth", "description": "Return the depth of a river in metres."}
FUNCTION = {**NAMED, "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "chatcmpl-tool-call00001",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1}'},
}


@pytest.fixture(scope="module", params=[TEKKEN, SPM_V3, SPM_V7], ids=["tekken", "v3", "v7"])
def model(request: pytest.FixtureRequest) -> tuple[str, ExactTokenCounter]:
    """A counter for one of the files, and the file's name."""
    path: Path = request.param
    return path.name, ExactTokenCounter({"m": load_tokens(path)}, threads=1, inline_us=1 << 60)


def counted(counter: ExactTokenCounter, body: dict[str, Any], path: str = "/v1/chat/completions") -> Count:
    """What comes of a body."""
    dialect = dialect_for(path)
    assert dialect is not None
    request = dialect.read({"model": "m", "max_tokens": 5, **body}, path)
    answers: list[Count] = []
    counter.count(model="m", prompt=request.prompt, limit_tokens=10_000, tenant="t", deliver=answers.append)
    return answers[0]


def tokens(counter: ExactTokenCounter, body: dict[str, Any], path: str = "/v1/chat/completions") -> int:
    answer = counted(counter, body, path)
    assert isinstance(answer, Counted)
    return sum(answer.per_sequence_tokens)


def test_the_golden_values(model: tuple[str, ExactTokenCounter]) -> None:
    """TOK-02: a tool has the same price in every dialect, and never none."""
    name, counter = model
    with_tool = 69 if name == TEKKEN.name else 70
    assert tokens(counter, {"messages": [USER]}) == 7
    assert tokens(counter, {"messages": [USER], "tools": [TOOL]}) == with_tool
    assert tokens(counter, {"messages": [USER], "functions": [FUNCTION]}) == with_tool
    anthropic = {"messages": [USER], "tools": [{**NAMED, "input_schema": SCHEMA}]}
    assert tokens(counter, anthropic, "/v1/messages") == with_tool


def test_calls_prefills_and_texts(model: tuple[str, ExactTokenCounter]) -> None:
    """Results of calls, turns to be continued, parts and plain texts have a count; long ids of calls are cut."""
    _, counter = model
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "12"}
    assert tokens(counter, {"messages": [USER, answer, result], "tools": [TOOL]}) > 80
    prefill = {"add_generation_prompt": False, "continue_final_message": True}
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It"}]}
    assert tokens(counter, {"messages": [USER, begun], **prefill}) == 8
    parts = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
    assert tokens(counter, {"messages": [parts]}) == 7
    assert tokens(counter, {"prompt": ["one two", "one two"]}, "/v1/completions") == 6
    again = tokens(counter, {"messages": [USER]})
    assert again == tokens(counter, {"messages": [USER]}) == 7


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": "SECRET"}],
        [USER, {"role": "tool", "content": "SECRET", "tool_call_id": "x"}],
        [{"role": "SECRET", "content": "x"}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "SECRET"}]}],
    ],
)
def test_what_mistral_does_not_take_is_refused(
    messages: list[dict[str, Any]], model: tuple[str, ExactTokenCounter]
) -> None:
    """As the engine refuses it, and without a word of it."""
    answer = counted(model[1], {"messages": messages})
    assert isinstance(answer, CountFailed)
    assert "SECRET" not in answer.detail


def test_files_are_known_by_their_names(tmp_path: Path, tokenizer_dir: Path) -> None:
    """Mistral's go to `mistral-common`, and what it cannot read is told; all others are tokenizer.json files."""
    assert is_mistral_file(Path("tekken.json"))
    assert is_mistral_file(Path("tokenizer.model.v3"))
    assert not is_mistral_file(tokenizer_dir / "tokenizer.json")
    assert not isinstance(load_tokens(tokenizer_dir), MistralTokens)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(TokenizerUnusable, match=r"tekken\.json"):
        load_tokens(tmp_path / "tekken.json")


def test_a_policy_may_name_them(tmp_path: Path) -> None:
    """Checking a policy takes both kinds of Mistral's files for tokenizers."""
    good = (Path(__file__).parents[1] / "policies" / "good.yaml").read_text()
    written = "../../extproc/sim/tokenizer/tokenizer.json"
    for path in (TEKKEN, SPM_V3):
        policy = parse_policy(good.replace(written, str(path)), tmp_path)
        assert policy.models["tiny"].tokenizer == str(path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(PolicyError, match="tekken"):
        parse_policy(good.replace(written, "tekken.json"), tmp_path)
