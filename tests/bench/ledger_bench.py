"""What an admission costs in the shared ledger, beside a plain check-and-increment script, in one run.

    python -m tests.bench.ledger_bench [--json FILE] [--rounds N] [--admissions N]

The plain script is what many gateways run: one counter, no lease, no tenant, no rate, no replica; it leaks
when a process dies. It is the floor. Ours runs with all scopes on: two rates, two in-flight limits, a lane's
share, and on one of four replicas the tokens, the prefill window and the request cap.

Server: processor time of the server process per admission, from the kernel's scheduler. Client: processor time
of this process per admission, everything included: building the call, the socket, the answer's delivery.
Floor and ledger take turns; the best round of each is told, and the ratio of every round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import redis
import uvloop
from redis import asyncio as redis_asyncio
from rich.console import Console
from rich.table import Table

from extproc.adapters.redis_ledger import wire
from extproc.adapters.redis_ledger.address import Address
from extproc.adapters.redis_ledger.ledger import LedgerOptions, RedisLedger
from extproc.adapters.redis_ledger.scripts import BATCH, keys_of
from extproc.domain.lease import Holder
from extproc.domain.reservation import Answer, Booking, Granted, Reservation
from tests.support.ledgers import SetPolicy, SteadyClock, ledger_policy
from tests.support.reservations import pool, quota, reservation
from tests.support.valkey import ValkeyServer

FLOOR = """
local taken = tonumber(redis.call('GET', KEYS[1]) or '0')
if taken + tonumber(ARGV[1]) > tonumber(ARGV[2]) then return 0 end
redis.call('INCRBY', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], 60)
return 1
"""

HOLDER = Holder(id="host-4711-0123456789ab", lease_ttl_ms=30_000, orphan_grace_ms=600_000)
QUOTA = quota(
    tokens_per_minute=1_000_000_000,
    burst_tokens=1_000_000_000,
    requests_per_minute=100_000_000,
    inflight_tokens=100_000_000,
    inflight_requests=1_000_000,
)
POOL = pool(
    *[10_000_000] * 4, guard_band_permille=100, request_cap=1_000_000, prefill_tokens_per_s=100_000_000
)
BATCHES = (1, 16, 64)

Row = dict[str, Any]


def asked(number: int) -> Reservation:
    """One of ten tenants' requests, of 1,000 + 500 tokens."""
    return reservation(
        f"5f0c3a9b71d2-{number}",
        tenant=f"tenant-{number % 10}",
        quota=QUOTA,
        pool=POOL,
        total_tokens=1_500,
        input_tokens=1_000,
    )


def server_cpu_s(server: ValkeyServer) -> float:
    """Processor seconds that the server has used, to the nanosecond."""
    assert server._process is not None
    return int(Path(f"/proc/{server._process.pid}/schedstat").read_text().split()[0]) / 1e9


def server_us(server: ValkeyServer, calls: list[Callable[[], Any]], per_call: int) -> float:
    """Processor time of the server per admission."""
    before_s = server_cpu_s(server)
    for call in calls:
        call()
    return (server_cpu_s(server) - before_s) / (len(calls) * per_call) * 1e6


def floor_calls(client: redis.Redis, count: int) -> list[Callable[[], Any]]:
    """The plain script, `count` times."""
    script = client.register_script(FLOOR)
    script(keys=["floor"], args=[1, 10])

    def call() -> Any:
        return client.evalsha(script.sha, 1, "floor", "1500", "1000000000000")

    return [call] * count


def ledger_calls(
    client: redis.Redis, batch: int, count: int, *, settle: bool, first: int
) -> list[Callable[[], Any]]:
    """`count` admissions in batches; with `settle`, each batch also ends and books the one before it."""
    keys = keys_of("bench")
    digest = client.script_load(BATCH.text.decode())
    calls: list[Callable[[], Any]] = []
    before: list[Reservation] = []
    for start in range(first, first + count, batch):
        now = [asked(number) for number in range(start, start + batch)]
        ops = [wire.reserve_op(one, 0) for one in now]
        if settle:
            ops += [wire.release_op(one.lease_id) for one in before]
            ops += [wire.book_op(one.lease_id, 900) for one in before]
            before = now
        argument = wire.batch(
            ops, holder=HOLDER, keep_ms=7_200_000, reclaim_most=16, pools=[wire.pool_entry(POOL, "v1")]
        )
        calls.append(partial(client.evalsha, digest, len(keys), *keys, argument))
    return calls


