"""YAML as policies read it: plain values with their lines, and no surprises."""

from __future__ import annotations

from decimal import Decimal

import pytest

from extproc.adapters.policy_file.problems import path_text
from extproc.adapters.policy_file.yaml_text import (
    DEEPEST_NESTING,
    LARGEST_FILE_BYTES,
    MOST_NODES,
    UnreadableText,
    read_document,
)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("007", 7),
        ("1.50", Decimal("1.50")),
        ("1e3", Decimal(1000)),
        ("true", True),
        ("~", None),
        ("", None),
        ("96_000", "96_000"),
        ("0x10", "0x10"),
        ("0o17", "0o17"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        (".inf", ".inf"),
        ("'12'", "12"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("! 12", "12"),
        ("|\n  12\n", "12\n"),
        ("9" * 120, "9" * 120),
    ],
)
def test_scalars_mean_what_the_core_schema_says(scalar: str, value: object) -> None:
    """Only whole numbers, decimals, true, false and null are not text; nothing else is guessed."""
    document = read_document(f"key: {scalar}")
    assert document.value == {"key": value}
    assert type(document.value["key"]) is type(value)
    assert not document.findings


def test_keys_are_text_whatever_they_look_like() -> None:
    """A tenant may be called 12, no or null."""
    assert read_document("{12: a, no: b, null: c, 1.0: d}").value == {
        "12": "a",
        "no": "b",
        "null": "c",
        "1.0": "d",
    }


def test_every_value_knows_its_line() -> None:
    """Lines are those of keys and items; what the file does not have is where its parent is."""
    document = read_document("a:\n  b: 1\n  c:\n    - x\n    - y: z\n# end\n")
    lines = {path: document.line_of(path) for path in [("a",), ("a", "b"), ("a", "c", 0), ("a", "c", 1, "y")]}
    assert lines == {("a",): 1, ("a", "b"): 2, ("a", "c", 0): 4, ("a", "c", 1, "y"): 5}
    assert document.line_of(("a", "c", 7, "q")) == 3
    assert document.line_of(("nothing",)) == 1


def test_a_key_that_is_repeated_is_a_finding_with_both_lines() -> None:
    """The first value is kept, the second is named, at any depth and more than once."""
    document = read_document("a: {b: 1, b: {c: 2}}\nd: 1\nd: 2\nd: 3\n")
    assert document.value == {"a": {"b": 1}, "d": 1}
    found = [
        (path_text(finding.path), document.line_of(finding.path), finding.message)
        for finding in document.findings
    ]
    assert found == [
        ("a.b", 1, "appears again on line 1; keep one of the two"),
        ("d", 2, "appears again on line 3; keep one of the two"),
        ("d", 2, "appears again on line 4; keep one of the two"),
    ]


def test_anchors_repeat_a_value() -> None:
    """An alias is its anchor's value, once that is complete."""
    assert read_document("a: &x {b: [1, 2]}\nc: *x\n").value == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            "a: 1\nb: [1, 2\n",
            3,
            "is not YAML: while parsing a flow sequence did not find expected ',' or ']'",
        ),
        ("a: 1\n b: 2\n", 2, "is not YAML: mapping values are not allowed in this context"),
        ("a: 1\n---\nb: 2\n", 2, "has more than one YAML document"),
        ("a: *x\n", 1, "uses `*x` where no `&x` is complete"),
        ("a: &x [*x]\n", 1, "uses `*x` where no `&x` is complete"),
        ("a: \x07\n", None, "is not YAML: it has characters that YAML does not allow"),
        ("\n" + "[" * 100, 2, f"is nested deeper than {DEEPEST_NESTING} levels"),
        ("? " + "[" * 100, 1, f"is nested deeper than {DEEPEST_NESTING} levels"),
        ("#" * (LARGEST_FILE_BYTES + 1), None, f"is larger than {LARGEST_FILE_BYTES} bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_text_that_cannot_be_trusted_is_refused_with_its_line(
    text: str, line: int | None, message: str
) -> None:
    """Syntax errors, several documents, dangling anchors and depth end the reading."""
    with pytest.raises(UnreadableText) as caught:
        read_document(text)
    assert str(caught.value).startswith(message)
    assert caught.value.line == line


def test_anchors_cannot_multiply_without_bound() -> None:
    """Nine levels of nine aliases are 400 million values in 500 bytes: they are counted, not built."""
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    levels += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    with pytest.raises(UnreadableText, match=f"more than {MOST_NODES} values"):
        read_document("\n".join(levels))


def test_a_syntax_error_does_not_quote_the_line() -> None:
    """What stands where the text is broken may be a key."""
    with pytest.raises(UnreadableText) as caught:
        read_document("key: sk-live-012345: }{ sk-live-543210")
    assert "sk-live" not in str(caught.value)
