from __future__ import annotations

from typing import Any

import pytest

from extproc.dialects import (
    anthropic_messages,
    llama_cpp,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    sagemaker,
    shared_generate,
    tgi,
    vllm_tokens,
)
from extproc.dialects.elsewhere import HIDDEN_PROMPTS
from extproc.dialects.reading import LARGEST_COUNT, BadRequest, Dialect, InferenceRequest, Truncation
from extproc.domain.prompt import ChatPrompt, TextPrompt, TokenIdPrompt


def read(dialect: Dialect, **body: Any) -> InferenceRequest:
    return dialect.read({"model": "m", **body}, dialect.paths[0])


def refused_param(dialect: Dialect, **body: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        read(dialect, **body)
    return caught.value.param


SHAPES: list[tuple[Any, TextPrompt | TokenIdPrompt]] = [
    ("one", TextPrompt(texts=("one",))),
    ("", TextPrompt(texts=("",))),
    (["one two three", "four five", "six"], TextPrompt(texts=("one two three", "four five", "six"))),
    ([9906, 1917, 13], TokenIdPrompt(lengths_tokens=(3,))),
    ([0], TokenIdPrompt(lengths_tokens=(1,))),
    ([[9906], [1917, 13]], TokenIdPrompt(lengths_tokens=(1, 2))),
]
NO_SHAPES: list[Any] = [
    [],
    [[]],
    [[1], []],
    [1, "x"],
    ["x", 1],
    [[1], "x"],
    [[1], 2],
    [["x"]],
    [-1],
    [[-1]],
    [1.0],
    [True],
    [None],
    [[[1]]],
    [{}],
    {},
    1,
    True,
]
WITH_PROMPTS = [
    pytest.param(openai_completions.DIALECT, "prompt", id="completions"),
    pytest.param(openai_embeddings.DIALECT, "input", id="embeddings"),
    pytest.param(llama_cpp.DIALECT, "prompt", id="llama.cpp"),
]


@pytest.mark.parametrize(("dialect", "name"), WITH_PROMPTS)
@pytest.mark.parametrize(("value", "prompt"), SHAPES, ids=lambda value: repr(value)[:30])
def test_the_four_shapes_of_a_prompt(dialect: Dialect, name: str, value: Any, prompt: Any) -> None:
    """TOK-03: a text, texts, token ids and lists of them are all read, ids by their number alone."""
    assert read(dialect, **{name: value}).prompt == prompt


@pytest.mark.parametrize(("dialect", "name"), WITH_PROMPTS)
@pytest.mark.parametrize("value", NO_SHAPES, ids=repr)
def test_other_shapes_of_a_prompt_are_refused(dialect: Dialect, name: str, value: Any) -> None:
    """TOK-03: an empty or mixed list, or anything else, is refused and named."""
    assert refused_param(dialect, **{name: value}) == name


@pytest.mark.parametrize(("dialect", "name"), WITH_PROMPTS)
def test_a_prompt_is_required(dialect: Dialect, name: str) -> None:
    """Without a prompt, or with null, there is nothing to count."""
    assert refused_param(dialect) == name == refused_param(dialect, **{name: None})


@pytest.mark.parametrize(
    ("limit", "expected"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 0}, 0)]
)
def test_completions_have_a_default_of_their_own(limit: dict[str, Any], expected: int) -> None:
    """TOK-04: absent and null mean the API's 16 tokens, not the rest of the window."""
    assert read(openai_completions.DIALECT, prompt="a", **limit).output_limit_tokens == expected


def test_completions_read_everything_that_costs() -> None:
    """`best_of`, truncation and the special tokens count; `echo` does not."""
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "echo": True, "stream": True, "logprobs": 5}
    body |= {"add_special_tokens": False, "truncate_prompt_tokens": 7, "max_tokens": 9}
    assert read(openai_completions.DIALECT, **body) == InferenceRequest(
        model="m",
        prompt=TextPrompt(texts=("a", "b"), add_special_tokens=False),
        output_limit_tokens=9,
        choices=3,
        stream=True,
        truncation=Truncation(keep_tokens=7),
    )


def test_a_suffix_is_part_of_every_prompt() -> None:
    """The engine reads prompt and suffix between three marker tokens, once per prompt."""
    request = read(openai_completions.DIALECT, prompt=["def a", "def b"], suffix="return x")
    assert request.prompt == TextPrompt(texts=("def areturn x", "def breturn x"))
    assert request.extra_input_tokens == 6
    assert read(openai_completions.DIALECT, prompt="a", suffix="") == read(
        openai_completions.DIALECT, prompt="a"
    )
    assert refused_param(openai_completions.DIALECT, prompt=[1], suffix="x") == "suffix"
    assert refused_param(openai_completions.DIALECT, prompt="a", suffix=1) == "suffix"


USER = {"role": "user", "content": "a"}
WITH_MESSAGES = [
    pytest.param(openai_chat.DIALECT, {"messages": [USER]}, id="chat"),
    pytest.param(openai_completions.DIALECT, {"prompt": "a"}, id="completions"),
    pytest.param(anthropic_messages.DIALECT, {"messages": [USER], "max_tokens": 9}, id="anthropic"),
    pytest.param(openai_responses.DIALECT, {"input": "a"}, id="responses"),
]


