"""The waiting line of one pool: who waits, in which order, and who goes when there is room.

Order. Lanes are served from the highest to the lowest, except that a lane is never left below its floor: while
it has somebody ready, every token granted to others adds its floor's share to what it is owed, and its own
grants take the rest off; a lane that is owed something goes first. If it cannot go because the pool has no
room, the higher lanes wait with it, or the floor would be a promise that large requests never see kept: once,
as long as it takes for room to come free, and no longer than it takes the pool to empty. What a lane got beyond its
floor is remembered until the others have had as much as the pool holds: so a lane that is above its floor holds
nobody up, and a quiet night is no reason to starve by day.

Inside a lane, tenants share by weight in tokens: start-time fair queueing (Goyal, Vin and Cheng, 1996). A
tenant's next grant has a virtual start; the smallest goes first, and a grant of L tokens moves its tenant's
start by L / weight. Virtual time is the start of the last one that went in its turn; a tenant that comes back
from idleness starts there, or where its last grant left it, so neither absence nor haste earns credit. Two
tenants that both wait are never further apart than their two largest requests, each divided by its weight.
Inside a tenant the earliest deadline goes first, and of equal ones the first that came.

Who cannot go, and whom that stops. A tenant at a limit of its own is set aside until that limit may have
moved, and nobody else notices. A lane at its share, or at its share of prefill, waits alone. A request for
which the pool has no room stops all that come after it, for otherwise small requests would keep a large one
out for ever; but a request of at most a quarter of its size may pass while those that have passed it are,
together, no larger than itself, and while passing puts no tenant further ahead of it in virtual time than its
own grant will put it. So a request waits at most for twice its own size because of others that passed.

Bounds. A full lane takes a newcomer only in exchange for the last request of the tenant that has most
waiting for its weight, and only if that is still more than the newcomer's tenant would have.

Every step is bounded, all arithmetic is in integers, and ties are broken by name or by order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from extproc.domain.lease import Holder
from extproc.domain.policy import LANES_DOWNWARDS, Lane, Pool
from extproc.domain.reservation import Denied, Granted, LaneTerms, Reservation, Scope

VIRTUAL_PARTS = 1_000
"""Virtual time of one token at weight 1. Weights go up to 1,000, so that no token is lost in a division."""

LOOKED_AT = 16
"""How many requests behind one that the pool has no room for are looked at."""

LOOKED_AT_PER_TENANT = 4
"""How many of them may be the same tenant's."""

PASSES_IN_SIZE = 4
"""A request may pass one that is at least this many times as large."""

PUSHED_OUT_AT_ONCE = 4
"""How many requests one newcomer may displace from a full lane."""

NEVER_MS = 1 << 52
"""When a tenant that waits for its own requests to end may go again: on an event, not at a time."""


class Outlook(Enum):
    """What came of trying a ticket."""

    GRANTED = auto()
    GONE = auto()  # it has got another answer, or nobody waits for it
    TENANT = auto()  # its tenant is at a limit
    LANE = auto()
    POOL = auto()


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of trying a ticket, and when time alone may change it (`None`: only an event can)."""

    outlook: Outlook
    wake_at_ms: int | None = None


@dataclass(slots=True)
class Ticket:
    """A place in the line. `answer` is what it ended with; `passed_tokens` what has gone before it from behind.

    `tokens` is its size in the line: at least 1, so that nothing is free. A `fresh` ticket is one whose caller
    still waits for the first answer to its question.
    """

    reservation: Reservation
    tokens: int
    holder: Holder
    sequence: int
    enqueued_at_ms: int
    expires_at_ms: int
    deadline_at_ms: int
    fresh: bool = True
    passed_tokens: int = 0
    behind: Scope | None = None
    answer: Granted | Denied | None = None

    @property
    def patient(self) -> bool:
        """Whether it may wait at all."""
        return self.reservation.hold_ms > 0

    @property
    def order(self) -> tuple[int, int]:
        """Its place among its tenant's tickets."""
        return self.deadline_at_ms, self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What would go before a request that came now."""

    requests: int
    tokens: int
    input_tokens: int


@dataclass(slots=True)
class TenantLine:
    """One tenant's tickets in one lane, in order. `parked_until_ms` is `None` while it is ready."""

    weight: int
    start: int
    tokens: int = 0
    input_tokens: int = 0
    parked_until_ms: int | None = None
    tickets: list[Ticket] = field(default_factory=list)


