"""One model's counting: its templates, its tokenizer, and what has been proved about doing it faster.

Counting is written once, as a generator that says before each step about how long the step will take. Whoever
runs it decides where: the event loop runs steps that are short, worker threads run the rest and can turn to
another prompt between any two steps.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import orjson

from extproc.adapters.tokens.added_tokens import AddedTokenSplitter
from extproc.adapters.tokens.by_turns import decoded, encoded
from extproc.adapters.tokens.chat_template import ChatTemplates
from extproc.adapters.tokens.count_cache import CountCache
from extproc.adapters.tokens.encoder import Encoder, ReferenceEncoder
from extproc.adapters.tokens.slices import SLICE_CHARS, slices
from extproc.domain.prompt import AtLeast, ChatPrompt, Counted, TextPrompt

# Estimates of what is not encoding, in microseconds: measured on Qwen3, doubled, rounded. Characters are charged as
# if every tenth began an added token: a conversation can be made of them.
_RENDER_US = 40
_RENDER_MESSAGE_US = 12
_RENDER_VALUE_US = 1
_CHARS_PER_US = 100
_LOOKUP_US = 3
_PIECE_US = 6

_WAITED_FOR_BYTES = 4_096

_UNBROKEN_NS_PER_BYTE = 1_000
"""What a byte costs either program in a text that has no place to cut: mostly one long part, merged byte by byte."""

_KNOWN_WHOLE_CHARS = 32_768
"""A longer conversation is found by its pieces only: hashing all of it twice takes longer than rendering it again."""

_WEIGHED_VALUES = 2_000
"""A conversation with more values than this is no business of the event loop's, and not weighed to its end."""

