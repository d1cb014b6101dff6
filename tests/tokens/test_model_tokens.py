"""Counts that are known from outside, laws of counting, and where counting stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from extproc.adapters.tokens.chat_template import ChatTemplate, ChatTemplates
from extproc.adapters.tokens.errors import TokenizerUnusable
from extproc.adapters.tokens.load import load_model_tokens
from extproc.adapters.tokens.model_tokens import ModelTokens
from extproc.domain.prompt import AtLeast, ChatPrompt, Counted, TextPrompt
from tests.tokens.counting import NO_LIMIT, chat, count, count_text, run
from tests.tokens.family import CHATML, FAMILY, of_merges, save

DATA_DIR = Path(__file__).parents[1] / "data"
GOLDENS: dict[str, list[dict[str, Any]]] = json.loads((DATA_DIR / "goldens.json").read_text("utf-8"))


def unpacked(pieces: list[tuple[str, int]]) -> str:
    return "".join(piece * times for piece, times in pieces)


def named(entry: dict[str, Any]) -> str:
    return str(entry["name"])


@pytest.mark.parametrize("golden", GOLDENS["texts"], ids=named)
def test_texts_have_the_counts_known_from_elsewhere(qwen3: ModelTokens, golden: dict[str, Any]) -> None:
    """Also for runs of one character, as long as they may be."""
    assert count_text(qwen3, unpacked(golden["text"])) == golden["tokens"]


@pytest.mark.parametrize("golden", GOLDENS["chats"], ids=named)
def test_chats_have_the_counts_known_from_elsewhere(
    qwen3: ModelTokens, monkeypatch: pytest.MonkeyPatch, golden: dict[str, Any]
) -> None:
    """With the model's own template and with that of its predecessor; one of the sources is an engine's usage."""
    if golden["template"] == "qwen25":
        source = (DATA_DIR / "qwen25_chat_template.jinja").read_text("utf-8")
        template = ChatTemplate(source, name="qwen25", special_tokens={})
        monkeypatch.setattr(qwen3, "_templates", ChatTemplates({"default": template}))
        monkeypatch.setattr(qwen3, "_repeatable", False)  # the cache of prompts is for one template
    messages = [{"role": "user", "content": unpacked(golden["user"])}]
    if "system" in golden:
        messages.insert(0, {"role": "system", "content": golden["system"]})
    settings = {
        key: golden[key] for key in ("tools", "template_kwargs", "add_generation_prompt") if key in golden
    }
    assert count(qwen3, ChatPrompt(messages=messages, **settings)) == golden["tokens"]


WORDS = st.text(st.sampled_from("ab c.\n1é你🤖<|im_start|>\u0301"), max_size=30)


@settings(deadline=None)
@given(contents=st.lists(WORDS, min_size=1, max_size=5), more=WORDS)
def test_adding_a_message_or_a_tool_adds_tokens(tiny: ModelTokens, contents: list[str], more: str) -> None:
    """No message and no tool is ever free."""
    alone = count(tiny, chat(*contents))
    assert count(tiny, chat(*contents, more)) > alone
    tool = {"type": "function", "function": {"name": "f", "description": more, "parameters": None}}
    one = count(tiny, chat(*contents, tools=[tool]))
    assert one > alone
    assert count(tiny, chat(*contents, tools=[tool, tool])) > one


@settings(deadline=None)
@given(left=WORDS, right=WORDS)
def test_an_added_token_parts_a_text(tiny: ModelTokens, left: str, right: str) -> None:
    """What stands on both sides of an added token counts as if it stood alone."""
    together = count_text(tiny, f"{left}<|im_end|>{right}")
    assert together == count_text(tiny, left) + 1 + count_text(tiny, right)


@settings(deadline=None)
@given(text=WORDS, limit_tokens=st.integers(0, 40))
def test_a_limit_never_changes_a_count(tiny: ModelTokens, text: str, limit_tokens: int) -> None:
    """An answer is exact, or is a lower bound over the limit that the exact count respects."""
    exact = count_text(tiny, text)
    answer = run(tiny, TextPrompt(texts=(text,), add_special_tokens=False), limit_tokens)
    if isinstance(answer, AtLeast):
        assert limit_tokens < answer.input_tokens <= exact
    else:
        assert answer.per_sequence_tokens == (exact,)
        assert exact <= limit_tokens
    assert count_text(tiny, text) == exact


def test_every_text_is_a_sequence_of_its_own(tiny: ModelTokens) -> None:
    """Counts come in order, one per text, and one text over the limit is told about, whichever it is."""
    texts = ("", "one two three", "four")
    answer = run(tiny, TextPrompt(texts=texts))
    assert answer == Counted(per_sequence_tokens=tuple(count_text(tiny, text) for text in texts))
    assert run(tiny, TextPrompt(texts=())) == Counted(per_sequence_tokens=())
    over = run(tiny, TextPrompt(texts=("one", "one two three four five six seven", "one")), 3)
    assert isinstance(over, AtLeast)


def test_a_text_far_over_the_limit_is_not_encoded_to_its_end(qwen3: ModelTokens) -> None:
    """Counting stops with the slice that passes the limit, and at once if the bytes alone pass it."""
    text = "the river rose overnight " * 40_000
    before = qwen3.bytes_encoded
    over = run(qwen3, TextPrompt(texts=(text,)), 5_000)
    assert isinstance(over, AtLeast)
    assert over.input_tokens > 5_000
    assert 0 < qwen3.bytes_encoded - before < 100_000
    before = qwen3.bytes_encoded
    assert isinstance(run(qwen3, TextPrompt(texts=(text,)), 1_000), AtLeast)
    assert qwen3.bytes_encoded == before
    assert count_text(qwen3, text) == 40_000 * 4 + 1


def test_what_composing_makes_shorter_is_not_over_the_limit(tmp_path: Path) -> None:
    """The bound by bytes knows that a text may be three times shorter once it is normalized."""
    doubling = of_merges(("K", "K"), ("KK", "KK"), ("KKKK", "KKKK"), split=r"\p{L}+|\P{L}+", nfc=True)
    model = load_model_tokens(save(doubling, tmp_path))
    assert model.encoder_name == "tiktoken"
    assert run(model, TextPrompt(texts=("\u212a" * 80,)), 10) == Counted(per_sequence_tokens=(10,))
    assert run(model, TextPrompt(texts=("\u212a" * 80,)), 9) == AtLeast(input_tokens=10)


def test_a_piece_that_was_not_counted_to_its_end_is_counted_anew(qwen3: ModelTokens) -> None:
    """Stopping early leaves no wrong count behind."""
    text = "the road was flooded " * 20_000
    assert isinstance(run(qwen3, TextPrompt(texts=(text,)), 5_000), AtLeast)
    assert isinstance(run(qwen3, ChatPrompt(messages=[{"role": "user", "content": text}]), 5_000), AtLeast)
    assert count_text(qwen3, text) > 60_000
    assert count(qwen3, chat(text)) > 60_000


def test_repeated_pieces_are_encoded_once(qwen3: ModelTokens) -> None:
    """The same new piece many times in one text costs one encoding."""
    before = qwen3.bytes_encoded
    unit = "a piece of text that was never seen<|im_end|>"
    assert count_text(qwen3, unit * 500) == 500 * count_text(qwen3, unit)
    assert qwen3.bytes_encoded - before < 2 * len(unit)


def test_a_prompt_with_the_time_in_it_is_rendered_each_time(tmp_path: Path) -> None:
    """A template that reads the clock is not answered from the cache of prompts."""
    source = "{{ strftime_now('%f') }}{{ messages[0].content }}"
    model = load_model_tokens(save(FAMILY["gpt2"](), tmp_path, chat_template=source))
    for _ in range(3):
        run(model, chat("hi"), NO_LIMIT)
    assert model.prompts.hits == 0


def test_a_prompts_text_cannot_pass_for_a_piece(tiny: ModelTokens) -> None:
    """Whole prompts and pieces are kept apart: text that looks like a stored prompt is counted as text."""
    prompt = chat("hi")
    tokens = count(tiny, prompt)
    looks_alike = json.dumps([prompt.messages, None, None, {}, [True, False, False]], separators=(",", ":"))
    assert count_text(tiny, looks_alike) == count_text(tiny, looks_alike + "<|im_end|>") - 1
    assert count_text(tiny, looks_alike) != tokens


def test_a_model_is_loaded_from_a_directory_or_a_file(tmp_path: Path) -> None:
    """Both name the same tokenizer; a template file that is named wins over the configuration's."""
    directory = save(FAMILY["gpt2"](), tmp_path, chat_template=CHATML)
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    one = count(load_model_tokens(directory), chat("hi"))
    assert count(load_model_tokens(directory / "tokenizer.json"), chat("hi")) == one
    by_other = load_model_tokens(directory, other)
    assert count(by_other, chat("hi")) == count_text(by_other, "hi")


