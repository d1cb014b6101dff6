"""The parts the suite stands on are themselves what they claim to be."""

from __future__ import annotations

import json
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import tiktoken
from tokenizers import Tokenizer

from tests.support import train_tokenizer
from tests.support.envoy_binary import EnvoyProcess
from tests.support.llama_cpp import LlamaServer
from tests.support.qwen3 import DATA_DIR
from tests.support.reference_count import ReferenceCount
from tests.support.valkey import (
    NO_PERSISTENCE,
    ValkeyServer,
    server_programs,
    valkey_cluster,
    valkey_sentinel,
)

GOLDENS: dict[str, Any] = json.loads((DATA_DIR / "goldens.json").read_text(encoding="utf-8"))

ECHO = """
static_resources:
  listeners:
  - name: web
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": >-
            type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: web
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: /}, direct_response: {status: 200, body: {inline_string: hello}}}]
          http_filters:
          - name: router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
"""


def _text(pieces: list[tuple[str, int]]) -> str:
    return "".join(piece * times for piece, times in pieces)


@pytest.fixture(scope="module")
def qwen(qwen3_dir: Path) -> dict[str, ReferenceCount]:
    ours = (DATA_DIR / "qwen25_chat_template.jinja").read_text(encoding="utf-8")
    return {"qwen3": ReferenceCount(qwen3_dir), "qwen25": ReferenceCount(qwen3_dir, chat_template=ours)}


def test_the_shipped_tokenizer_is_what_its_script_makes(tmp_path: Path) -> None:
    """Training again gives both files of the package byte for byte."""
    train_tokenizer.main(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (train_tokenizer.TOKENIZER_DIR / name).read_bytes()


def test_the_shipped_tokenizer_covers_every_byte(tokenizer_dir: Path) -> None:
    """Any text survives encoding and decoding, and no piece of it is lost to an unknown token."""
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == train_tokenizer.VOCABULARY_SIZE
    text = "".join(map(chr, [*range(0x3000), *range(0xFB00, 0x10000), *range(0x1F300, 0x1FB00)]))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_shipped_tokenizer_is_also_a_tiktoken_encoding(tokenizer_dir: Path) -> None:
    """Its ids are its merge ranks, so that the same file serves the fast encoder."""
    document = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    to_byte = {character: byte for byte, character in _byte_characters()}
    ranks = {bytes(to_byte[c] for c in token): rank for token, rank in document["model"]["vocab"].items()}
    fast = tiktoken.Encoding(
        "tiny", pat_str=train_tokenizer.SPLIT_REGEX, mergeable_ranks=ranks, special_tokens={}
    )
    slow = ReferenceCount(tokenizer_dir)
    for path in sorted(train_tokenizer.CORPUS_DIR.iterdir()):
        text = path.read_text(encoding="utf-8")
        assert fast.encode_ordinary(text) == slow.ids(text)


@pytest.mark.parametrize("golden", GOLDENS["texts"], ids=lambda golden: golden["name"])
def test_reference_count_of_texts(golden: dict[str, Any], qwen: dict[str, ReferenceCount]) -> None:
    """The reference count of a text is the value known from elsewhere."""
    assert qwen["qwen3"].count(_text(golden["text"])) == golden["tokens"]


@pytest.mark.parametrize("golden", GOLDENS["chats"], ids=lambda golden: golden["name"])
def test_reference_count_of_chats(golden: dict[str, Any], qwen: dict[str, ReferenceCount]) -> None:
    """The reference count of a conversation is the value known from elsewhere."""
    messages = [{"role": "system", "content": golden["system"]}] if "system" in golden else []
    messages.append({"role": "user", "content": _text(golden["user"])})
    counted = qwen[golden["template"]].count_chat(
        messages,
        tools=golden.get("tools"),
        add_generation_prompt=golden.get("add_generation_prompt", True),
        **golden.get("template_kwargs", {}),
    )
    assert counted == golden["tokens"]


def test_llama_server_ends_with_its_block(llama_server: LlamaServer, tmp_path: Path) -> None:
    """A second server runs beside the first on a port of its own, and is gone after its block."""
    with LlamaServer(model=llama_server.model, log=tmp_path / "log", parallel=1) as second:
        url = second.url
        assert url != llama_server.url
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            assert b"llamacpp:requests_processing 0" in answer.read()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/health")


def test_llama_server_says_why_it_does_not_start(tmp_path: Path) -> None:
    """A model that cannot be loaded is an error that names the model and the log."""
    model = tmp_path / "no.gguf"
    model.write_bytes(b"no model")
    with pytest.raises(RuntimeError, match=r"no\.gguf"), LlamaServer(model=model, log=tmp_path / "log"):
        pass


@pytest.mark.parametrize("program", server_programs(), ids=lambda program: program.name)
@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "tcp"])
def test_valkey_comes_back_at_its_address(program: Path, tcp: bool) -> None:
    """A killed server is gone, and after a start it answers at the same address with an empty store."""
    with ValkeyServer(program=program, tcp=tcp) as server, server.client() as client:
        client.set("key", "value")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        server.start()
        assert client.get("key") is None
        assert client.config_get("save") == {"save": ""}
        directory = server.directory
    assert not directory.exists()


