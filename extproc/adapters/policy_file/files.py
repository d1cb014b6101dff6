"""The files that a policy names: can they be read, and which content do they have?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from extproc.adapters.policy_file.build import file_path
from extproc.adapters.policy_file.problems import Finding
from extproc.adapters.policy_file.schema import ModelSpec

LARGEST_TOKENIZER_BYTES = 256 * 1024 * 1024
"""The largest that are published have about 35 MB."""

LARGEST_TEMPLATE_BYTES = 1024 * 1024

TOKENIZER_CONFIG = "tokenizer_config.json"
"""Next to a tokenizer: its special tokens, and the chat template of models that bring their own."""

_LFS_POINTER = b"version https://git-lfs"


class Unusable(Exception):
    """The file cannot be what the policy says it is. The message says why and what to do."""


@dataclass(slots=True, kw_only=True)
class ModelFiles:
    """By model, the digest of each file that decides how its tokens are counted; and what is wrong."""

    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_model_files(models: Mapping[str, ModelSpec], *, base_dir: Path) -> ModelFiles:
    """Read each file once, however many models share it."""
    files = ModelFiles()
    known: dict[tuple[str, Path], str | Unusable] = {}

    def digest(kind: str, path: Path) -> str:
        result = known.get((kind, path))
        if result is None:
            try:
                result = _digest(kind, path)
            except Unusable as unusable:
                result = unusable
            known[kind, path] = result
        if isinstance(result, Unusable):
            raise result
        return result

    for name, model in models.items():
        tokenizer = file_path(model.tokenizer, base_dir)
        asked = [("tokenizer", model.tokenizer, tokenizer)]
        if (config := tokenizer.with_name(TOKENIZER_CONFIG)).exists():
            asked.append(("tokenizer_config", model.tokenizer, config))
        if model.chat_template is not None:
            asked.append(("chat_template", model.chat_template, file_path(model.chat_template, base_dir)))
        digests = files.digests[name] = {}
        for kind, written, path in asked:
            try:
                digests[kind] = digest(kind, path)
            except Unusable as unusable:
                key = "chat_template" if kind == "chat_template" else "tokenizer"
                files.findings.append(
                    Finding(path=("models", name, key), message=str(unusable), value=written)
                )
    return files


def _digest(kind: str, path: Path) -> str:
    most_bytes = LARGEST_TEMPLATE_BYTES if kind == "chat_template" else LARGEST_TOKENIZER_BYTES
    content = _content(path, most_bytes)
    if content.startswith(_LFS_POINTER):
        raise Unusable(f"{path} is only a Git LFS pointer; fetch the file itself (`git lfs pull`)")
    if kind == "chat_template":
        try:
            content.decode()
        except UnicodeDecodeError:
            raise Unusable(f"{path} is not UTF-8 text; name a Jinja template") from None
    else:
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            raise Unusable(
                f"{path} is not JSON; name the `tokenizer.json` that belongs to the model"
            ) from None
        if kind == "tokenizer" and not (isinstance(document, dict) and "model" in document):
            raise Unusable(f"{path} has no `model`; name the `tokenizer.json` that belongs to the model")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        if path.is_dir():
            raise Unusable(f"{path} is a folder; name the file in it")
        if not path.exists():
            raise Unusable(f"there is no file {path}; relative paths start at the policy file's folder")
        if not path.is_file():
            raise Unusable(f"{path} is not a regular file")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise Unusable(f"{path} cannot be read ({reason}); make it readable for this process") from None
    if len(content) > most_bytes:
        raise Unusable(f"{path} is larger than {most_bytes} bytes")
    if not content:
        raise Unusable(f"{path} is empty")
    return content
