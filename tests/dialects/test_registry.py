from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.dialects.registry import DIALECTS, UNCOUNTED_PATHS, dialect_for

MATCHED = {
    "/v1/chat/completions": "openai_chat",
    "/v1/chat/completions?api-version=1": "openai_chat",
    "/v1/chat/completions?x=/v1/completions": "openai_chat",
    "/team/v1/chat/completions": "openai_chat",
    "/openai/deployments/d/chat/completions": "openai_chat",
    "/v1/completions": "openai_completions",
    "/a/b/c/d/e/f/g/v1/completions": "openai_completions",
    "/completions": "openai_completions",
    "/v1/responses": "openai_responses",
    "/v1/embeddings": "openai_embeddings",
    "/v1/messages": "anthropic_messages",
    "/v1/messages?beta=true": "anthropic_messages",
    "/": "tgi",
    "/?x": "tgi",
    "/generate": "generate",
    "/generate_stream": "tgi",
    "/models/m/generate_stream": "tgi",
    "/v2/models/m/generate": "kserve",
    "/v2/models/m/versions/1/generate_stream": "kserve",
    "/x/v2/models/m/generate": "kserve",
    "/inference/v1/generate": "vllm_tokens",
    "/completion": "llama_cpp",
    "/invocations": "sagemaker",
    # Spellings that engines' servers decode before they route.
    "/v1/chat/%63ompletions": "openai_chat",
    "/v1%2Fchat%2fcompletions": "openai_chat",
    "/%76%31/completions?%": "openai_completions",
}
UNMATCHED = [
    "",
    "*",
    "v1",
    "/v1",
    "/v1/models",
    "/health",
    "/metrics",
    "/v1/messages/count_tokens",
    "/v1/responses/resp_1/cancel",
    "/v1/chat/completions/render",
    "/v1/chat/completions/",
    "/v1/chat/Completions",
    "/v1/chat/completions%3Fx",
    "/v1/chat/%2563ompletions",
    "/xcompletions",
    "/tokenize",
    "/foo/",
    "//",
    *UNCOUNTED_PATHS,
]


@pytest.mark.parametrize(("path", "name"), MATCHED.items())
def test_inference_routes_have_their_dialect(path: str, name: str) -> None:
    """A route is known exactly, after a prefix, with a query, and in every spelling that reaches an engine."""
    dialect = dialect_for(path)
    assert dialect is not None
    assert dialect.name == name


@pytest.mark.parametrize("path", UNMATCHED)
def test_other_routes_have_none(path: str) -> None:
    """Counting tokens, listing models and the like are no inference and cost nothing."""
    assert dialect_for(path) is None


def test_names_and_routes_are_unique() -> None:
    """No dialect hides another one."""
    assert len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)
    paths = [path for dialect in DIALECTS for path in (*dialect.paths, *dialect.exact_paths)]
    assert len(set(paths)) == len(paths)
    for dialect in DIALECTS:
        for path in (*dialect.paths, *dialect.exact_paths):
            assert dialect_for(path.replace("*", "m")) is dialect


@given(st.text(max_size=100), st.sampled_from(DIALECTS))
def test_any_path_has_an_answer(path: str, dialect: object) -> None:
    """No path makes the look-up fail, and a query never changes it."""
    assert dialect_for(path.replace("?", "")) is dialect_for(path.replace("?", "") + "?" + path)


def test_a_long_path_is_looked_at_only_at_its_end() -> None:
    """A path of many segments is matched by its last ones."""
    dialect = dialect_for("/x" * 30_000 + "/v1/messages")
    assert dialect is not None
    assert dialect.name == "anthropic_messages"