def test_valkey_takes_arguments() -> None:
    """Arguments reach the server, and a wrong one is an error with the server's own words."""
    with ValkeyServer(arguments=(*NO_PERSISTENCE, "--maxmemory", "5mb")) as server, server.client() as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(5 * 2**20)}
    with pytest.raises(RuntimeError, match="no-such-thing"), ValkeyServer(arguments=("--no-such-thing", "1")):
        pass


def test_a_paused_valkey_keeps_its_callers_waiting(valkey: ValkeyServer) -> None:
    """A paused server accepts connections and answers nothing until it is resumed."""
    with (
        valkey.client() as before,
        redis.Redis.from_url(valkey.url, socket_timeout=0.1, retry=None) as client,
    ):
        assert before.ping()
        valkey.pause()
        try:
            with pytest.raises(redis.TimeoutError):
                client.ping()
        finally:
            valkey.resume()
        assert client.ping()


@pytest.mark.parametrize("program", server_programs(), ids=lambda program: program.name)
def test_cluster_serves_every_slot(program: Path) -> None:
    """Three nodes share all slots: keys without a tag spread over all of them, keys with one tag meet."""
    with valkey_cluster(program=program) as nodes:
        with redis.RedisCluster(host="127.0.0.1", port=nodes[0].port) as cluster:
            for number in range(100):
                cluster.set(f"key-{number}", number)
            assert cluster.mset({"{tag}1": 1, "{tag}2": 2})
            with pytest.raises(redis.RedisClusterException):
                cluster.mset({"a": 1, "b": 2})
        for node in nodes:
            with node.client() as client:
                assert client.dbsize() > 0


@pytest.mark.parametrize("program", server_programs(), ids=lambda program: program.name)
def test_sentinel_promotes_the_replica(program: Path) -> None:
    """When the primary is killed, the Sentinel names the replica instead."""
    with (
        valkey_sentinel(program=program) as pair,
        redis.Redis(host="127.0.0.1", port=pair.sentinel_port) as sentinel,
    ):
        primary = partial(sentinel.sentinel_get_master_addr_by_name, pair.service)
        assert primary() == (b"127.0.0.1", pair.primary.port)
        pair.primary.kill()
        deadline = time.monotonic() + 30
        while primary() != (b"127.0.0.1", pair.replica.port):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_envoy_runs_a_configuration(tmp_path: Path) -> None:
    """Two Envoys run side by side from one text: ports by listener name, counters by pattern, a log each."""
    with (
        EnvoyProcess(config_text=ECHO, directory=tmp_path / "a") as first,
        EnvoyProcess(config_text=ECHO, directory=tmp_path / "b") as second,
    ):
        assert first.listener_port("web") != second.listener_port("web")
        with urllib.request.urlopen(f"http://127.0.0.1:{first.listener_port('web')}/") as answer:
            assert answer.read() == b"hello"
        counter = "http.web.downstream_rq_2xx"
        assert first.stats(f"^{counter}$") == {counter: 1}
        assert second.stats(f"^{counter}$") == {counter: 0}
        with pytest.raises(LookupError, match="'other'"):
            first.listener_port("other")
        log = first.log
    assert "exiting" in log.read_text(encoding="utf-8")


def test_envoy_says_what_is_wrong_with_a_configuration(tmp_path: Path) -> None:
    """A configuration that Envoy refuses is an error with Envoy's own words."""
    broken = ECHO.replace("stat_prefix", "no_such_field")
    with (
        pytest.raises(RuntimeError, match="no_such_field"),
        EnvoyProcess(config_text=broken, directory=tmp_path),
    ):
        pass


def _byte_characters() -> list[tuple[int, str]]:
    """How byte-level BPE writes bytes as letters: printable ones as themselves, the others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*((b, chr(b)) for b in printable), *((b, chr(256 + n)) for n, b in enumerate(others))]