Steps = Generator[int, None, Counted | AtLeast]
"""Yields the microseconds that the next step will take, roughly and rather too many; returns the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEnds:
    """BOS and EOS as an engine gives them to every text, chats too, unless they stand there already.

    Empty where the model has none.
    """

    bos: bytes
    eos: bytes

    def missing_in(self, text: bytes) -> int:
        """How many of the two `text` lacks."""
        lacks_bos = bool(self.bos) and not text.startswith(self.bos)
        return lacks_bos + (bool(self.eos) and not text.endswith(self.eos))


class ModelTokens:
    """Counts prompts for one model. Shared by all requests; every method may be called from any thread."""

    def __init__(
        self,
        *,
        templates: ChatTemplates,
        encoder: Encoder,
        splitter: AddedTokenSplitter | None,
        pieces: CountCache,
        prompts: CountCache,
        tokens_around: int = 0,
        longest_token_bytes: int | None = None,
        slice_chars: int | None = SLICE_CHARS,
        why_reference: str = "",
        why_whole: str = "",
        reference: ReferenceEncoder | None = None,
        chat_ends: ChatEnds | None = None,
    ) -> None:
        """Without a `splitter`, texts are counted whole; without `slice_chars`, pieces are.

        `tokens_around` is how many tokens the tokenizer adds to a text by itself (BOS, EOS). With `chat_ends`,
        every text gets those, whatever the request says, and a chat those that it has not. `pieces` and
        `prompts` are caches for this tokenizer and these templates only.
        """
        self._templates = templates
        self._encoder = encoder
        self._reference = reference
        self._chat_ends = chat_ends
        self._splitter = splitter
        self._tokens_around = tokens_around
        self._longest_token_bytes = longest_token_bytes
        self._slice_chars = slice_chars
        self.pieces = pieces
        self.prompts = prompts
        self.encoder_name = encoder.name
        """Which program counts: `tiktoken` if it was proved equal, else `tokenizers`."""
        self.why_reference = why_reference
        """Why it is not `tiktoken`; empty if it is."""
        self.piecewise = splitter is not None
        self.why_whole = why_whole
        """Why texts are counted whole and not piece by piece; empty if they are cut."""
        self.sliced = slice_chars is not None
        self.bytes_encoded = 0
        self._repeatable = not templates.reads_clock
        self._frame = self._frame_counts()
        self._longest_frame = max(map(len, self._frame), default=0)

    def _frame_counts(self) -> dict[bytes, int]:
        """The pieces that templates print by themselves, like the line end after a turn: no need to hash those."""
        if self._splitter is None:
            return {}
        texts = (constant.encode() for constant in self._templates.constants)
        pieces = {piece for text in texts for piece in self._splitter.split(text)[0]}
        return {piece: self._encoder.count(piece.decode()) for piece in pieces}

    def plain(self, prompt: ChatPrompt | TextPrompt) -> tuple[int, ...]:
        """The count without shortcuts, each whole text by the model's own tokenizer: for checks and benchmarks.

        Raises `Uncountable`.
        """
        encoder = self._reference or self._encoder
        if isinstance(prompt, ChatPrompt):
            text = _utf8(self._templates.render(prompt)).decode()
            return (self._around(prompt, text.encode()) + encoder.count(text),)
        around = self._around(prompt)
        return tuple(around + encoder.count(_utf8(text).decode()) for text in prompt.texts)

    def _around(self, prompt: ChatPrompt | TextPrompt, rendered: bytes | None = None) -> int:
        """How many tokens the engine puts around a text of `prompt`."""
        if self._chat_ends is None:
            return self._tokens_around if prompt.add_special_tokens else 0
        return self._tokens_around if rendered is None else self._chat_ends.missing_in(rendered)

    def steps(self, prompt: ChatPrompt | TextPrompt, limit_tokens: int) -> Steps:
        """Count `prompt` step by step. Steps raise `Uncountable`, and whatever a tokenizer dies of."""
        if isinstance(prompt, ChatPrompt):
            yield _render_us(prompt)
            count = yield from self._count_chat(prompt, limit_tokens)
            return _answer((count,), limit_tokens)
        around = self._around(prompt)
        counts: list[int] = []
        for text in prompt.texts:
            count = yield from self._count(_utf8(text), around, limit_tokens)
            counts.append(count)
            if count > limit_tokens:
                break
        return _answer(tuple(counts), limit_tokens)

    def work_us(self, prompt: ChatPrompt | TextPrompt) -> int:
        """About how long counting takes altogether if nothing of the prompt is known."""
        if isinstance(prompt, ChatPrompt):
            render_us, chars = _render_us(prompt), _weight(prompt)[1]
        else:
            render_us, chars = 0, sum(map(len, prompt.texts))
        return render_us + chars * self._encoder.nanoseconds_per_byte // 1_000

    def _count_chat(self, prompt: ChatPrompt, limit_tokens: int) -> Generator[int, None, int]:
        key = self._key(prompt)
        if key is not None and (count := self.prompts.known((key,))[0]) is not None:
            return count
        text = _utf8(self._templates.render(prompt))
        count = yield from self._count(text, self._around(prompt, text), limit_tokens)
        if key is not None and count <= limit_tokens:
            self.prompts.remember(key, count)
        return count

    def _key(self, prompt: ChatPrompt) -> bytes | None:
        """The whole prompt's place in the cache; None for a long one, or one that might render differently.

        Different prompts have different JSON: what `orjson` would write alike, it does not read.
        """
        if not self._repeatable or _weight(prompt)[1] > _KNOWN_WHOLE_CHARS:
            return None
        flags = (
            prompt.add_generation_prompt,
            prompt.continue_final_message,
            prompt.add_special_tokens,
            prompt.system_in_blocks,
        )
        try:
            return self.prompts.key(
                orjson.dumps((prompt.messages, prompt.tools, prompt.documents, prompt.template_kwargs, flags))
            )
        except TypeError:  # lone surrogates, integers over 64 bits
            return None

    def _count(self, text: bytes, tokens: int, limit_tokens: int) -> Generator[int, None, int]:
        """The tokens of one text on top of `tokens`: all of them, or some number over `limit_tokens`."""
        if self._longest_token_bytes is not None:
            at_least = -(-len(text) // self._longest_token_bytes)
            if at_least > limit_tokens:
                return at_least
        yield len(text) // _CHARS_PER_US
        if self._splitter is None:
            pieces = [text] if text else []
        else:
            pieces, added = self._splitter.split(text)
            tokens += added
        yield _LOOKUP_US * len(pieces)
        keys: list[bytes] = []
        hashed: list[bytes] = []
        for piece in pieces:
            # A dictionary would read a document to its end to learn that it is none of these.
            count = self._frame.get(piece) if len(piece) <= self._longest_frame else None
            if count is None:
                hashed.append(piece)
                keys.append(self.pieces.key(piece))
            else:
                tokens += count
        unknown: dict[bytes, bytes] = {}
        repeats: dict[bytes, int] = {}
        for key, piece, count in zip(keys, hashed, self.pieces.known(keys), strict=True):
            if count is not None:
                tokens += count
            else:
                unknown[key] = piece
                repeats[key] = repeats.get(key, 0) + 1
        for key, piece in unknown.items():
            if tokens > limit_tokens:
                break
            count = yield from self._encode(key, decoded(piece), limit_tokens - tokens)
            tokens += count * repeats[key]
            if tokens <= limit_tokens:  # else the piece may not have been counted to its end
                self.pieces.remember(key, count)
        return tokens

    def _encode(self, key: bytes, piece: str, limit_tokens: int) -> Generator[int, None, int]:
        """The tokens of one piece: all of them, or some number over `limit_tokens`."""
        encoder = self._encoder
        parts = (piece,) if self._slice_chars is None else slices(piece, self._slice_chars)
        tokens = 0
        for part in parts:
            part_bytes = len(part) if part.isascii() else len(part.encode())
            unbroken = self._slice_chars is not None and len(part) > 2 * self._slice_chars
            rate = _UNBROKEN_NS_PER_BYTE if unbroken else encoder.nanoseconds_per_byte
            yield _PIECE_US + part_bytes * rate // 1_000
            if not tokens and part_bytes > _WAITED_FOR_BYTES:
                # The same document often comes many times at once; whoever had to wait may find it counted by now.
                (known,) = self.pieces.known((key,))
                if known is not None:
                    return known
            tokens += encoder.count(part)
            self.bytes_encoded += part_bytes
            if tokens > limit_tokens:
                break
        return tokens


def _answer(counts: tuple[int, ...], limit_tokens: int) -> Counted | AtLeast:
    if counts and counts[-1] > limit_tokens:
        return AtLeast(input_tokens=counts[-1])
    return Counted(per_sequence_tokens=counts)


def _utf8(text: str) -> bytes:
    """`text` as UTF-8. JSON can spell halves of surrogate pairs: those that match are joined, others are U+FFFD."""
    try:
        return encoded(text)
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _render_us(prompt: ChatPrompt) -> int:
    """About how long rendering takes."""
    values, chars = _weight(prompt)
    return (
        _RENDER_US
        + _RENDER_MESSAGE_US * len(prompt.messages)
        + _RENDER_VALUE_US * values
        + chars // _CHARS_PER_US
    )


def _weight(prompt: ChatPrompt) -> tuple[int, int]:
    """About how many values besides plain messages a conversation has, and how many characters."""
    chars = 0
    others: list[Any] = [prompt.tools, prompt.documents, prompt.template_kwargs]
    messages = prompt.messages[:_WEIGHED_VALUES]
    for message in messages:
        if type(message) is dict and len(message) == 2 and type(text := message.get("content")) is str:
            chars += len(text)
        else:
            others.append(message)
    values = 0
    while others and values < _WEIGHED_VALUES:
        value = others.pop()
        if not value:
            continue
        values += 1
        if type(value) is str:
            chars += len(value)
        elif type(value) is dict:
            others += value.values()
        elif type(value) is list:
            others += value
    if len(prompt.messages) > len(messages):
        chars = chars * len(prompt.messages) // len(messages)
    return values, chars
