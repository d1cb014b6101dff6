"""The files that a policy names: can they be read, and which content do they have?"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from extproc.adapters.policy_file.build import file_path
from extproc.adapters.policy_file.problems import Finding
from extproc.adapters.policy_file.schema import ModelSpec

LARGEST_TOKENIZER_BYTES = 256 * 1024 * 1024
"""The largest that are published have about 35 MB."""

LARGEST_TEMPLATE_BYTES = 1024 * 1024

_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")

_WANTED = {
    "tokenizer": "name the `tokenizer.json` that belongs to the model",
    **dict.fromkeys(_CONFIGS, "put the model's own there, or remove it"),
}
_SENTENCEPIECE = re.compile(r".*\.model(\.v[0-9a-z]+)?")
"""Mistral's older tokenizers, such as `tokenizer.model.v3`."""

_LFS_POINTER = b"version https://git-lfs"


class Unusable(Exception):
    """The file cannot be what the policy says it is. The message says why and what to do."""


@dataclass(slots=True, kw_only=True)
class ModelFiles:
    """By model, the digest of each file that decides how its tokens are counted; and what is wrong."""

    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_model_files(models: Mapping[str, ModelSpec], *, base_dir: Path) -> ModelFiles:
    """Read each file once, however many models share it. A role is a key of the policy, or a file's name."""
    files = ModelFiles()
    known: dict[tuple[str, Path], str | Unusable] = {}

    def digest(role: str, path: Path) -> str:
        result = known.get((role, path))
        if result is None:
            try:
                result = _digest(role, path)
            except Unusable as unusable:
                result = unusable
            known[role, path] = result
        if isinstance(result, Unusable):
            raise result
        return result

    for name, model in models.items():
        digests = files.digests[name] = {}
        for key, written in (("tokenizer", model.tokenizer), ("chat_template", model.chat_template)):
            if written is None:
                continue
            path = file_path(written, base_dir)
            try:
                digests[key] = digest(key, path)
                if key == "tokenizer":
                    digests |= {
                        beside.name: digest(beside.name, beside)
                        for beside in _beside(path, with_templates=model.chat_template is None)
                    }
            except Unusable as unusable:
                files.findings.append(
                    Finding(path=("models", name, key), message=str(unusable), value=written)
                )
    return files


def _beside(tokenizer: Path, *, with_templates: bool) -> Iterator[Path]:
    """The files beside a tokenizer that counting reads: special tokens, and a model's own chat templates."""
    for name in _CONFIGS:
        if (config := tokenizer.parent / name).is_file():
            yield config
    if with_templates:
        for pattern in _TEMPLATES:
            yield from sorted(tokenizer.parent.glob(pattern))


def _digest(role: str, path: Path) -> str:
    is_model = role == "tokenizer" and _SENTENCEPIECE.fullmatch(path.name) is not None
    is_json = role in ("tokenizer", *_CONFIGS) and not is_model
    most_bytes = LARGEST_TOKENIZER_BYTES if is_json or is_model else LARGEST_TEMPLATE_BYTES
    wanted = _WANTED.get(role, "name a Jinja template")
    content = _content(path, most_bytes, wanted)
    if content.startswith(_LFS_POINTER):
        raise Unusable(f"{path} is only a Git LFS pointer; fetch the file itself (`git lfs pull`)")
    if is_model:
        pass  # not text: whoever loads it finds out
    elif not is_json:
        try:
            content.decode()
        except UnicodeDecodeError:
            raise Unusable(f"{path} is not UTF-8 text; {wanted}") from None
    else:
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            raise Unusable(f"{path} is not JSON; {wanted}") from None
        if role == "tokenizer":
            key = "vocab" if path.name.startswith("tekken") else "model"
            if not (isinstance(document, dict) and key in document):
                raise Unusable(f"{path} has no `{key}`; {wanted}")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _content(path: Path, most_bytes: int, wanted: str) -> bytes:
    try:
        if path.is_dir():
            raise Unusable(f"{path} is a folder; {wanted}")
        if not path.exists():
            raise Unusable(f"there is no file {path}; relative paths start at the policy file's folder")
        if not path.is_file():
            raise Unusable(f"{path} is not a regular file; {wanted}")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Unusable(f"{path} cannot be read ({reason}); make it readable for this process") from None
    if len(content) > most_bytes:
        raise Unusable(f"{path} is larger than {most_bytes} bytes; {wanted}")
    if not content:
        raise Unusable(f"{path} is empty; {wanted}")
    return content
