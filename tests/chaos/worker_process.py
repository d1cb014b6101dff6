"""One worker of the shared ledger as a process of its own, that a test can kill at any moment.

    python -m tests.chaos.worker_process JSON

The argument says what to do (see `Orders`); what was answered is printed as JSON at the end. `hold` takes leases
and keeps them until the process is killed, after a line that says how many it got. `race` asks at a given time,
together with other processes. `churn` reserves and settles, with callers that leave at any moment, until as many
requests as ordered have been granted: what the dead still hold may deny it everything for as long as their time to
live, and a count of requests would be used up by then.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial

import uvloop

from extproc.adapters.redis_ledger.address import Address
from extproc.adapters.redis_ledger.ledger import LedgerOptions, RedisLedger
from extproc.domain.reservation import Answer, Booking, Granted, Reservation
from tests.support.ledgers import SetPolicy, SteadyClock, ask, ledger_policy
from tests.support.reservations import pool, quota, reservation

POOL = pool(20_000, 20_000, guard_band_permille=100, request_cap=40, prefill_tokens_per_s=10_000_000)
QUOTA = quota(inflight_requests=50, inflight_tokens=30_000, tokens_per_minute=100_000_000)
LANE_TOKENS = 32_000
TENANTS = ("acme", "globex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What one process does. Times are in ms; `at_s` is when a race begins, by the machine's clock.

    `count` is requests, in a churn those that are granted.
    """

    url: str
    name: str
    mode: str
    count: int
    seed: int = 0
    limit: int = 0
    at_s: float = 0.0
    lease_ttl_ms: int = 1_000
    grace_ms: int = 1_000
    residence_ms: int = 500
    clock_offset_ms: int = 0

    def text(self) -> str:
        """As the process reads it."""
        return json.dumps(asdict(self))


def request(orders: Orders, number: int, chance: random.Random) -> Reservation:
    """A request of one of two tenants, of up to 2,000 tokens."""
    total_tokens = chance.randint(100, 2_000)
    return reservation(
        f"{orders.name}-{orders.seed}-{number}",
        tenant=chance.choice(TENANTS),
        quota=QUOTA,
        pool=POOL,
        lane_limit_tokens=LANE_TOKENS,
        total_tokens=total_tokens,
        input_tokens=total_tokens // 2,
        residence_ms=orders.residence_ms,
    )


async def churn(ledger: RedisLedger, orders: Orders) -> Counter[str]:
    """Reserve and settle; three callers in ten leave, before or after they have been answered."""
    chance = random.Random(orders.seed)
    said: Counter[str] = Counter()
    numbers = itertools.count()

    async def one(number: int) -> None:
        asked = request(orders, number, chance)
        leaves = chance.random() < 0.3
        gone = False

        def answered(answer: Answer) -> None:
            said[type(answer).__name__] += 1
            if gone and isinstance(answer, Granted):
                ledger.release(answer.lease_id)
                said["given back"] += 1
            elif not done.done():
                done.set_result(answer)

        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        ledger.reserve(asked, answered)
        if leaves:
            await asyncio.sleep(chance.random() * 0.002)
        if leaves and not done.done():
            gone = True
            return
        answer = await done
        if not isinstance(answer, Granted):
            await asyncio.sleep(0.005)
            return
        if not leaves:
            await asyncio.sleep(chance.random() * 0.01)
        record = Booking(lease_id=asked.lease_id, work_units=asked.work_units // 2)
        settles = [partial(ledger.release, asked.lease_id), partial(ledger.book, record)]
        chance.shuffle(settles)
        for settle in (*settles, *settles[: chance.randint(0, 2)]):
            settle()

    async def caller() -> None:
        while said["Granted"] < orders.count:
            await one(next(numbers))

    await asyncio.gather(*(caller() for _ in range(32)))
    return said


async def race(ledger: RedisLedger, orders: Orders) -> Counter[str]:
    """Ask for one and the same limit at the same moment as others."""
    limits = quota(inflight_requests=orders.limit)
    await asyncio.sleep(max(0.0, orders.at_s - time.time()))
    answers = await asyncio.gather(
        *(ask(ledger, reservation(f"{orders.name}-{number}", quota=limits)) for number in range(orders.count))
    )
    return Counter(type(answer).__name__ for answer in answers)


async def hold(ledger: RedisLedger, orders: Orders) -> Counter[str]:
    """Take leases, say so, and keep them."""
    limits = quota(inflight_requests=orders.limit)
    answers = [
        await ask(
            ledger,
            reservation(
                f"{orders.name}-{number}", quota=limits, total_tokens=100, residence_ms=orders.residence_ms
            ),
        )
        for number in range(orders.count)
    ]
    print(sum(isinstance(answer, Granted) for answer in answers), flush=True)
    await asyncio.Event().wait()
    return Counter()


async def work(orders: Orders) -> Counter[str]:
    """Start a worker, do what is ordered, leave in order."""
    ledger = RedisLedger(
        Address.parse(orders.url),
        holder_id=f"{orders.name}-{orders.seed}",
        policy=SetPolicy(ledger_policy(lease_ttl_ms=orders.lease_ttl_ms, grace_ms=orders.grace_ms)),
        clock=SteadyClock(orders.clock_offset_ms * 1000),
        options=LedgerOptions(domain="test", budget_ms=5_000, silence_ms=5_000),
    )
    await ledger.start()
    said = await {"churn": churn, "race": race, "hold": hold}[orders.mode](ledger, orders)
    if orders.mode != "race":
        await ledger.stop()
    return said


def main() -> None:
    """Follow the orders in the first argument."""
    orders = Orders(**json.loads(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(work(orders))), flush=True)


if __name__ == "__main__":
    main()