@pytest.mark.parametrize(("dialect", "body"), WITH_MESSAGES)
@pytest.mark.parametrize("name", HIDDEN_PROMPTS)
def test_a_prompt_from_elsewhere_is_refused(dialect: Dialect, body: dict[str, Any], name: str) -> None:
    """What an engine would read instead of the counted prompt is refused, whatever it holds."""
    values: list[Any] = [[], [1], {}, "AAAA", 0]
    for value in values:
        assert refused_param(dialect, **body, **{name: value}) == name
    assert read(dialect, **body, **{name: None}) == read(dialect, **body)


@pytest.mark.parametrize(("dialect", "body"), WITH_MESSAGES)
def test_ids_handed_on_between_engines_are_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    """Ids in `kv_transfer_params` replace the messages; its other members are the engine's business."""
    transfer = {"prompt_token_ids": [1] * 9}
    param = "kv_transfer_params.prompt_token_ids"
    assert refused_param(dialect, **body, kv_transfer_params=transfer) == param
    members: list[Any] = [None, {}, {"do_remote_decode": True}, {"prompt_token_ids": None}, []]
    for harmless in members:
        assert read(dialect, **body, kv_transfer_params=harmless) == read(dialect, **body)


LLAMA_LIMITS: list[tuple[dict[str, Any], int | None, int | None]] = [
    ({"n_predict": 50}, None, 50),
    ({"n_predict": 50, "max_tokens": 5}, 50, 50),
    ({"n_predict": 5, "max_tokens": 50}, 50, 50),
    ({"n_predict": -1, "max_tokens": 5}, None, None),
    ({"n_predict": None, "max_tokens": 5}, 5, 5),
    ({"n_predict": 0}, None, 16),
]


@pytest.mark.parametrize(("body", "chat_tokens", "completion_tokens"), LLAMA_LIMITS)
def test_a_second_limit_counts_where_it_is_larger(
    body: dict[str, Any], chat_tokens: int | None, completion_tokens: int | None
) -> None:
    """One engine heeds `n_predict`, the others do not: the larger of both limits is reserved."""
    assert read(openai_chat.DIALECT, messages=[USER], **body).output_limit_tokens == chat_tokens
    assert read(openai_completions.DIALECT, prompt="a", **body).output_limit_tokens == completion_tokens


@pytest.mark.parametrize("value", [True, -2, 1.5, "7", [], LARGEST_COUNT + 1])
def test_a_second_limit_is_checked(value: Any) -> None:
    """It is a count, or -1 for none."""
    assert refused_param(openai_chat.DIALECT, messages=[USER], n_predict=value) == "n_predict"


def test_embeddings_generate_nothing() -> None:
    """Only the input is reserved; a conversation is rendered without a generation prompt."""
    assert read(openai_embeddings.DIALECT, input="a", max_tokens=50).output_limit_tokens == 0
    chat = read(openai_embeddings.DIALECT, messages=[{"role": "user", "content": "a"}]).prompt
    assert chat == ChatPrompt(messages=[{"role": "user", "content": "a"}], add_generation_prompt=False)
    assert refused_param(openai_embeddings.DIALECT, input="a", padding="max_length") == "padding"


TGI: list[tuple[dict[str, Any], InferenceRequest]] = [
    (
        {"inputs": "a"},
        InferenceRequest(model=None, prompt=TextPrompt(texts=("a",)), output_limit_tokens=None),
    ),
    (
        {"inputs": "a", "parameters": None, "stream": None},
        InferenceRequest(model=None, prompt=TextPrompt(texts=("a",)), output_limit_tokens=None),
    ),
    (
        {"inputs": "a", "parameters": {"max_new_tokens": None, "best_of": None, "truncate": None}},
        InferenceRequest(model=None, prompt=TextPrompt(texts=("a",)), output_limit_tokens=None),
    ),
    (
        {"inputs": "a", "parameters": {"max_new_tokens": 20, "best_of": 2, "truncate": 9, "details": True}},
        InferenceRequest(
            model=None,
            prompt=TextPrompt(texts=("a",)),
            output_limit_tokens=20,
            choices=2,
            truncation=Truncation(keep_tokens=9),
        ),
    ),
]


@pytest.mark.parametrize(("body", "request_read"), TGI, ids=lambda value: repr(value)[:50])
def test_tgi_requests(body: dict[str, Any], request_read: InferenceRequest) -> None:
    """TOK-04: `parameters` and its members may be absent or null, and name no model."""
    assert shared_generate.DIALECT.read(body, "/generate") == request_read


