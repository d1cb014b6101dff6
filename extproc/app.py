"""The composition root: builds one worker from settings, serves, drains. The only place that knows everybody.

Starting: the admin port first (alive, not ready), then policy and tokenizers, then the gRPC port, then ready.
Stopping: not ready, wait until Envoy's health check has seen it, refuse newcomers, end the streams that are
past admission (Envoy goes on serving those answers), stop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import uvloop
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from extproc import __version__
from extproc.adapters.access_log import ACCESS_LOG_SERVICE, AccessLog
from extproc.adapters.admin_http.server import AdminServer
from extproc.adapters.admin_http.sources import ServiceStatus, Sources
from extproc.adapters.body_reader import ThreadedBodyReader, read_here
from extproc.adapters.engine_probe.watch import EngineWatch
from extproc.adapters.envoy_names import EXT_PROC_SERVICE
from extproc.adapters.grpc_server import ExternalProcessor, server_options
from extproc.adapters.memory_ledger import MemoryLedger
from extproc.adapters.policy_file import PolicyError, PolicyFile
from extproc.adapters.redis_ledger.address import Address
from extproc.adapters.redis_ledger.ledger import LedgerOptions, RedisLedger
from extproc.adapters.scheduling import let_wait
from extproc.adapters.telemetry import Reading, Telemetry
from extproc.adapters.telemetry.load_readings import load_readings
from extproc.adapters.tokens.counter import ExactTokenCounter
from extproc.adapters.tokens.errors import TokenizerUnusable
from extproc.adapters.tokens.load import load_tokens
from extproc.adapters.tokens.mistral_tokens import PromptTokens
from extproc.domain.decision import Settled
from extproc.domain.load import LoadBook
from extproc.domain.policy import Policy
from extproc.domain.retries import RetryBook
from extproc.domain.snapshot import Snapshot
from extproc.driver import Driver, settle
from extproc.exchange.events import Answer
from extproc.exchange.machine import ANSWER_MS, Exchange
from extproc.settings import Settings

log = logging.getLogger(__name__)


BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a tokenizer that counting depends on too."""

SWITCH_INTERVAL_S = 0.001
"""How long a thread that counts or exports may keep the event loop waiting for the interpreter; 5 ms by default."""


YOUNG_COLLECTIONS = 1_000
"""How many collections of the second generation go before one of everything; 10 by default."""


def settle_collector() -> None:
    """Let Python's garbage collector leave alone what lives long. It stops everybody while it walks.

    What is loaded by now lives as long as the process. Open streams live for minutes and have forty objects each, a
    fifth of a second for 10,000 of them; they are no garbage, and leave none when they end. So everything is walked
    only once in seven million objects that were not given back.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, YOUNG_COLLECTIONS)


class MonotonicClock:
    """This machine's steady clock."""

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return time.monotonic_ns() // 1000


