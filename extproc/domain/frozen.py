"""Values that are made by the thousand: frozen for the type checker, plain at run time.

A frozen dataclass sets each of its fields through `object.__setattr__`, which was 8 % of all that one exchange
costs. The type checker refuses every assignment either way, and nothing here is handed to code that it does not
check. Compare and hash as frozen dataclasses do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(cls: type[_T]) -> type[_T]:
    """`dataclass(frozen=True, slots=True, kw_only=True)`, as the type checker sees it."""
    return dataclass(unsafe_hash=True, slots=True, kw_only=True)(cls)
