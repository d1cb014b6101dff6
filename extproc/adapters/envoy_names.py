"""The names that this service and the Envoy in front of it must agree on, in one place.

The gateway configuration writes them into Envoy, the codec writes them into answers, and the access-log
reader looks for them in records. None of them is something that a client may choose.
"""

from __future__ import annotations

from typing import Final

from extproc.exchange import headers

ADMISSION_NAMESPACE: Final = "extproc.admission"
"""Dynamic metadata: the decision on a request, with the fields of `extproc.admission.v1.Decision`."""

USAGE_NAMESPACE: Final = "extproc.usage"
"""Dynamic metadata: what the engine's answer says it used, read inside Envoy."""

USAGE_INPUT_TOKENS: Final = "input_tokens"
USAGE_OUTPUT_TOKENS: Final = "output_tokens"
"""Keys under `USAGE_NAMESPACE`. Where an API splits a side into parts, the first part has this key and the others
have it with `_2`, `_3` ... appended: what was used is the sum of the keys that start with the name."""

DESTINATION_NAMESPACE: Final = "envoy.lb"
DESTINATION_KEY: Final = "x-gateway-destination-endpoint"
"""Dynamic metadata: `ip:port` of the reserved replica; Envoy's `override_host` policy sends the request there.
Namespace and key are those of the Kubernetes inference extension's endpoint-picker protocol."""

POOL_HEADER: Final = headers.POOL_HEADER
"""Routes into pools match on this header, so only a request that was admitted can reach an engine."""

FALLBACK_HEADER: Final = headers.FALLBACK_HEADER
LANE_HEADER: Final = headers.LANE_HEADER
"""What the engine and the client are both told: where the request was sent instead, and its lane."""

ADMITTED_HEADERS: Final = headers.ADMITTED_HEADERS
"""What an admitted request carries to the engine. A client's own copies never reach this service."""

EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
"""The gRPC service name; also what Envoy's health check asks about."""

MESSAGE_TIMEOUT_HEADER: Final = "x-extproc-message-timeout-ms"
"""gRPC metadata of every exchange: the `message_timeout` of the Envoy that opened it. What waits longer is cut by
Envoy with a 504, so the service has to know it; an Envoy with another configuration may not say it."""

EXT_PROC_FILTER: Final = "envoy.filters.http.ext_proc"
"""The filter's name: key of its per-route configuration, its attributes and its filter state."""

ACCESS_LOG_NAME: Final = "extproc"
"""`log_name` of the gRPC access log that settles reservations."""

LOG_BATCH_MS: Final = 20
LOG_BATCH_BYTES: Final = 3 * 1024
"""Records that settle travel together, three or four at a time: a message each costs the service several times the
record. Nothing is held back by it, for the stream's end has released the lease. More would be cheaper still, but when
a worker dies Envoy retries the log's stream with another one only while all that it wrote to it fits into 64 KiB, and
its description of itself, which begins every such stream, takes 61 of them (1.40): a larger first batch is lost."""