@pytest.mark.parametrize(
    ("path", "stream", "streams"),
    [
        ("/generate_stream", None, True),
        ("/team/generate_stream?x=1", False, True),
        ("/generate%5fstream", None, True),
        ("/", True, True),
        ("/", None, False),
        ("/?x=/generate_stream", None, False),
    ],
)
def test_tgi_streams_by_route_or_field(path: str, stream: bool | None, streams: bool) -> None:
    """The route's last segment decides, and the field on the route that does either."""
    assert tgi.DIALECT.read({"inputs": "a", "stream": stream}, path).stream is streams


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "inputs"),
        ({"inputs": None}, "inputs"),
        ({"inputs": ["a"]}, "inputs"),
        ({"inputs": "a", "parameters": []}, "parameters"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
        ({"inputs": "a", "parameters": {"max_new_tokens": "9"}}, "parameters.max_new_tokens"),
        ({"inputs": "a", "parameters": {"best_of": 0}}, "parameters.best_of"),
        ({"inputs": "a", "parameters": {"truncate": -1}}, "parameters.truncate"),
        ({"inputs": "a", "model": 1}, "model"),
    ],
)
def test_tgi_refusals(body: dict[str, Any], param: str) -> None:
    """A refused member is named with the place where it stands."""
    with pytest.raises(BadRequest) as caught:
        shared_generate.DIALECT.read(body, "/generate")
    assert caught.value.param == param


SGLANG: list[tuple[dict[str, Any], InferenceRequest]] = [
    ({"text": "a"}, InferenceRequest(model=None, prompt=TextPrompt(texts=("a",)), output_limit_tokens=128)),
    (
        {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 5, "n": 2}, "stream": True},
        InferenceRequest(
            model=None,
            prompt=TokenIdPrompt(lengths_tokens=(2, 1)),
            output_limit_tokens=5,
            choices=2,
            stream=True,
        ),
    ),
    (
        {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 5, "n": 3}, {"max_new_tokens": 50}]},
        InferenceRequest(model=None, prompt=TextPrompt(texts=("a", "b")), output_limit_tokens=50, choices=3),
    ),
    (
        {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 5}, {}]},
        InferenceRequest(model=None, prompt=TextPrompt(texts=("a", "b")), output_limit_tokens=128),
    ),
]


@pytest.mark.parametrize(("body", "request_read"), SGLANG, ids=lambda value: repr(value)[:50])
def test_sglang_requests_share_the_route(body: dict[str, Any], request_read: InferenceRequest) -> None:
    """`/generate` is told apart by the prompt's field; a batch counts by its largest parameters."""
    assert shared_generate.DIALECT.read(body, "/generate") == request_read


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": [1]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"text": "a", "sampling_params": 1}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": True}}, "sampling_params.max_new_tokens"),
        ({"text": ["a"], "sampling_params": [{"n": 0}]}, "sampling_params[0].n"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "session_params": {"id": "s"}}, "session_params"),
        ({"input_embeds": [[0.1]]}, "inputs"),
    ],
)
def test_sglang_refusals(body: dict[str, Any], param: str) -> None:
    """A batch's parameters fit its prompts, and what no tokenizer can count is refused."""
    with pytest.raises(BadRequest) as caught:
        shared_generate.DIALECT.read(body, "/generate")
    assert caught.value.param == param


def test_tokens_in_is_counted_by_length() -> None:
    """The token API of vLLM takes one list of ids and `SamplingParams`' own default limit."""
    assert read(vllm_tokens.DIALECT, token_ids=[5, 6, 7]) == InferenceRequest(
        model="m", prompt=TokenIdPrompt(lengths_tokens=(3,)), output_limit_tokens=16
    )
    assert read(vllm_tokens.DIALECT, token_ids=[5], sampling_params={"max_tokens": 4, "n": 2}).choices == 2
    for token_ids in (None, [], "a", ["a"], [[1], [2]]):
        assert refused_param(vllm_tokens.DIALECT, token_ids=token_ids) == "token_ids"


@pytest.mark.parametrize(
    ("body", "limit_tokens"),
    [
        ({"n_predict": -1}, None),
        ({"max_tokens": -1}, None),
        ({}, None),
        ({"n_predict": 0}, 0),
        ({"n_predict": 7, "max_tokens": 9}, 7),
        ({"max_tokens": 9}, 9),
    ],
)
def test_llama_cpp_limits(body: dict[str, Any], limit_tokens: int | None) -> None:
    """-1 is llama.cpp's word for "no limit", and `n_predict` wins over its newer name."""
    assert read(llama_cpp.DIALECT, prompt="a", **body).output_limit_tokens == limit_tokens


@pytest.mark.parametrize("value", [True, -2, 1.5, "7"])
def test_llama_cpp_refuses_other_limits(value: Any) -> None:
    """Only -1 is special."""
    assert refused_param(llama_cpp.DIALECT, prompt="a", n_predict=value) == "n_predict"


def test_invocations_are_told_apart_by_field() -> None:
    """SageMaker's one route reads a body as the API whose field it has."""
    user = {"role": "user", "content": "a"}
    assert read(sagemaker.DIALECT, messages=[user]).prompt == ChatPrompt(messages=[user])
    assert read(sagemaker.DIALECT, prompt="a").output_limit_tokens == 16
    assert read(sagemaker.DIALECT, input="a").output_limit_tokens == 0
    assert read(sagemaker.DIALECT, inputs="a").output_limit_tokens is None
    assert read(sagemaker.DIALECT, text="a").output_limit_tokens == 128
    assert refused_param(sagemaker.DIALECT) == "inputs"
