"""What can go wrong between a prompt and its count, and between a file and a tokenizer."""

from __future__ import annotations

from extproc.domain.outcome import Reason


class Uncountable(Exception):
    """This prompt has no count. `detail` names the cause and never quotes the prompt: it is shown to people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class TokenizerUnusable(Exception):
    """A tokenizer or template file cannot be used. The message names the file, the fault and the remedy."""
