"""`extproc tokens`, as people and CI run it: the service's own counts, and an engine's beside them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from extproc.cli import build_app
from extproc.cli.tokens_engines import one_token
from tests.support.llama_cpp import LlamaServer
from tests.support.reference_count import ReferenceCount

SAMPLES = Path(__file__).parents[2] / "deploy" / "policies"
SECRET = "xylophone-canary"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": f"Name {SECRET} rivers."}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": ["a b c", f"{SECRET} d"], "max_tokens": 5, "n": 2}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": CHAT["messages"]}
BROKEN = json.dumps({"model": "m", "messages": [{"role": "user", "content": [{"type": SECRET}]}]})


def run(*arguments: str | Path, stdin: str | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, run in this process."""
    result = CliRunner().invoke(build_app(), ["tokens", *map(str, arguments)], input=stdin)
    assert SECRET not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def values(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    """Three requests for three APIs, the second as a line of a batch file, and a blank line."""
    path = tmp_path / "requests.jsonl"
    batch = {"custom_id": "1", "url": "/v1/completions", "body": COMPLETION}
    messages = {"url": "/v1/messages", "body": MESSAGES}
    path.write_text(f"{json.dumps(CHAT)}\n{json.dumps(batch)}\n\n{json.dumps(messages)}\n")
    return path


def test_counts_are_those_of_the_plain_rules(requests_file: Path, tokenizer_dir: Path) -> None:
    """Every request is counted as rendering its template and encoding the whole text would count it."""
    reference = ReferenceCount(tokenizer_dir)
    code, out, _ = run(requests_file, "--tokenizer", tokenizer_dir, "--json")
    chat, completion, messages, summary = values(out)
    assert code == 0
    assert chat["input_tokens"] == messages["input_tokens"] == reference.count_chat(CHAT["messages"])
    assert completion["input_tokens"] == sum(map(reference.count, COMPLETION["prompt"]))
    assert (completion["sequences"], completion["output_limit_tokens"], completion["choices"]) == (2, 5, 2)
    assert [chat["number"], completion["number"], messages["number"]] == [1, 2, 4]
    assert summary["summary"]["input_tokens"] == sum(
        row["input_tokens"] for row in (chat, completion, messages)
    )


def test_one_body_from_standard_input_with_a_policy() -> None:
    """A body that spans lines is one request; the policy says which tokenizer its model has."""
    body = json.dumps({**CHAT, "model": "qwen3-8b"}, indent=1)
    code, out, _ = run("-", "--policy", SAMPLES / "small.yaml", stdin=body)
    assert code == 0
    assert "qwen3-8b" in out
    assert "openai_chat" in out


def test_what_cannot_be_counted_fails_the_command_and_is_not_quoted(
    requests_file: Path, tokenizer_dir: Path
) -> None:
    """A refused request is told with its reason and its line, and the exit code is 1."""
    requests_file.write_text(requests_file.read_text() + BROKEN + "\n")
    code, out, _ = run(requests_file, "--tokenizer", tokenizer_dir)
    assert code == 1
    assert "invalid_parameter" in out
    code, out, _ = run(requests_file, "--policy", SAMPLES / "small.yaml", "--json")
    assert code == 1
    assert values(out)[-1]["summary"]["refused"] == 4


@pytest.mark.parametrize("how", [(), ("--usage",)], ids=["by /tokenize", "by usage"])
def test_llama_cpp_says_the_same(
    how: tuple[str, ...], requests_file: Path, tokenizer_dir: Path, llama_server: LlamaServer
) -> None:
    """Against a real llama.cpp every count is compared, and none differs."""
    # Its usage tells only the first of several texts.
    requests_file.write_text(requests_file.read_text().replace('["a b c", ', "[").replace('"n": 2', '"n": 1'))
    code, out, err = run(
        requests_file, "--tokenizer", tokenizer_dir, "--against", llama_server.url, "--json", *how
    )
    assert (code, err) == (0, "")
    *rows, summary = values(out)
    assert [row["equal"] for row in rows] == [True, True, True]
    assert summary["summary"]["compared"] == 3


def test_a_difference_fails_the_command(
    requests_file: Path, qwen3_dir: Path, llama_server: LlamaServer
) -> None:
    """Counting with another model's tokenizer is found, request by request."""
    code, out, _ = run(requests_file, "--tokenizer", qwen3_dir, "--against", llama_server.url)
    assert code == 1
    assert "differs by" in out
    assert "3 different" in out


@contextmanager
def engine(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """An engine that answers as `answer(path, body)` says, at the address that comes out."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.headers["authorization"] == "Bearer k"
            status, value = answer(self.path, body)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Keep quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_vllm_is_asked_in_its_own_form(requests_file: Path, tokenizer_dir: Path) -> None:
    """The /tokenize of vLLM gets the conversation, or each text, and /count_tokens an Anthropic request."""
    reference = ReferenceCount(tokenizer_dir)
    asked: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        if path == "/v1/messages/count_tokens":
            return 200, {"input_tokens": reference.count_chat(body["messages"])}
        assert path == "/tokenize"
        if "messages" in body:
            return 200, {"count": reference.count_chat(body["messages"]), "max_model_len": 9}
        return 200, {"count": reference.count(body["prompt"]), "max_model_len": 9}

    with engine(answer) as url:
        code, out, _ = run(
            requests_file,
            "--tokenizer",
            tokenizer_dir,
            "--against",
            url,
            "--header",
            "authorization=Bearer k",
        )
    assert code == 0
    assert "3 compared; 0 different" in out
    assert {"model": "m", "messages": CHAT["messages"]} in asked
    assert {"prompt": "a b c", "add_special_tokens": True} in asked
    assert MESSAGES in asked


def test_vllm_gets_what_its_tokenize_does_not_know_in_a_form_that_it_does(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    """Thoughts by their new name, efforts and documents as variables; truncation is done here."""
    file = tmp_path / "body.json"
    thoughtful = [*CHAT["messages"], {"role": "assistant", "content": "b", "reasoning_content": "hm"}]
    file.write_text(
        json.dumps(
            {
                **CHAT,
                "messages": thoughtful,
                "reasoning_effort": "none",
                "documents": [{"text": "d"}],
                "truncate_prompt_tokens": 3,
            }
        )
    )
    asked: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"count": 50}

    with engine(answer) as url:
        code, _, _ = run(
            file, "--tokenizer", tokenizer_dir, "--against", url, "--header", "authorization=Bearer k"
        )
    assert code == 0
    assert asked[-1]["messages"][-1] == {"role": "assistant", "content": "b", "reasoning": "hm"}
    assert asked[-1]["chat_template_kwargs"] == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "documents": [{"text": "d"}],
    }


def test_an_engine_that_fails_is_not_quoted(requests_file: Path, tokenizer_dir: Path) -> None:
    """Status and address are told, never the engine's words; the comparison has failed."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("prompt") == "a":
            return 200, {"count": 1}
        return 500, {"error": f"cannot read {body}"}

    with engine(answer) as url:
        code, out, _ = run(
            requests_file,
            "--tokenizer",
            tokenizer_dir,
            "--against",
            url,
            "--header",
            "authorization=Bearer k",
        )
    assert code == 1
    assert "status 500" in out
    assert "3 without an answer" in out


def test_a_bench_holds_the_ways_to_each_other(requests_file: Path, tokenizer_dir: Path) -> None:
    """All ways count the same, and each has its row."""
    code, out, _ = run(requests_file, "--tokenizer", tokenizer_dir, "--bench")
    assert code == 0
    assert "encode_batch_fast" in out
    assert "0 counted otherwise" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--policy"),
        (("--tokenizer", "x", "--policy", "y"), "--policy"),
        (("--policy", "y", "--chat-template", "x"), "--chat-template"),
        (("--tokenizer", "x", "--usage"), "--usage"),
        (("--tokenizer", "x", "--bench", "--against", "http://x"), "--bench"),
        (("--tokenizer", "x", "--against", "file:///etc/passwd"), "--against"),
        (("--tokenizer", "x", "--header", "nonsense"), "--header"),
        (("--tokenizer", "/nowhere"), "/nowhere"),
        (("--tokenizer", "/nowhere", "--against", "http://127.0.0.1:1"), "--against"),
    ],
)
def test_what_cannot_be_carried_out_is_told(
    arguments: tuple[str, ...], told: str, requests_file: Path
) -> None:
    """Exit code 2, and the message names the option or the file."""
    code, _, err = run(requests_file, *arguments)
    assert code == 2
    assert told in err


@pytest.mark.parametrize(
    ("dialect", "body", "field"),
    [
        ("openai_chat", {}, "max_tokens"),
        ("openai_completions", {}, "max_tokens"),
        ("openai_responses", {}, "max_output_tokens"),
        ("anthropic_messages", {}, "max_tokens"),
        ("llama_cpp", {}, "n_predict"),
        ("tgi", {"inputs": "x"}, "parameters"),
        ("generate", {"inputs": "x"}, "parameters"),
        ("generate", {"text": "x"}, "sampling_params"),
        ("sagemaker", {"messages": []}, "max_tokens"),
        ("sagemaker", {"inputs": "x"}, "parameters"),
        ("vllm_tokens", {}, "sampling_params"),
        ("kserve", {}, "max_tokens"),
    ],
)
def test_a_real_answer_has_one_token(dialect: str, body: dict[str, Any], field: str) -> None:
    """Asking for usage never makes an engine write more than it has to."""
    assert one_token(dialect, body)[field] in (1, {"max_tokens": 1}, {"max_new_tokens": 1})