@dataclass(slots=True)
class LaneLine:
    """One lane's part of the line.

    `ready` and `parked` are the tenants with tickets, by virtual start and by when they may go again;
    `ahead_of_time` are those without, whose last grant ended beyond the lane's virtual time.
    `owed_permille` is in thousandths of a token, `limit_tokens` what the lane may hold of the pool.
    """

    terms: LaneTerms
    limit_tokens: int
    requests: int = 0
    tokens: int = 0
    input_tokens: int = 0
    weight: int = 0
    virtual: int = 0
    owed_permille: int = 0
    tenants: dict[str, TenantLine] = field(default_factory=dict)
    ready: list[tuple[int, str]] = field(default_factory=list)
    parked: list[tuple[int, str]] = field(default_factory=list)
    ahead_of_time: dict[str, int] = field(default_factory=dict)
    _by_finish: list[tuple[int, str]] = field(default_factory=list)

    def add(self, ticket: Ticket) -> None:
        """Take one more in. Its tenant's weight is what the newest of its tickets says."""
        name, weight = ticket.reservation.tenant, ticket.reservation.weight
        tenant = self.tenants.get(name)
        if tenant is None:
            finish = self.ahead_of_time.pop(name, None)
            if finish is not None:
                _discard(self._by_finish, (finish, name))
            start = self.virtual if finish is None else max(self.virtual, finish)
            tenant = self.tenants[name] = TenantLine(weight=weight, start=start)
            self.weight += weight
            insort(self.ready, (start, name))
        elif tenant.weight != weight:
            self.weight += weight - tenant.weight
            tenant.weight = weight
        insort(tenant.tickets, ticket, key=_order)
        tenant.tokens += ticket.tokens
        tenant.input_tokens += ticket.reservation.input_tokens
        self.requests += 1
        self.tokens += ticket.tokens
        self.input_tokens += ticket.reservation.input_tokens

    def remove(self, ticket: Ticket) -> None:
        """Let one go, whatever became of it."""
        name = ticket.reservation.tenant
        tenant = self.tenants[name]
        del tenant.tickets[bisect_left(tenant.tickets, ticket.order, key=_order)]
        tenant.tokens -= ticket.tokens
        tenant.input_tokens -= ticket.reservation.input_tokens
        self.requests -= 1
        self.tokens -= ticket.tokens
        self.input_tokens -= ticket.reservation.input_tokens
        if tenant.tickets:
            return
        self._take_out(name, tenant)
        del self.tenants[name]
        self.weight -= tenant.weight
        if tenant.start > self.virtual:
            self.ahead_of_time[name] = tenant.start
            insort(self._by_finish, (tenant.start, name))
        if not self.requests:
            # Nobody has waited for anybody: the next one begins a new story, except that a lane which has had
            # more than its floor must not get the same again by coming back one request at a time.
            self.virtual = 0
            self.ahead_of_time.clear()
            self._by_finish.clear()
            self.owed_permille = min(self.owed_permille, 0)

    def charge(self, ticket: Ticket, *, in_turn: bool) -> None:
        """Move the ticket's tenant on in virtual time, for a grant; call before `remove`."""
        name = ticket.reservation.tenant
        tenant = self.tenants[name]
        self._take_out(name, tenant)
        if in_turn and tenant.start > self.virtual:
            self.virtual = tenant.start
            while self._by_finish and self._by_finish[0][0] <= self.virtual:
                del self.ahead_of_time[self._by_finish.pop(0)[1]]
        tenant.start += virtual_cost(ticket.tokens, tenant.weight)
        insort(self.ready, (tenant.start, name))

    def park(self, name: str, until_ms: int) -> None:
        """Set a tenant aside until then."""
        tenant = self.tenants[name]
        self._take_out(name, tenant)
        tenant.parked_until_ms = until_ms
        insort(self.parked, (until_ms, name))

    def unpark(self, name: str) -> bool:
        """Let a tenant back in, without credit for the time it was away. False when it was not set aside."""
        tenant = self.tenants.get(name)
        if tenant is None or tenant.parked_until_ms is None:
            return False
        self._take_out(name, tenant)
        tenant.start = max(tenant.start, self.virtual)
        insort(self.ready, (tenant.start, name))
        return True

    def _take_out(self, name: str, tenant: TenantLine) -> None:
        if tenant.parked_until_ms is None:
            _discard(self.ready, (tenant.start, name))
        else:
            _discard(self.parked, (tenant.parked_until_ms, name))
            tenant.parked_until_ms = None


