"""Envoy's access log: one record per finished request, with what the engine says it used.

The stream's end releases a lease; this record, which arrives within milliseconds of it, books the usage. It
finds its lease by the reservation id that the decision left in Envoy's dynamic metadata, on whatever worker
it arrives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from envoy.service.accesslog.v3 import als_pb2
from grpc import aio

from extproc.adapters.envoy_names import (
    ADMISSION_NAMESPACE,
    USAGE_INPUT_TOKENS,
    USAGE_NAMESPACE,
    USAGE_OUTPUT_TOKENS,
)
from extproc.domain.decision import Settled
from extproc.domain.outcome import Outcome

log = logging.getLogger(__name__)

_EOF: Any = aio.EOF  # type: ignore[attr-defined]  # missing from the stubs

ACCESS_LOG_SERVICE = "envoy.service.accesslog.v3.AccessLogService"

ENGINE_FAILED = frozenset(
    {
        *("failed_local_healthcheck", "no_healthy_upstream", "upstream_connection_failure"),
        *("upstream_connection_termination", "upstream_remote_reset", "upstream_protocol_error"),
        "upstream_retry_limit_exceeded",
    }
)
"""Response flags that say that the engine did not accept the request, or let go of it."""

ENGINE_LATE = "upstream_request_timeout"
"""Before an answer has begun this is the engine's fault; after that it may just be a long one."""

LARGEST_USAGE_TOKENS = 10_000_000
"""A larger number is a misread answer, not a usage."""


class AccessLog:
    """Serves `envoy.service.accesslog.v3.AccessLogService` and hands each admitted request's record on."""

    def __init__(self, settle: Callable[[Settled], None]) -> None:
        self._settle = settle

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What a `grpc.aio` server is given."""
        stream = grpc.stream_unary_rpc_method_handler(
            self._stream_access_logs,
            request_deserializer=als_pb2.StreamAccessLogsMessage.FromString,
            response_serializer=als_pb2.StreamAccessLogsResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(ACCESS_LOG_SERVICE, {"StreamAccessLogs": stream})

    async def _stream_access_logs(self, _requests: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        while True:
            message = await context.read()
            if message is _EOF:
                return als_pb2.StreamAccessLogsResponse()
            for entry in message.http_logs.log_entry:
                try:
                    settled = settled_of(entry)
                    if settled is not None:
                        self._settle(settled)
                except Exception:  # one bad record must not end the stream of all others
                    log.exception("access-log record not settled")


def settled_of(entry: Any) -> Settled | None:
    """What an `HTTPAccessLogEntry` settles; `None` for requests that were never admitted here."""
    common = entry.common_properties
    namespaces = common.metadata.filter_metadata
    if ADMISSION_NAMESPACE not in namespaces:
        return None
    decision = namespaces[ADMISSION_NAMESPACE].fields
    if "decision" not in decision or decision["decision"].string_value != Outcome.ADMITTED:
        return None
    flags, status = _flags(common.response_flags), entry.response.response_code.value
    usage = namespaces[USAGE_NAMESPACE].fields if USAGE_NAMESPACE in namespaces else {}
    return Settled(
        lease_id=_text(decision, "reservation"),
        tenant=_text(decision, "tenant"),
        model=_text(decision, "model"),
        lane=_text(decision, "lane"),
        pool=_text(decision, "pool"),
        replica=_text(decision, "replica"),
        status=status,
        flags=",".join(flags),
        input_tokens=_number(decision, "input_tokens") or 0,
        output_tokens=_number(decision, "output_tokens") or 0,
        work_units=_number(decision, "work_units") or 0,
        used_input_tokens=_used(usage, USAGE_INPUT_TOKENS),
        used_output_tokens=_used(usage, USAGE_OUTPUT_TOKENS),
        ttfb_ms=_duration_ms(common, "time_to_first_upstream_rx_byte"),
        duration_ms=_duration_ms(common, "time_to_last_downstream_tx_byte"),
        engine_failed=_engine_failed(status, flags),
        deadline_ms=_number(decision, "deadline_ms"),
    )


def _engine_failed(status: int, flags: Sequence[str]) -> bool | None:
    """Whether the engine is to blame. Clients that leave, and limits of Envoy's own, say nothing about it."""
    if not ENGINE_FAILED.isdisjoint(flags):
        return True
    if flags:
        return True if ENGINE_LATE in flags and status == 504 else None
    return None if status == 0 else status >= 500


def _text(fields: Any, name: str) -> str:
    return str(fields[name].string_value) if name in fields else ""


def _used(usage: Any, side: str) -> int | None:
    """The sum of a side's parts (see `USAGE_INPUT_TOKENS`); `None` if no part of it is a number."""
    parts = [_number(usage, name) for name in usage if name.startswith(side)]
    numbers = [part for part in parts if part is not None]
    return sum(numbers) if numbers else None


def _number(fields: Any, name: str) -> int | None:
    """A whole number that an engine may have used; what is neither is no number."""
    if name not in fields or fields[name].WhichOneof("kind") != "number_value":
        return None
    value = fields[name].number_value
    return int(value) if 0 <= value <= LARGEST_USAGE_TOKENS else None


def _duration_ms(common: Any, name: str) -> int | None:
    if not common.HasField(name):
        return None
    duration = getattr(common, name)
    return int(duration.seconds * 1000 + duration.nanos // 1_000_000)


def _flags(flags: Any) -> list[str]:
    """Names of the response flags that are set: why Envoy itself ended the request."""
    return [
        field.name for field, value in flags.ListFields() if value is True or field.message_type is not None
    ]
