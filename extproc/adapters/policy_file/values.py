"""The kinds of values that policies are written in: amounts with their ranges, factors, and names.

Each is pydantic metadata (`Annotated[int, Whole(...)]`) that reads a value, says what is wrong with it in
words that name the remedy, and describes itself in JSON Schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, NoReturn

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from extproc.domain.budget import LARGEST_AMOUNT

REFUSED = "policy_value"
"""The error type of values refused here: their message is complete."""

DURATIONS = (("ms", 1), ("s", 1_000), ("min", 60_000), ("h", 3_600_000))
SIZES = (("B", 1), ("KiB", 1024), ("MiB", 1024**2), ("GiB", 1024**3))

# Thousands may be grouped, as in 96_000. (YAML 1.2 leaves such a scalar as text.)
_GROUPED = re.compile(r"[0-9]{1,3}(?:_[0-9]{3})+")
_GROUPED_SCHEMA = {"type": "string", "pattern": "^[0-9]{1,3}(_[0-9]{3})+$"}


def refuse(message: str) -> NoReturn:
    """Refuse a value with a message that needs no further wording."""
    raise PydanticCustomError(REFUSED, "{message}", {"message": message})


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number in a range, in units of `noun`; or, if it has `units`, text such as `2s` or `16MiB`."""

    least: int
    most: int
    noun: str
    units: tuple[tuple[str, int], ...] = ()
    example: str = ""

    def read(self, value: object) -> int:
        """The amount, in `noun`."""
        amount = value
        if isinstance(value, str):
            amount = self._from_text(value)
        if type(amount) is not int or not self.least <= amount <= self.most:
            refuse(self._wanted(is_number_text=isinstance(value, str) and value.strip().isdigit()))
        return amount

    def _from_text(self, text: str) -> object:
        if _GROUPED.fullmatch(text):
            return int(text.replace("_", ""))
        names = "|".join(name for name, _ in self.units)
        match = re.fullmatch(rf"([0-9]{{1,12}}(?:\.[0-9]{{1,6}})?) ?({names})", text) if names else None
        if match is None:
            return text
        amount = Decimal(match[1]) * dict(self.units)[match[2]]
        return int(amount) if amount == int(amount) else text

    def _wanted(self, *, is_number_text: bool) -> str:
        wanted = f"must be a whole number of {self.noun} from {self.least} to {self.most}"
        if self.units:
            wanted += f", or a number with its unit such as {self.example}"
        return f"{wanted}; remove the quotes" if is_number_text else wanted

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        forms: list[dict[str, Any]] = [
            {"type": "integer", "minimum": self.least, "maximum": self.most},
            dict(_GROUPED_SCHEMA),
        ]
        if self.units:
            names = "|".join(name for name, _ in self.units)
            forms.append({"type": "string", "pattern": rf"^[0-9]+(\.[0-9]+)? ?({names})$"})
        elif self.most <= 1000:
            return forms[0]
        return {"anyOf": forms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A positive decimal with at most three digits after the point, up to `most`."""

    most: int

    def read(self, value: object) -> Decimal:
        """The factor, exact."""
        if type(value) is int or isinstance(value, Decimal):
            factor = Decimal(value)
            if 0 < factor <= self.most and factor * 1000 == int(factor * 1000):
                return factor
        refuse(f"must be a number from 0.001 to {self.most} with at most three digits after the point")

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "number", "minimum": 0.001, "maximum": self.most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """Text of a certain form. `wanted` completes "must be …"."""

    pattern: str
    wanted: str

    def read(self, value: object) -> str:
        """The text, unchanged."""
        if not isinstance(value, str):
            remedy = "; put it in quotes" if isinstance(value, int | Decimal) else ""
            refuse(f"must be {self.wanted}{remedy}")
        if re.fullmatch(self.pattern, value) is None:
            refuse(f"must be {self.wanted}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{self.pattern}$"}


Tokens = Annotated[int, Whole(least=1, most=LARGEST_AMOUNT, noun="tokens")]
TokensFromZero = Annotated[int, Whole(least=0, most=LARGEST_AMOUNT, noun="tokens")]
WorkUnits = Annotated[int, Whole(least=1, most=LARGEST_AMOUNT, noun="work units")]
Requests = Annotated[int, Whole(least=1, most=LARGEST_AMOUNT, noun="requests")]
RequestsFromZero = Annotated[int, Whole(least=0, most=LARGEST_AMOUNT, noun="requests")]
Spare = Annotated[int, Whole(least=0, most=1000, noun="replicas")]
Share = Annotated[int, Whole(least=1, most=1000, noun="thousandths")]
ShareFromZero = Annotated[int, Whole(least=0, most=1000, noun="thousandths")]
Wait = Annotated[
    int, Whole(least=1, most=3_600_000, noun="milliseconds", units=DURATIONS, example="500ms or 2s")
]
WaitFromZero = Annotated[
    int, Whole(least=0, most=3_600_000, noun="milliseconds", units=DURATIONS, example="500ms or 2s")
]
CostFactor = Annotated[Decimal, Factor(most=1000)]

ModelName = Annotated[
    str, Word(pattern=r"[!-~]{1,200}", wanted="a model name: up to 200 printable ASCII characters, no spaces")
]
Name = Annotated[
    str,
    Word(
        pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
        wanted="a name: a letter or digit, then up to 62 letters, digits, dots, hyphens and underscores",
    ),
]
TenantId = Annotated[
    str,
    Word(
        pattern=r"[A-Za-z0-9][A-Za-z0-9._:@/|+=~-]{0,127}",
        wanted="a tenant id: a letter or digit, then up to 127 letters, digits and any of ._:@/|+=~-",
    ),
]
ClusterName = Annotated[
    str,
    Word(
        pattern=r"[!-~]{1,256}", wanted="an Envoy cluster's name: up to 256 printable characters, no spaces"
    ),
]
Address = Annotated[
    str,
    Word(
        pattern=r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):"
        r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])",
        wanted='"host:port" with a port from 1 to 65535, and an IPv6 host in brackets',
    ),
]
Origin = Annotated[
    str,
    Word(
        pattern=r"https?://(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[1-9][0-9]{0,4})?",
        wanted='an origin such as "https://eu.example.org": a scheme (http or https) and a host, with or '
        "without a port, and no path",
    ),
]
UrlPath = Annotated[
    str,
    Word(
        pattern=r"/[!-\"$->@-~]{0,255}",
        wanted='a path such as "/metrics": a slash and up to 255 printable characters, no query',
    ),
]
HeaderName = Annotated[
    str,
    Word(
        pattern=r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}",
        wanted="a header name in lower case, without a colon, of up to 64 characters",
    ),
]
MetadataKey = Annotated[
    str, Word(pattern=r"[ -~]{1,200}", wanted="a metadata key of up to 200 printable characters")
]
KeyDigest = Annotated[
    str,
    Word(
        pattern=r"[0-9a-f]{64}",
        wanted="the SHA-256 of the key as 64 lower-case hex digits; get it with "
        '`printf %s "$KEY" | sha256sum`, and never write the key itself here',
    ),
]
FilePath = Annotated[str, Word(pattern=r"[^\x00-\x1f\x7f]{1,4096}", wanted="the path of a file")]