def test_padding_and_truncation_of_the_file_do_not_count(tmp_path: Path) -> None:
    """A file that asks for 8 tokens padded to 128 is counted without either, as engines do."""
    model = load_model_tokens(save(FAMILY["bert"](), tmp_path))
    assert count_text(model, "one") < 8
    assert count_text(model, "one two three " * 20) > 20


def broken(directory: Path, **files: str) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content, "utf-8")
    return directory


EMPTY = Tokenizer(models.BPE()).to_str()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, r"tokenizer\.json: .*check the path"),
        ({"tokenizer": "{"}, r"tokenizer\.json is not .*save_pretrained"),
        ({"tokenizer": "[]"}, r"tokenizer\.json is not .*save_pretrained"),
        ({"tokenizer": '{"model": {"type": "New"}}'}, r"tokenizer\.json cannot be loaded .*newer release"),
        ({"tokenizer": EMPTY, "tokenizer_config": "{"}, r"tokenizer_config\.json cannot be read .*correct"),
        ({"tokenizer": EMPTY, "tokenizer_config": "[]"}, r"tokenizer_config\.json is not .*correct"),
        ({"tokenizer": EMPTY, "special_tokens_map": "7"}, r"special_tokens_map\.json is not .*correct"),
        (
            {"tokenizer": EMPTY, "tokenizer_config": '{"chat_template": "{% x"}'},
            r"line 1 is not a valid",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_a_remedy(
    tmp_path: Path, files: dict[str, str], told: str
) -> None:
    """Whatever is wrong with a model's files, the message says which file and what to do."""
    with pytest.raises(TokenizerUnusable, match=told):
        load_model_tokens(broken(tmp_path, **files))