@dataclass(slots=True)
class Line:
    """All who wait for one pool. `wake_at_ms` is when time alone may let somebody go."""

    pool: Pool
    lanes: dict[Lane, LaneLine] = field(default_factory=dict)
    wake_at_ms: int | None = None

    @property
    def requests(self) -> int:
        """How many wait."""
        return sum(lane.requests for lane in self.lanes.values())

    def add(self, ticket: Ticket) -> None:
        """Take one more in. The pool, the lane's terms and its limit are from now on what this ticket says."""
        reservation = ticket.reservation
        self.pool = reservation.pool
        line = self.lanes.get(reservation.lane)
        if line is None:
            line = self.lanes[reservation.lane] = LaneLine(
                reservation.lane_terms, reservation.lane_limit_tokens
            )
        line.terms, line.limit_tokens = reservation.lane_terms, reservation.lane_limit_tokens
        line.add(ticket)

    def resize(self, pool: Pool, lane_limits_tokens: Mapping[Lane, int]) -> None:
        """The pool is another one now, and so is what its lanes may hold of it."""
        self.pool = pool
        for lane, line in self.lanes.items():
            line.limit_tokens = lane_limits_tokens.get(lane, line.limit_tokens)

    def remove(self, ticket: Ticket) -> None:
        """Let one go, whatever became of it."""
        self.lanes[ticket.reservation.lane].remove(ticket)

    def unpark(self, tenant: str) -> bool:
        """A limit of this tenant's may have moved. True if that lets it back in anywhere."""
        let_in = [
            line.unpark(tenant) for line in self.lanes.values()
        ]  # every one of them, not the first only
        return any(let_in)

    def pushed_out_by(self, newcomer: Ticket) -> tuple[Ticket, ...] | None:
        """Who must leave so that `newcomer`, already in the line, can stay: usually nobody.

        `None` when its lane is full for it.
        """
        line = self.lanes[newcomer.reservation.lane]
        excess_requests = line.requests - line.terms.queue_requests
        excess_tokens = line.tokens - line.terms.queue_tokens
        if excess_requests <= 0 and excess_tokens <= 0:
            return ()
        own = line.tenants[newcomer.reservation.tenant]
        own_share = virtual_cost(own.tokens, own.weight)
        share, name = max(
            (virtual_cost(tenant.tokens, tenant.weight), name) for name, tenant in line.tenants.items()
        )
        tenant = line.tenants[name]
        pushed: list[Ticket] = []
        for ticket in tenant.tickets[: -PUSHED_OUT_AT_ONCE - 1 : -1]:
            if share <= own_share:
                return None
            pushed.append(ticket)
            share -= virtual_cost(ticket.tokens, tenant.weight)
            excess_requests -= 1
            excess_tokens -= ticket.tokens
            if excess_requests <= 0 and excess_tokens <= 0:
                return tuple(pushed)
        return None

    def ahead_of(self, ticket: Ticket) -> Ahead:
        """What may go before this ticket, which is in the line, by the order above and a little more.

        All of the higher lanes; in its own lane what else its tenant has waiting, and of the others as much
        as their weights let them have meanwhile; of the lower lanes their floors' share of all that.
        """
        reservation = ticket.reservation
        requests = tokens = input_tokens = 0
        rank = LANES_DOWNWARDS.index(reservation.lane)
        for lane in LANES_DOWNWARDS[:rank]:
            line = self.lanes.get(lane)
            if line is not None:
                requests += line.requests
                tokens += line.tokens
                input_tokens += line.input_tokens
        line = self.lanes[reservation.lane]
        own = line.tenants[reservation.tenant]
        others = Ahead(
            requests=line.requests - len(own.tickets),
            tokens=line.tokens - own.tokens,
            input_tokens=line.input_tokens - own.input_tokens,
        )
        part = _part(others, -(-own.tokens * (line.weight - own.weight) // own.weight))
        requests += len(own.tickets) - 1 + part.requests
        tokens += own.tokens - ticket.tokens + part.tokens
        input_tokens += own.input_tokens - reservation.input_tokens + part.input_tokens
        for lane in LANES_DOWNWARDS[rank + 1 :]:
            line = self.lanes.get(lane)
            if line is not None and line.requests and line.terms.floor_permille:
                floor = min(line.terms.floor_permille, 999)
                waiting = Ahead(requests=line.requests, tokens=line.tokens, input_tokens=line.input_tokens)
                part = _part(waiting, -(-(tokens + ticket.tokens) * floor // (1000 - floor)))
                requests += part.requests
                tokens += part.tokens
                input_tokens += part.input_tokens
        return Ahead(requests=requests, tokens=tokens, input_tokens=input_tokens)

    def promote(self, now_ms: int, attempt: Callable[[Ticket], Tried], *, most: int) -> bool:
        """Let go whoever can, in order, in at most `most` steps. True when there may be more to do.

        `attempt` tries one ticket and gives it its answer, if it has one.
        """
        self.wake_at_ms = None
        for line in self.lanes.values():
            while line.parked and line.parked[0][0] <= now_ms:
                line.unpark(line.parked[0][1])
        blocked: set[Lane] = set()
        head: Ticket | None = None
        for _ in range(most):
            lane = self._next_lane(blocked)
            if lane is None:
                break
            line = self.lanes[lane]
            ticket = line.tenants[line.ready[0][1]].tickets[0]
            tried = attempt(ticket)
            match tried.outlook:
                case Outlook.GRANTED:
                    self._let_go(ticket, blocked, in_turn=True)
                case Outlook.GONE:
                    line.remove(ticket)
                case Outlook.TENANT:
                    line.park(ticket.reservation.tenant, _until(tried))
                case Outlook.LANE:
                    blocked.add(lane)
                    self._wake_by(tried.wake_at_ms)
                case Outlook.POOL:
                    head = ticket
                    self._wake_by(tried.wake_at_ms)
                    break
        else:
            return self._next_lane(blocked) is not None
        if head is not None:
            self._let_pass(head, blocked, attempt)
        for line in self.lanes.values():
            if line.parked and line.parked[0][0] < NEVER_MS:
                self._wake_by(line.parked[0][0])
        return False

    def _next_lane(self, blocked: set[Lane]) -> Lane | None:
        """The lane that is owed most, if any is owed something; else the highest with somebody ready."""
        first: Lane | None = None
        most_owed = 0
        for lane in LANES_DOWNWARDS:
            line = self.lanes.get(lane)
            if line is None or not line.ready or lane in blocked:
                continue
            if line.owed_permille > most_owed:
                first, most_owed = lane, line.owed_permille
            elif first is None:
                first = lane
        return first

    def _let_pass(self, head: Ticket, blocked: set[Lane], attempt: Callable[[Ticket], Tried]) -> None:
        head_lane = head.reservation.lane
        head_tenant = self.lanes[head_lane].tenants[head.reservation.tenant]
        latest_finish = head_tenant.start + virtual_cost(head.tokens, head_tenant.weight)
        for lane, ticket in self._behind(head, blocked):
            line = self.lanes[lane]
            tenant = line.tenants.get(ticket.reservation.tenant)
            if lane in blocked or tenant is None or tenant.parked_until_ms is not None:
                continue
            if not ticket.patient or ticket.tokens * PASSES_IN_SIZE > head.tokens:
                continue
            if head.passed_tokens + ticket.tokens > head.tokens:
                continue
            if lane is head_lane and (
                tenant.start + virtual_cost(ticket.tokens, tenant.weight) > latest_finish
            ):
                continue
            tried = attempt(ticket)
            match tried.outlook:
                case Outlook.GRANTED:
                    head.passed_tokens += ticket.tokens
                    self._let_go(ticket, blocked, in_turn=False)
                case Outlook.GONE:
                    line.remove(ticket)
                case Outlook.TENANT:
                    # The head is its tenant's first and is not at its tenant's limit, so it stays ready.
                    if tenant is not head_tenant:
                        line.park(ticket.reservation.tenant, _until(tried))
                case Outlook.LANE:
                    blocked.add(lane)
                    self._wake_by(tried.wake_at_ms)
                case Outlook.POOL:
                    self._wake_by(tried.wake_at_ms)

    def _behind(self, head: Ticket, blocked: set[Lane]) -> Iterator[tuple[Lane, Ticket]]:
        """The next requests in order after `head`, a few of each tenant, from the highest lane down."""
        found: list[tuple[Lane, Ticket]] = []
        for lane in LANES_DOWNWARDS:
            line = self.lanes.get(lane)
            if line is None or lane in blocked:
                continue
            for _, name in line.ready[:LOOKED_AT]:
                first = line.tenants[name].tickets[: LOOKED_AT_PER_TENANT + 1]
                found.extend((lane, ticket) for ticket in first if ticket is not head)
                if len(found) >= LOOKED_AT:
                    break
        return iter(found[:LOOKED_AT])

    def _let_go(self, ticket: Ticket, blocked: set[Lane], *, in_turn: bool) -> None:
        line, tokens = self.lanes[ticket.reservation.lane], ticket.tokens
        line.charge(ticket, in_turn=in_turn)
        line.owed_permille = owed_after(
            line.owed_permille, tokens, floor_permille=line.terms.floor_permille, pool=self.pool
        )
        for lane, other in self.lanes.items():
            if other is not line and other.ready and lane not in blocked:
                other.owed_permille += tokens * other.terms.floor_permille
        line.remove(ticket)

    def _wake_by(self, at_ms: int | None) -> None:
        if at_ms is not None and (self.wake_at_ms is None or at_ms < self.wake_at_ms):
            self.wake_at_ms = at_ms


def owed_after(owed_permille: int, tokens: int, *, floor_permille: int, pool: Pool) -> int:
    """What a lane is owed after a grant of `tokens`: less by what that is beyond its floor's share of it.

    What it has had too much of is remembered until the others have had as much as the pool holds, and for one
    grant at least.
    """
    beyond_permille = tokens * (1000 - floor_permille)
    remembered_permille = max(beyond_permille, pool.usable_total_tokens * floor_permille)
    return max(owed_permille - beyond_permille, -remembered_permille)


def virtual_cost(tokens: int, weight: int) -> int:
    """How far a grant of `tokens` moves a tenant of this weight in virtual time: at least 1."""
    return max(1, tokens * VIRTUAL_PARTS // weight)


def _until(tried: Tried) -> int:
    return NEVER_MS if tried.wake_at_ms is None else tried.wake_at_ms


def _part(whole: Ahead, tokens: int) -> Ahead:
    """As much of `whole` as `tokens` of it, each amount rounded up."""
    if tokens >= whole.tokens or whole.tokens == 0:
        return whole
    return Ahead(
        requests=-(-whole.requests * tokens // whole.tokens),
        tokens=tokens,
        input_tokens=-(-whole.input_tokens * tokens // whole.tokens),
    )


def _order(ticket: Ticket) -> tuple[int, int]:
    return ticket.order


def _discard(entries: list[tuple[int, str]], entry: tuple[int, str]) -> None:
    position = bisect_left(entries, entry)
    assert entries[position] == entry
    del entries[position]
