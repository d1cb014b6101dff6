"""May a byte-level BPE tokenizer be run by `tiktoken`? Not a trial on examples: an argument and its conditions.

Both programs start from single bytes and again and again merge the pair of neighbours that comes first by
priority, then by position. They differ in what may merge. `tokenizers` merges the pairs of its merge list, by
their place in the list. `tiktoken` merges any two neighbours whose joint bytes are a token, by that token's rank.
Let a token's rank be the place of its first merge, and let all merges of one token stand together in the list.

*A region never forgets.* Take a stretch of text whose outer boundaries no merge has crossed. The merges inside
it so far are those that would have happened had the stretch stood alone, in the same order: each was the first
by priority and position among all, hence among those inside. So its state is a state of the lone process, and
the lone process, which loses one token per merge, has exactly one state of two tokens.

Suppose the two programs agree up to some state and then choose differently. Then either

1. two neighbours (c, d), whose joint bytes are the token T, are not in the merge list. If T, encoded alone by
   merges, becomes one token, its lone process has a last merge (a, b), its state of two tokens is [a][b], and by
   the above [c][d] is that same state: (c, d) is in the list, a contradiction. And if the list has *every* pair
   of tokens whose joint bytes are a token, there is nothing to show; or
2. both choose a merge into the same T, but other neighbours, because T's merges differ in place. Choosing
   differently matters only where they overlap: [x][y][z] with xy = yz = T. But [x][y] and [y][z] are both states of
   two tokens of T's lone process, hence the same: x = y = z, and both programs take the left pair.

So they agree on every text if (complete) every pair of tokens that joins to a token is in the list, or
(self-encoding) every token becomes one token when its own bytes are merged.

Both programs also look a whole part up before merging. `tiktoken` always does; `tokenizers` does so with
`ignore_merges`, and without it arrives at the same token if the vocabulary is self-encoding. Hence: a file with
`ignore_merges` needs either condition, a file without it needs the second.

Tokens that no merge makes would be merged by `tiktoken` only, so there must be none. What the argument does not
cover is whether the two regular expression engines split alike; `self_test` is for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from extproc.adapters.tokens.tokenizer_file import BYTE_SYMBOLS, ByteLevelBpe, token_bytes

_BATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The vocabulary as `tiktoken` takes it: bytes to rank; and each rank's id in the tokenizer's own numbering."""

    by_bytes: dict[bytes, int]
    ids: tuple[int, ...]


def prove(bpe: ByteLevelBpe, tokenizer: Tokenizer) -> Ranks | str:
    """The ranks with which `tiktoken` gives the same tokens for every text; or why there are none.

    `tokenizer` is the loaded file. It must not be in use elsewhere: its model is asked with its options changed.
    """
    order = _order(bpe)
    if isinstance(order, str):
        return order
    holds = bpe.ignore_merges and _is_complete(bpe)
    if not holds and not _is_self_encoding(order, bpe, tokenizer):
        return "some token is not made by its own merges"
    texts = [*BYTE_SYMBOLS, *order]
    return Ranks(
        by_bytes={text: rank for rank, text in enumerate(token_bytes(texts))},
        ids=tuple(map(bpe.vocabulary.__getitem__, texts)),
    )


def _order(bpe: ByteLevelBpe) -> list[str] | str:
    """The merged tokens in the order of the merge list; or why they have none."""
    order: dict[str, None] = {}
    last = None
    for left, right in bpe.merges:
        made = left + right
        if made != last:
            if made in order:
                return "the merges of one token do not stand together"
            order[made] = None
            last = made
        if made not in bpe.vocabulary or left not in bpe.vocabulary or right not in bpe.vocabulary:
            return "a merge has a part or a result outside the vocabulary"
    if len(order) + 256 != len(bpe.vocabulary):
        return "some token is not made by any merge"
    return list(order)


def _is_complete(bpe: ByteLevelBpe) -> bool:
    """Is every pair of tokens that joins to a token in the list? All in the list are such pairs: count them."""
    vocabulary = bpe.vocabulary
    pairs = 0
    for text in vocabulary:
        for at in range(1, len(text)):
            if text[at:] in vocabulary and text[:at] in vocabulary:
                pairs += 1
    return pairs == len(set(bpe.merges))


def _is_self_encoding(order: list[str], bpe: ByteLevelBpe, tokenizer: Tokenizer) -> bool:
    model = tokenizer.model
    alone = Tokenizer(model)  # the model without normalizer and splitting; the two share it
    try:
        model.ignore_merges = False
        for start in range(0, len(order), _BATCH):
            batch = alone.encode_batch_fast(order[start : start + _BATCH], add_special_tokens=False)
            if any(len(encoding) != 1 for encoding in batch):
                return False
    finally:
        model.ignore_merges = bpe.ignore_merges
    return True
