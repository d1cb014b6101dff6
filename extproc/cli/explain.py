"""`extproc explain`: what would be decided about one request, step by step, without a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from extproc.domain.load import LoadBook
    from extproc.domain.policy import Policy, Pool
    from extproc.exchange.events import Effect, Event, RequestHeaders

Step = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="explain")(explain)


def explain(
    policy: Annotated[Path, typer.Option(help="Policy file (YAML).", envvar="EXTPROC_POLICY")],
    body: Annotated[Path, typer.Option(help="The request's body: a file, or - for standard input.")],
    header: Annotated[
        list[str] | None, typer.Option(help="A request header, NAME=VALUE; may be repeated.")
    ] = None,
    path: Annotated[str, typer.Option(help="The request's path.")] = "/v1/chat/completions",
    gone: Annotated[
        list[str] | None, typer.Option(help="A pool of which no engine answers; may be repeated.")
    ] = None,
    overloaded: Annotated[
        list[str] | None, typer.Option(help="A pool whose engines have too much to do; may be repeated.")
    ] = None,
    full: Annotated[list[str] | None, typer.Option(help="A pool that has no room; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what would be decided about one request, and why, on a fleet that is idle, or as bad as you say."""
    from extproc.adapters.policy_file import PolicyError, load_policy
    from extproc.adapters.tokens.errors import TokenizerUnusable
    from extproc.exchange.events import RequestHeaders

    headers = {"content-type": "application/json", "x-request-id": "explain"}
    for line in header or ():
        name, equals, value = line.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{line!r} is not NAME=VALUE", param_hint="--header")
        headers[name.strip().lower()] = value
    try:
        raw = sys.stdin.buffer.read() if str(body) == "-" else body.read_bytes()
        head = RequestHeaders(method="POST", path=path, headers=headers, end_of_stream=not raw)
        in_force = load_policy(policy)
        load = _load(in_force, gone=gone or (), overloaded=overloaded or ())
        crowded = frozenset(_pool(in_force, name, "--full").name for name in full or ())
        steps = list(asyncio.run(_play(in_force, head, raw, load, crowded)))
    except (PolicyError, TokenizerUnusable, OSError) as error:
        typer.echo(f"extproc: {error}", err=True)
        raise typer.Exit(code=2) from None
    if as_json:
        import orjson

        typer.echo(orjson.dumps(steps, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(steps)


def _load(policy: Policy, *, gone: Iterable[str], overloaded: Iterable[str]) -> LoadBook:
    """What would be known if no engine of `gone` pools had answered lately, and those of `overloaded` were full."""
    from extproc.domain.load import LoadBook
    from extproc.domain.signals import EngineSignal, ProbeResult

    load = LoadBook(policy)
    for name in gone:
        pool = _pool(policy, name, "--gone")
        for replica in pool.replicas:
            for _ in range(pool.breaker.failures):
                load.ended(name, replica.name, failed=True, now_ms=0)
    for name in overloaded:
        pool = _pool(policy, name, "--overloaded")
        rules = pool.overload
        if rules is None:
            raise typer.BadParameter(
                f"pool {name!r} has no `overload` in the policy", param_hint="--overloaded"
            )
        for step in range(-3, 1):
            at_ms = step * rules.enter_ms
            full = EngineSignal(
                waiting_requests=rules.waiting_requests,
                running_requests=None,
                kv_used_permille=rules.kv_used_permille,
                at_ms=at_ms,
            )
            load.probed(name, pool.replicas[0].name, ProbeResult.OK, full, at_ms)
            load.tick(at_ms)
    return load


def _pool(policy: Policy, name: str, option: str) -> Pool:
    if name not in policy.pools:
        raise typer.BadParameter(f"{name!r} is not a pool of the policy", param_hint=option)
    return policy.pools[name]


async def _play(
    policy: Policy, head: RequestHeaders, raw: bytes, load: LoadBook, full: frozenset[str]
) -> Iterator[Step]:
    """Drive a real exchange with the real counter over empty books, and note what each step found.

    Pools of `full` have no room.
    """
    from extproc.adapters.body_reader import read_whole
    from extproc.adapters.tokens.counter import ExactTokenCounter
    from extproc.app import Tokenizers
    from extproc.domain.books import Books
    from extproc.domain.lease import UNDYING
    from extproc.domain.prompt import Count
    from extproc.domain.reservation import Balance, Denied, Granted, Queued, Scope
    from extproc.exchange.events import CountTokens, RequestBody, Reserve
    from extproc.exchange.machine import Exchange

    exchange = Exchange(policy=policy, lease_id="explain", read_json=read_whole, load=load)
    counter = ExactTokenCounter({}, threads=1)
    steps: list[Step] = [{"step": "policy", "version": policy.version}]
    events: list[Event] = [head]
    if raw:
        events.append(RequestBody(data=raw, end_of_stream=True))
    try:
        while events:
            event = events.pop(0)
            for effect in exchange.receive(event, 0):
                steps.extend(_step_of(effect, policy))
                if isinstance(effect, CountTokens):
                    counter.replace_models(await asyncio.to_thread(Tokenizers().load, policy))
                    counted: asyncio.Future[Count] = asyncio.get_running_loop().create_future()
                    counter.count(
                        model=effect.model,
                        prompt=effect.prompt,
                        limit_tokens=effect.limit_tokens,
                        tenant=effect.tenant,
                        deliver=counted.set_result,
                    )
                    count = await counted
                    steps.append({"step": "count", "answer": type(count).__name__, **_fields(count)})
                    events.append(count)
                if isinstance(effect, Reserve):
                    answer: Granted | Denied | Queued
                    if effect.reservation.pool.name in full:
                        answer = Denied(scope=Scope.REPLICA_TOKENS, wait_ms=1_000, balance=Balance())
                        steps.append({"step": "denied", "scope": answer.scope})
                    else:
                        answer = Books().reserve(replace(effect.reservation, hold_ms=0), 0, UNDYING)
                    assert not isinstance(answer, Queued), "who does not wait is not queued"
                    events.append(answer)
    finally:
        counter.close()
    return iter(steps)


def _step_of(effect: Effect, policy: Policy) -> Iterator[Step]:
    from extproc.exchange.events import Continue, CountTokens, Observe, Refuse, Reserve, Route, Send

    match effect:
        case Send(answer=Continue(ask_body=False)):
            yield {"step": "pass", "meaning": "not an inference request: Envoy goes on with it unchanged"}
        case CountTokens():
            fallbacks = ", ".join(one.label for one in policy.models[effect.model].fallbacks)
            yield {
                "step": "read",
                "model": effect.model,
                "tenant": effect.tenant,
                "fallbacks": fallbacks or None,
            }
        case Reserve(reservation=asked):
            yield {
                "step": "reserve",
                "lane": asked.lane,
                "pool": asked.pool.name,
                "input_tokens": asked.input_tokens,
                "output_tokens": asked.output_tokens,
                "reserved_tokens": asked.total_tokens,
                "work_units": asked.work_units,
                "deadline_in_ms": asked.deadline_in_ms,
                "lane_limit_tokens": asked.lane_limit_tokens,
                "replica_limit_tokens": asked.pool.largest_usable_tokens,
            }
        case Send(answer=Route() as route):
            yield {"step": "answer", "decision": "admitted", "headers": dict(route.set_headers)}
        case Send(answer=Refuse() as refuse):
            yield {
                "step": "answer",
                "decision": "refused",
                "status": refuse.status,
                "headers": dict(refuse.headers),
                "body": refuse.body,
            }
        case Observe(decision=decision):
            yield {
                "step": "decision",
                "outcome": decision.outcome,
                "reason": decision.reason,
                "tenant": decision.tenant,
                "tier": decision.tier,
                "model": decision.model,
                "lane": decision.lane,
                "pool": decision.pool,
                "replica": decision.replica,
                "fallback": decision.fallback,
                "predicted_ttft_ms": decision.predicted_ttft_ms,
            }


def _fields(count: object) -> dict[str, Any]:
    import dataclasses

    assert dataclasses.is_dataclass(count)
    assert not isinstance(count, type)
    return dataclasses.asdict(count)


def _print(steps: list[Step]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for step in steps:
        first = True
        for name, value in step.items():
            if name == "step" or value is None:
                continue
            table.add_row(step["step"] if first else "", name, str(value))
            first = False
    Console().print(table)