def measure_server(rounds: int, admissions: int) -> list[Row]:
    """Server time per admission, for each size of batch."""
    rows: list[Row] = []
    for settle in (False, True):
        for batch in BATCHES:
            floors: list[float] = []
            ours: list[float] = []
            with ValkeyServer() as server, server.client() as client:
                for number in range(rounds):
                    count = max(batch, admissions // batch * batch)
                    floors.append(server_us(server, floor_calls(client, count), 1))
                    calls = ledger_calls(client, batch, count, settle=settle, first=number * count)
                    ours.append(server_us(server, calls, batch))
            rows.append(
                {
                    "what": "admit, end and book" if settle else "admit",
                    "batch": batch,
                    "server_us": round(min(ours), 2),
                    "per_core_s": round(1e6 / min(ours)),
                    "floor_us": round(min(floors), 2),
                    "ratio": round(statistics.median(o / f for o, f in zip(ours, floors, strict=True)), 2),
                }
            )
    return rows


async def floor_client_us(url: str, count: int) -> float:
    """The plain script through redis-py's asyncio client, 16 at a time."""
    client = redis_asyncio.Redis.from_url(url)
    script = client.register_script(FLOOR)
    await script(keys=["floor"], args=[1, 10])

    async def one() -> None:
        await client.evalsha(script.sha, 1, "floor", "1500", "1000000000000")

    began_s = time.process_time()
    for _ in range(count // 16):
        await asyncio.gather(*(one() for _ in range(16)))
    used_s = time.process_time() - began_s
    await client.aclose()
    return used_s / count * 1e6


async def ledger_client_us(url: str, batch: int, count: int, *, settle: bool) -> tuple[float, float]:
    """Client time per admission, and calls per admission, when `batch` requests ask in one turn."""
    ledger = RedisLedger(
        Address.parse(url),
        holder_id=HOLDER.id,
        policy=SetPolicy(ledger_policy()),
        clock=SteadyClock(),
        options=LedgerOptions(domain="bench", budget_ms=5_000),
    )
    await ledger.start()
    loop = asyncio.get_running_loop()
    requests = [asked(number) for number in range(count)]
    answers: list[Answer] = []
    calls = ledger.health().calls_total
    used_s = 0.0
    for start in range(0, count, batch):
        turn = requests[start : start + batch]
        done = loop.create_future()
        left = len(turn)

        def deliver(answer: Answer, done: asyncio.Future[None] = done) -> None:
            nonlocal left
            answers.append(answer)
            left -= 1
            if not left:
                done.set_result(None)

        began_s = time.process_time()
        for one in turn:
            ledger.reserve(one, deliver)
        await done
        if settle:
            for one in turn:
                ledger.release(one.lease_id)
                ledger.book(Booking(lease_id=one.lease_id, work_units=900))
        used_s += time.process_time() - began_s
    assert len(answers) == count
    assert all(isinstance(answer, Granted) for answer in answers)
    calls = ledger.health().calls_total - calls
    if not settle:
        for one in requests:
            ledger.release(one.lease_id)
    await ledger.stop()
    return used_s / count * 1e6, calls / count


def measure_client(rounds: int, admissions: int) -> list[Row]:
    """Client time per admission, for each size of batch."""
    rows: list[Row] = []
    for settle in (False, True):
        for batch in BATCHES:
            floors: list[float] = []
            ours: list[tuple[float, float]] = []
            for _ in range(rounds):
                with ValkeyServer() as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    floors.append(runner.run(floor_client_us(server.url, max(160, admissions // 4))))
                    ours.append(runner.run(ledger_client_us(server.url, batch, admissions, settle=settle)))
            best, calls = min(ours)
            rows.append(
                {
                    "what": "admit, end and book" if settle else "admit",
                    "batch": batch,
                    "client_us": round(best, 2),
                    "calls_per_admission": round(calls, 3),
                    "floor_us": round(min(floors), 2),
                    "ratio": round(
                        statistics.median(o / f for (o, _), f in zip(ours, floors, strict=True)), 2
                    ),
                }
            )
    return rows


def table(title: str, rows: list[Row]) -> Table:
    """Rows as they are."""
    shown = Table(title=title)
    for column in rows[0]:
        shown.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        shown.add_row(*(str(value) for value in row.values()))
    return shown


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--admissions", type=int, default=4_000, help="per round and size of batch")
    options = parser.parse_args()
    server = measure_server(options.rounds, options.admissions)
    client = measure_client(options.rounds, options.admissions)
    console = Console()
    console.print(table("Server: one Valkey core", server))
    console.print(table("Client: processor time of a worker", client))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"server": server, "client": client}, indent=2) + "\n")


if __name__ == "__main__":
    main()
