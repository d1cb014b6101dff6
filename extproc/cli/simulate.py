"""`extproc simulate`: what a policy would do to a day's traffic, in seconds and without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from extproc.domain.policy import Policy
    from extproc.sim.comparison import Comparison, Role
    from extproc.sim.engine import EngineConfig
    from extproc.sim.fleet import ReplicaKey
    from extproc.sim.gates import Asked, Gate
    from extproc.sim.workload import Stream

    Planned = tuple[Role, str, Callable[[], Gate], Sequence[Asked]]

INTERVALS = 60
"""Into how many intervals the time is cut in charts."""

SAMPLES_PER_INTERVAL = 4


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="simulate")(simulate)


def simulate(
    policy: Annotated[Path, typer.Option(help="Policy file (YAML).", envvar="EXTPROC_POLICY")],
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help="A stream of requests from a trace file: FILE,tenant=NAME[,key=value...]; may be repeated."
        ),
    ] = None,
    law: Annotated[
        list[str] | None,
        typer.Option(
            help="A stream at random: poisson:RATE or gamma:RATE:CV, then ,tenant=NAME,lengths=FILE "
            "[,key=value...]; may be repeated. Keys: tenant (NAME or NAME:SHARE+NAME:SHARE), lane, model, rate, "
            "lengths, input, output, limit, from, until, obey (permille), attempts, timeout (s), repeat, name."
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="Another policy, for the same traffic; may be repeated.")
    ] = None,
    without_bulk: Annotated[
        bool, typer.Option("--without-bulk", help="Also: the policy without the streams that declare bulk.")
    ] = False,
    no_control: Annotated[
        bool, typer.Option("--no-control", help="Also: everything goes to the replica with fewest requests.")
    ] = False,
    request_limit: Annotated[
        list[int] | None,
        typer.Option(help="Also: no control but this many requests at once; may be repeated.", min=1),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long requests come.", min=1, max=86_400)] = 300,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 1,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="A property of all engines, NAME=NUMBER; may be repeated. What is not said follows from the "
            "policy's pools."
        ),
    ] = None,
    itl_ms: Annotated[
        int | None,
        typer.Option(help="Good work also has its tokens at most this far apart on average.", min=1),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    html_out: Annotated[Path | None, typer.Option("--html", help="Write the report here.")] = None,
) -> None:
    """Play traffic against a policy in virtual time, by the same code that the service runs."""
    from rich.console import Console

    from extproc.adapters.policy_file import PolicyError, load_policy
    from extproc.sim.gates import UnknownName
    from extproc.sim.report import to_html, to_json
    from extproc.sim.stream_text import parse_stream
    from extproc.sim.traces import TraceUnreadable
    from extproc.sim.workload import StreamInvalid

    console = Console()
    if not console.is_terminal:
        console.width = 160
    try:
        streams = [parse_stream(text, is_law=False) for text in trace or ()]
        streams += [parse_stream(text, is_law=True) for text in law or ()]
        comparison = _compare(
            console,
            policy=(policy, load_policy(policy)),
            others=[(path, load_policy(path)) for path in compare or ()],
            streams=streams,
            texts=[*(trace or ()), *(law or ())],
            without_bulk=without_bulk,
            no_control=no_control,
            request_limits=request_limit or [],
            seconds=seconds,
            seed=seed,
            engine=engine or [],
            itl_ms=itl_ms,
        )
        if json_out is not None:
            json_out.write_bytes(to_json(comparison))
        if html_out is not None:
            html_out.write_text(to_html(comparison), encoding="utf-8")
    except (PolicyError, StreamInvalid, TraceUnreadable, UnknownName, OSError, ValueError) as error:
        typer.echo(f"extproc: {error}", err=True)
        raise typer.Exit(code=2) from None
    _print(console, comparison)
    for path in (json_out, html_out):
        if path is not None:
            console.print(f"written: {path}")


def _compare(
    console: Console,
    *,
    policy: tuple[Path, Policy],
    others: list[tuple[Path, Policy]],
    streams: list[Stream],
    texts: list[str],
    without_bulk: bool,
    no_control: bool,
    request_limits: list[int],
    seconds: float,
    seed: int,
    engine: list[str],
    itl_ms: int | None,
) -> Comparison:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from extproc.domain.policy import Lane
    from extproc.sim.comparison import Compared, Comparison, Role, effects_of
    from extproc.sim.fleet import Fleet
    from extproc.sim.gates import AdmissionGate, OpenGate, named, read
    from extproc.sim.measures import Targets, measure
    from extproc.sim.workload import StreamInvalid, check_names, generate

    path, own = policy
    if not streams:
        raise StreamInvalid("nothing to simulate; give at least one --trace or --law")
    check_names(streams)
    workload = [read(own, request) for request in generate(streams, seconds=seconds, seed=seed)]
    for _, other in others:
        for asked in workload:
            named(other, asked.request)
    configs = _engines([own, *(other for _, other in others)], engine)
    interval_s = max(1.0, seconds / INTERVALS)
    drain_us = max(lane.deadline_ms for lane in own.lanes.values()) * 1_000
    targets = Targets(ttft_ms={lane: one.deadline_ms for lane, one in own.lanes.items()}, itl_ms=itl_ms)

    planned: list[Planned] = [(Role.POLICY, path.stem, partial(AdmissionGate, own), workload)]
    planned += [
        (Role.OTHER_POLICY, other_path.stem, partial(AdmissionGate, other), workload)
        for other_path, other in others
    ]
    if without_bulk:
        bulk = {stream.name for stream in streams if stream.lane is Lane.BULK}
        rest = [asked for asked in workload if asked.request.stream not in bulk]
        planned.append((Role.WITHOUT_BULK, "without bulk", partial(AdmissionGate, own), rest))
    if no_control:
        planned.append((Role.NO_CONTROL, "no control", partial(OpenGate, own), workload))
    planned += [
        (
            Role.REQUEST_LIMIT,
            f"limit of {limit}",
            partial(OpenGate, own, request_limit=limit),
            workload,
        )
        for limit in request_limits
    ]

    runs: list[Compared] = []
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        for role, name, gate, asked_of in planned:
            fleet = Fleet(
                gate=gate(),
                configs=configs,
                sample_us=round(interval_s * 1_000_000 / SAMPLES_PER_INTERVAL),
                drain_us=drain_us,
            )
            run = fleet.play(
                asked_of, progress=partial(_tell, progress, progress.add_task(name, total=seconds))
            )
            runs.append(
                Compared(
                    role=role,
                    measured=measure(
                        run, name=name, policy=own, targets=targets, seconds=seconds, interval_s=interval_s
                    ),
                )
            )
    floor_permille = own.lanes[Lane.BULK].floor_permille
    comparison = Comparison(
        streams=tuple(texts),
        engines=tuple(_engine_lines(configs)),
        policy=path.name,
        policy_version=own.version,
        seconds=seconds,
        seed=seed,
        targets=targets,
        bulk_floor_permille=floor_permille,
        runs=tuple(runs),
    )
    effects = effects_of(comparison.runs, bulk_floor_permille=floor_permille)
    return replace(comparison, effects=effects)


def _tell(progress: Progress, task: TaskID, at_us: int) -> None:
    progress.update(task, completed=at_us / 1_000_000)


def _engines(policies: list[Policy], settings: list[str]) -> dict[ReplicaKey, EngineConfig]:
    """An engine for each replica of each policy; where several have the same one, the first describes it."""
    from extproc.sim.engine import EngineConfig
    from extproc.sim.workload import StreamInvalid

    known = [field.name for field in fields(EngineConfig)]
    said: dict[str, int] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in known or not value.isascii() or not value.isdigit():
            raise StreamInvalid(f"--engine {text!r}: write NAME=NUMBER with one of {', '.join(known)}")
        said[name] = int(value)
    configs: dict[ReplicaKey, EngineConfig] = {}
    for policy in policies:
        for pool in policy.pools.values():
            for replica in pool.replicas:
                follows = {
                    "kv_capacity_tokens": replica.ceiling_tokens,
                    "prefill_tokens_per_s": pool.prefill_tokens_per_s,
                }
                configs.setdefault((pool.name, replica.name), EngineConfig(**(follows | said)))
    return configs


def _engine_lines(configs: dict[ReplicaKey, EngineConfig]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for (pool, replica), config in configs.items():
        text = ", ".join(f"{field.name} {getattr(config, field.name):,}" for field in fields(config))
        groups.setdefault(text, []).append(f"{pool}/{replica}")
    return [f"{', '.join(names)}: {text}" for text, names in groups.items()]


def _print(console: Console, comparison: Comparison) -> None:
    from rich.table import Table

    from extproc.sim.report import refusal_rows, summary_rows

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for run in comparison.runs:
        table.add_column(run.measured.name, justify="right")
    for name, cells in summary_rows(comparison):
        table.add_row(name, *cells)
    for reason, cells in refusal_rows(comparison):
        table.add_row(f"refused: {reason}", *cells)
    console.print(table)
    console.print()
    for effect in comparison.effects:
        mark = "[green]yes[/green]" if effect.holds else "[red]no [/red]"
        console.print(f"{mark}  {effect.claim}: {effect.found}", highlight=False)
