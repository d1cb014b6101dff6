"""Who comes back, and does it come back when it was told to?

Retries are how overload feeds itself. A refused caller is told when to return; this book notes what it was
told, and what it makes of it:

- A retry that says it is one (`x-stainless-retry-count`, `x-envoy-attempt-count`), and that nobody here has
  asked to come back at this time, is paid from its tenant's budget: every other request of the tenant pays a
  part of a retry in, up to a burst. Without budget it is refused before its body is read.
- A caller that returns before its time is noted. More than `early_most` times within the window, and it has
  to stay away for `penalty_ms`, counted again from every further attempt. Waiting once ends it.

A caller is known by three keys, each a hash of 64 bits and nothing that anybody typed: where it comes from
(that alone says nothing about which request returns, so it counts only for those who say that they retry, and
against the earliest time that anybody from there was told), its idempotency key, and its body. The same body
twice at the same time is no retry, but two callers with the same question.

Nothing here gives anybody a place: a retry that passes lines up like everybody else.

Several workers. Each has its own book. A tenant's budget is one over all of them: the part that its requests pay
in adds up by itself, and of the burst each worker keeps its share. What a caller was told is known to the worker
that told it, and to no other: a retry without a note is not early, it is paid from the budget. So budgets should
leave room for what official SDKs do by themselves, two retries per request, even if all of them come in time.

Every question is constant work, and the book holds at most `most` notes, the latest ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from extproc.domain.policy import RetryPolicy

MOST_NOTES = 16_384

HASHED_BYTES = 32 * 1024
"""Of a long body the beginning, the end and the length are hashed: enough to know it again, and quickly done."""

EARLY_BY_MS = 50
"""Clocks and timers may be off by this much: whoever is no earlier is in time."""

PARTS = 1_000
"""Budgets are kept in thousandths of a retry."""


RETRY_MARKS: Mapping[str, int] = {"x-stainless-retry-count": 0, "x-envoy-attempt-count": 1}
"""Headers by which official SDKs and other Envoys count attempts, and what the first one is called."""

CALLER_HEADERS = ("authorization", "x-api-key", "api-key", "x-forwarded-for", "user-agent")
"""What tells callers of one tenant apart."""


def is_marked(headers: Mapping[str, str]) -> bool:
    """Whether the request says that it is not the first attempt."""
    for name, first in RETRY_MARKS.items():
        value = headers.get(name, "")
        if value.isascii() and value.isdecimal() and int(value[:9]) > first:
            return True
    return False


class Wrong(Enum):
    """What is wrong with a retry."""

    EARLY = auto()
    BUDGET = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """The retry is refused; it may come back in `wait_ms`."""

    wrong: Wrong
    wait_ms: int


@dataclass(slots=True)
class _Note:
    """What a key was told at `told_at_ms`: not before `until_ms`; how often it was early, and its penalty."""

    told_at_ms: int
    until_ms: int
    early: int = 0
    barred_until_ms: int = 0


class RetryBook:
    """One worker's notes. `secret` goes into every hash, so that nobody can choose where its note goes.

    `workers` says how many there are now: each has its share of a tenant's burst, at least one retry.
    """

    def __init__(
        self, secret: bytes, *, most: int = MOST_NOTES, workers: Callable[[], int] = lambda: 1
    ) -> None:
        self._secret = secret
        self._most = most
        self._workers = workers
        self._notes: OrderedDict[int, _Note] = OrderedDict()
        self._budget_parts: dict[str, int] = {}
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def key(self, *parts: str | bytes | int) -> int:
        """The key of these parts, good in this process only.

        Python's own hash: of texts it is SipHash under a secret of this process's, and costs next to nothing.
        """
        return hash((self._secret, *parts))

    def caller_key(self, tenant: str, headers: Mapping[str, str]) -> int:
        """Where a request comes from."""
        return self.key("caller", tenant, *[headers.get(name, "") for name in CALLER_HEADERS])

    def body_key(self, caller: int, body: bytes) -> int:
        """What a caller asks."""
        if len(body) > 2 * HASHED_BYTES:
            return self.key("body", caller, len(body), body[:HASHED_BYTES], body[-HASHED_BYTES:])
        return self.key("body", caller, body)

    def named_key(self, tenant: str, headers: Mapping[str, str]) -> int | None:
        """What a request calls itself, if it has an idempotency key."""
        name = headers.get("idempotency-key")
        return self.key("named", tenant, name) if name else None

    def arrived(
        self, *, tenant: str, caller: int, named: int | None, marked: bool, rules: RetryPolicy, now_ms: int
    ) -> Penalty | None:
        """A request's head has come: is it a retry that has to be refused?

        `named` is the key of its idempotency key, if it has one; `marked` whether it says that it is a retry.
        """
        known = [key for key in (caller if marked else None, named) if key is not None]
        invited = False
        for key in known:
            note = self._note(key, rules, now_ms)
            if note is None:
                continue
            penalty = self._returned(key, note, rules, now_ms)
            if penalty is not None:
                return penalty
            invited = invited or now_ms >= note.until_ms - EARLY_BY_MS
        return self._pay(tenant, rules, retry=marked and not invited)

    def opened(self, body: int, rules: RetryPolicy, now_ms: int) -> Penalty | None:
        """A request's body has come: has it been here before? `closed` must follow, once."""
        already_open = self._open.get(body, 0)
        self._open[body] = already_open + 1
        note = self._note(body, rules, now_ms)
        if note is None or already_open:
            return None
        return self._returned(body, note, rules, now_ms)

    def closed(self, body: int) -> None:
        """A request whose body came has ended."""
        left = self._open[body] - 1
        if left:
            self._open[body] = left
        else:
            del self._open[body]

    def refused(
        self,
        *,
        caller: int,
        named: int | None,
        body: int | None,
        wait_ms: int,
        rules: RetryPolicy,
        now_ms: int,
    ) -> None:
        """A request is refused and told to come back in `wait_ms`."""
        until_ms = now_ms + wait_ms
        for key in (caller, named, body):
            if key is None:
                continue
            note = self._note(key, rules, now_ms)
            if note is None:
                note = self._notes[key] = _Note(now_ms, until_ms)
                if len(self._notes) > self._most:
                    self._notes.popitem(last=False)
            elif key != caller or now_ms >= note.until_ms:
                # Of several that were told from one place, the first to come back sets the time.
                note.until_ms = until_ms
            note.told_at_ms = now_ms
            self._notes.move_to_end(key)

    def _note(self, key: int, rules: RetryPolicy, now_ms: int) -> _Note | None:
        """What is still of interest about this key."""
        note = self._notes.get(key)
        if note is not None and now_ms - max(note.told_at_ms, note.until_ms) > rules.window_ms:
            del self._notes[key]
            return None
        return note

    def _returned(self, key: int, note: _Note, rules: RetryPolicy, now_ms: int) -> Penalty | None:
        if now_ms < note.barred_until_ms:
            note.barred_until_ms = now_ms + rules.penalty_ms
            return Penalty(wrong=Wrong.EARLY, wait_ms=rules.penalty_ms)
        if now_ms >= note.until_ms - EARLY_BY_MS:
            note.early = 0
            return None
        note.early += 1
        if note.early <= rules.early_most:
            return None
        note.early = 0
        note.barred_until_ms = now_ms + rules.penalty_ms
        self._notes.move_to_end(key)
        return Penalty(wrong=Wrong.EARLY, wait_ms=rules.penalty_ms)

    def _pay(self, tenant: str, rules: RetryPolicy, *, retry: bool) -> Penalty | None:
        most_parts = max(PARTS, rules.budget_burst * PARTS // self._workers())
        parts = min(self._budget_parts.get(tenant, most_parts), most_parts)
        if not retry:
            self._budget_parts[tenant] = min(most_parts, parts + rules.budget_permille)
            return None
        if parts < PARTS:
            return Penalty(wrong=Wrong.BUDGET, wait_ms=rules.penalty_ms)
        self._budget_parts[tenant] = parts - PARTS
        return None