class Tokenizers:
    """What is needed to count for a policy's models, loaded once per file and kept while the file is the same."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[object, ...], PromptTokens] = {}

    def load(self, policy: Policy) -> Mapping[str, PromptTokens]:
        """The counting of each model, by its name. Blocks for seconds. Raises `TokenizerUnusable`."""
        keys = {
            model.name: (
                model.engine,
                *_state_of(model.tokenizer),
                *_state_of(model.chat_template),
                *(_state_of(str(Path(model.tokenizer).parent / name)) for name in BESIDE_TOKENIZER),
            )
            for model in policy.models.values()
        }
        loaded: dict[tuple[object, ...], PromptTokens] = {}
        for name, key in keys.items():
            if key not in loaded:
                model = policy.models[name]
                kept = self._loaded.get(key)
                loaded[key] = kept or load_tokens(model.tokenizer, model.chat_template, engine=model.engine)
        self._loaded = loaded
        return {name: loaded[key] for name, key in keys.items()}


def _state_of(path: str | None) -> tuple[object, ...]:
    """What tells whether a file has changed. A file that cannot be asked is reported by whoever reads it."""
    if path is None:
        return (None,)
    try:
        found = Path(path).stat()
    except OSError:
        return (path,)
    return (path, found.st_mtime_ns, found.st_size)


class Worker:
    """One worker process: a gRPC endpoint, an admin port, its exchanges, and what they share."""

    def __init__(self, settings: Settings) -> None:
        """Read the policy. Raises `PolicyError`: without a policy there is no service."""
        self._settings = settings
        self._clock = MonotonicClock()
        self._policy_file = PolicyFile(settings.policy)
        self._policy = self._policy_file.current
        self._policy_loaded_at_ms = self._started_at_ms = wall_ms()
        self._lease_prefix = secrets.token_hex(6)
        self._lease_numbers = itertools.count(1)
        self._loaded = False
        self._draining = False
        self._stop = asyncio.Event()
        self._ledger: MemoryLedger | RedisLedger = self._new_ledger()
        self._retries = RetryBook(secrets.token_bytes(16), workers=self._workers)
        self._load = LoadBook(self._policy)
        self._engines = EngineWatch(self._load, now_ms=self._now_ms)
        self._message_timeout_ms: int | None = None
        self._timeout_problem: str | None = None
        self._tokenizers = Tokenizers()
        self._counter = ExactTokenCounter({}, threads=settings.tokenizer_threads)
        self._reader = ThreadedBodyReader(self._counter)
        self._reloads = self._failed_reloads = 0
        self._telemetry = Telemetry(
            snapshot=self._snapshot, readings=(self._own_readings, self._load_readings)
        )
        self._telemetry.policy_changed(self._policy)
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # loaded lazily
        self._processor = ExternalProcessor(self._new_driver, on_message_timeout=self._on_message_timeout)
        self._access_log = AccessLog(self._settle)
        self._admin = AdminServer(
            host=settings.admin_host,
            port=settings.admin_port,
            sources=Sources(
                ready_checks=self._ready_checks,
                status=self._status,
                policy=lambda: self._policy,
                snapshot=self._snapshot,
                metrics=self._telemetry.exposition,
                recent=self._telemetry.decisions,
                history=self._telemetry.history,
                load=lambda: self._load.states(self._now_ms()),
            ),
        )
        self._server: aio.Server | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain. SIGHUP reads the policy file again."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(self.reload())
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        await self.start()
        try:
            await self._stop.wait()
        finally:
            await self.stop()

    async def start(self) -> None:
        """Open the admin port, load what counting needs, open the gRPC port, be ready."""
        await self._admin.start()
        await self._telemetry.start()
        if isinstance(self._ledger, RedisLedger):
            await self._ledger.start()
        self._counter.replace_models(await asyncio.to_thread(self._tokenizers.load, self._policy))
        settle_collector()
        before = set(threading.enumerate())
        server = aio.server(options=server_options(self._policy.limits.body_bytes))
        # gRPC's thread that tells the event loop what has happened. On the same core it would interrupt the loop with
        # each single thing, a dozen times per exchange, which costs more than most of what a decision does.
        let_wait(set(threading.enumerate()) - before)
        server.add_generic_rpc_handlers((self._processor.handler(), self._access_log.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (EXT_PROC_SERVICE, ACCESS_LOG_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        if server.add_insecure_port(self._settings.listen) == 0:
            raise OSError(f"cannot listen on {self._settings.listen}: is the address in use?")
        await self._engines.start(self._policy)
        await server.start()
        self._server = server
        self._loaded = True
        for name in ("", EXT_PROC_SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info(
            "serving",
            extra={"address": self._settings.listen, "policy_version": self._policy.version},
        )

    async def stop(self) -> None:
        """Drain and stop (see the module's docstring)."""
        if self._server is not None:
            log.info("draining", extra={"open_streams": self._processor.open_streams})
            for name in ("", EXT_PROC_SERVICE):
                await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
            await asyncio.sleep(self._settings.drain_wait_ms / 1000)
            self._draining = True
            await self._processor.drain(self._settings.drain_end_ms)
            await self._server.stop(grace=0.5)
        await self._engines.stop()
        if isinstance(self._ledger, RedisLedger):
            await self._ledger.stop()
        await self._admin.stop()
        self._counter.close()
        await self._telemetry.stop()  # last: every lease has been given back by now
        log.info("stopped")

    def _load_again(self) -> tuple[Policy, Mapping[str, PromptTokens]]:
        """The policy file as it is now, and what counting for it needs: both, or the last good policy stays."""
        models: dict[str, PromptTokens] = {}
        policy = self._policy_file.reload(lambda policy: models.update(self._tokenizers.load(policy)))
        return policy, models

    async def reload(self) -> None:
        """Put the policy file in force as it is now; if anything is wrong with it, the last good one stays."""
        try:
            policy, models = await asyncio.to_thread(self._load_again)
        except (PolicyError, TokenizerUnusable) as error:
            self._failed_reloads += 1
            log.error("policy not reloaded", extra={"error": str(error)})  # noqa: TRY400 - no fault of ours
            return
        self._counter.replace_models(models)
        self._policy = policy
        self._policy_loaded_at_ms = wall_ms()
        self._reloads += 1
        self._telemetry.policy_changed(policy)
        self._load.policy_changed(policy)
        self._engines.policy_changed(policy)
        self._ledger.policy_changed(policy)
        self._compare_timeouts()
        log.info("policy reloaded", extra={"policy_version": policy.version})

    @property
    def current(self) -> Policy:
        """See `PolicySource.current`."""
        return self._policy

    def _new_ledger(self) -> MemoryLedger | RedisLedger:
        """Books in this process, or those that all workers of the domain share."""
        if self._settings.ledger is None:
            return MemoryLedger(self._clock)
        return RedisLedger(
            Address.parse(self._settings.ledger),
            holder_id=self._lease_prefix,
            policy=self,
            clock=self._clock,
            options=LedgerOptions(domain=self._settings.ledger_domain),
            on_call=lambda duration_us: self._telemetry.metrics.ledger_called("batch", duration_us),
        )

    def _workers(self) -> int:
        """How many workers share tenants' limits, this one included."""
        return self._ledger.workers if isinstance(self._ledger, RedisLedger) else 1

    # What an exchange is made of.

    def _new_driver(self, send: Callable[[Answer], None], close: Callable[[bool], None]) -> Driver:
        exchange = Exchange(
            policy=self._policy,
            lease_id=f"{self._lease_prefix}-{next(self._lease_numbers):x}",
            read_json=read_here,
            draining=self._draining,
            retries=self._retries,
            load=self._load,
        )
        return Driver(
            exchange=exchange,
            clock=self._clock,
            reader=self._reader,
            counter=self._counter,
            ledger=self._ledger,
            observer=self._telemetry.observer,
            send=send,
            close=close,
        )

    def _on_message_timeout(self, message_timeout_ms: int) -> None:
        self._message_timeout_ms = message_timeout_ms
        self._compare_timeouts()

    def _compare_timeouts(self) -> None:
        """Do the policy and the running Envoy agree about how long a request may wait? Say it once if not."""
        before, self._timeout_problem = self._timeout_problem, None
        longest_ms, timeout_ms = self._policy.longest_residence_ms, self._message_timeout_ms
        if timeout_ms is not None and timeout_ms < longest_ms + ANSWER_MS:
            self._timeout_problem = (
                f"the policy lets requests wait for {longest_ms} ms, but Envoy's message_timeout is "
                f"{timeout_ms} ms: waits end early; give Envoy the configuration that belongs to the policy"
            )
        if self._timeout_problem is not None and self._timeout_problem != before:
            log.warning("policy and Envoy disagree", extra={"error": self._timeout_problem})

    def _settle(self, settled: Settled) -> None:
        if settled.engine_failed is not None:
            self._load.ended(
                settled.pool, settled.replica, failed=settled.engine_failed, now_ms=self._now_ms()
            )
        settle(settled, policy=self._policy, ledger=self._ledger, observer=self._telemetry.observer)

    # What the admin port shows.

    def _ready_checks(self) -> Mapping[str, str | None]:
        return {
            "tokenizers": None if self._loaded else "still loading",
            "serving": "draining" if self._draining or self._stop.is_set() else None,
        }

    def _status(self) -> ServiceStatus:
        return ServiceStatus(
            version=__version__,
            started_at_ms=self._started_at_ms,
            now_ms=wall_ms(),
            open_streams=self._processor.open_streams,
            draining=self._draining or self._stop.is_set(),
            policy_version=self._policy.version,
            policy_loaded_at_ms=self._policy_loaded_at_ms,
            policy_error=self._policy_file.last_error,
            ledger="memory" if isinstance(self._ledger, MemoryLedger) else "shared",
            details=self._details(),
        )

    def _details(self) -> Mapping[str, Any]:
        details: dict[str, Any] = {
            "envoy_message_timeout_ms": self._message_timeout_ms,
            "envoy_problem": self._timeout_problem,
        }
        if isinstance(self._ledger, RedisLedger):
            details["ledger_health"] = dataclasses.asdict(self._ledger.health())
        return details

    async def _snapshot(self) -> Snapshot:
        return await self._ledger.snapshot(self._policy)

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

    def _load_readings(self) -> Iterable[Reading]:
        return load_readings(self._load.states(self._now_ms()))

    def _own_readings(self) -> Iterable[Reading]:
        yield Reading(name="extproc_open_streams", value=self._processor.open_streams)
        yield Reading(name="extproc_draining", value=int(self._draining or self._stop.is_set()))
        yield Reading(name="extproc_policy_reloads", labels=("ok",), value=self._reloads)
        yield Reading(name="extproc_policy_reloads", labels=("error",), value=self._failed_reloads)
        yield Reading(name="extproc_policy_loaded_timestamp_seconds", value=self._policy_loaded_at_ms)
        yield Reading(name="extproc_tokenizer_prompts", labels=("inline",), value=self._counter.stats.inline)
        yield Reading(name="extproc_tokenizer_prompts", labels=("pool",), value=self._counter.stats.pooled)
        yield Reading(name="extproc_tokenizer_failed", value=self._counter.stats.failed)
        yield Reading(name="extproc_tokenizer_queue_prompts", value=self._counter.queue_depth)
        # Models may share one tokenizer: its caches count once.
        caches = [
            cache
            for tokens in {id(tokens): tokens for tokens in self._counter.models.values()}.values()
            for cache in (tokens.pieces, tokens.prompts)
        ]
        yield Reading(
            name="extproc_tokenizer_pieces", labels=("hit",), value=sum(cache.hits for cache in caches)
        )
        yield Reading(
            name="extproc_tokenizer_pieces", labels=("miss",), value=sum(cache.misses for cache in caches)
        )
        yield Reading(name="extproc_tokenizer_cache_entries", value=sum(len(cache) for cache in caches))
        yield Reading(name="extproc_tokenizer_overloaded", value=self._counter.stats.overloaded)
        yield Reading(name="extproc_envoy_disagrees", value=int(self._timeout_problem is not None))
        yield from self._ledger_readings()

    def _ledger_readings(self) -> Iterable[Reading]:
        if isinstance(self._ledger, MemoryLedger):
            yield Reading(name="extproc_leases_unbooked", value=self._ledger.unbooked_total)
            yield Reading(name="extproc_ledger_posture", labels=("normal",), value=1)
            return
        health = self._ledger.health()
        yield Reading(name="extproc_leases_unbooked", value=health.unbooked_total)
        yield Reading(name="extproc_leases_reclaimed", value=health.reclaimed_total)
        yield Reading(name="extproc_ledger_breaker_open", value=int(not health.available))
        yield Reading(name="extproc_ledger_posture", labels=("normal",), value=int(health.available))
        for posture in sorted({str(lane.posture) for lane in self._policy.lanes.values()}):
            yield Reading(name="extproc_ledger_posture", labels=(posture,), value=int(not health.available))
        yield Reading(name="extproc_ledger_calls", labels=("batch", "ok"), value=health.calls_total)
        yield Reading(name="extproc_ledger_calls", labels=("batch", "timeout"), value=health.unanswered_total)
        yield Reading(name="extproc_ledger_operations", value=health.ops_total)
        for event, total in (
            ("breaker_opened", health.breaker_opened_total),
            ("late_grant", health.late_grants_total),
            ("local_grant", health.local_grants_total),
            ("reasserted", health.reasserted_total),
            ("orphaned", health.orphaned_total),
            ("settle_dropped", health.settles_dropped_total),
            ("failed", health.failed_ops_total),
        ):
            yield Reading(name="extproc_ledger_events", labels=(event,), value=total)


def wall_ms() -> int:
    """Milliseconds since the epoch, for people."""
    return time.time_ns() // 1_000_000


def serve(settings: Settings) -> None:
    """Run one worker until it is told to stop."""

    async def run() -> None:
        await Worker(settings).run()

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
