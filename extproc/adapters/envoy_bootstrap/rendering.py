"""Typed Envoy messages to YAML text that Envoy reads back unchanged, and the other way round."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import yaml
from betterproto2 import Casing, Message
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap
from envoy_data_plane.google.protobuf import Any as AnyMessage


class _Dumper(yaml.SafeDumper):
    """SafeDumper for Envoy's YAML 1.1 reader, to which a bare `y` or `n` is a boolean."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - signature of the library's hook
        return True


_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^[yYnN]$"), list("yYnN"))


def packed(message: Message) -> AnyMessage:
    """`message` as the typed configuration of an extension."""
    return AnyMessage.pack(message)


def duration(milliseconds: int) -> timedelta:
    """Milliseconds as the type that configuration messages take."""
    return timedelta(milliseconds=milliseconds)


def to_yaml(bootstrap: Bootstrap) -> str:
    """The configuration as block-style YAML with the field names of Envoy's documentation."""
    return yaml.dump(
        bootstrap.to_dict(casing=Casing.SNAKE), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True
    )


def from_yaml(text: str) -> Bootstrap:
    """Reads configuration text into the typed form; a field or type that does not exist raises."""
    return Bootstrap.from_dict(yaml.safe_load(text))
