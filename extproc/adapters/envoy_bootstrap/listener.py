"""The one listener: how a request is taken in, decided, watched and logged."""

from __future__ import annotations

from collections.abc import Iterator

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.trace import v3 as trace
from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_log
from envoy_data_plane.envoy.extensions.access_loggers.stream import v3 as stream_log
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early_mutation
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type import v3 as envoy_type
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.envoy.type.tracing import v3 as tracing
from envoy_data_plane.google.protobuf import Struct

from extproc.adapters.envoy_bootstrap.clusters import EXTPROC, OTLP, core_address
from extproc.adapters.envoy_bootstrap.local_replies import local_replies
from extproc.adapters.envoy_bootstrap.options import GatewayOptions
from extproc.adapters.envoy_bootstrap.rendering import duration, packed
from extproc.adapters.envoy_bootstrap.routes import routes
from extproc.adapters.envoy_bootstrap.sizing import Sizing
from extproc.adapters.envoy_bootstrap.usage import usage_filters
from extproc.adapters.envoy_names import (
    ACCESS_LOG_NAME,
    ADMISSION_NAMESPACE,
    ADMITTED_HEADERS,
    DESTINATION_NAMESPACE,
    EXT_PROC_FILTER,
    LOG_BATCH_BYTES,
    LOG_BATCH_MS,
    MESSAGE_TIMEOUT_HEADER,
    USAGE_NAMESPACE,
)
from extproc.dialects.registry import DIALECTS
from extproc.domain.outcome import Outcome
from extproc.domain.policy import HeaderIdentity, MetadataIdentity, Policy

TRACED_FIELDS = (
    "tenant",
    "tier",
    "model",
    "lane",
    "pool",
    "replica",
    "fallback",
    "decision",
    "reason",
    "policy_version",
)
"""Fields of the decision that Envoy's spans carry."""

LOGGED = {
    "at": "%START_TIME%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "duration_ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "request_bytes": "%BYTES_RECEIVED%",
    "response_bytes": "%BYTES_SENT%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "replica": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "admission": f"%DYNAMIC_METADATA({ADMISSION_NAMESPACE})%",
    "usage": f"%DYNAMIC_METADATA({USAGE_NAMESPACE})%",
    "ext_proc": f"%FILTER_STATE({EXT_PROC_FILTER}:PLAIN)%",
}
"""The line on stdout for people. Paths are without their query; bodies and credentials are nowhere."""


def gateway_listener(policy: Policy, options: GatewayOptions, sizing: Sizing) -> listener.Listener:
    """The listener with its HTTP connection manager."""
    manager = listener.Filter(
        name="envoy.filters.network.http_connection_manager",
        typed_config=packed(_connection_manager(policy, options, sizing)),
    )
    return listener.Listener(
        name="inference",
        address=core_address(options.listen),
        per_connection_buffer_limit_bytes=1 << 20,
        filter_chains=[listener.FilterChain(filters=[manager])],
    )


def _connection_manager(policy: Policy, options: GatewayOptions, sizing: Sizing) -> hcm.HttpConnectionManager:
    manager = hcm.HttpConnectionManager(
        stat_prefix="inference",
        codec_type=hcm.HttpConnectionManagerCodecType.AUTO,
        use_remote_address=True,
        generate_request_id=True,
        always_set_request_id_in_response=True,
        normalize_path=True,
        merge_slashes=True,
        early_header_mutation_extensions=[_strip_forged_headers(policy, options)],
        request_headers_timeout=duration(10_000),
        request_timeout=duration(60_000),
        stream_idle_timeout=duration(sizing.stream_idle_timeout_ms),
        common_http_protocol_options=core.HttpProtocolOptions(idle_timeout=duration(3_600_000)),
        http2_protocol_options=core.Http2ProtocolOptions(max_concurrent_streams=256),
        access_log=[_settling_log(), _readable_log()],
        local_reply_config=local_replies(),
        http_filters=list(_http_filters(policy, options, sizing)),
        route_config=routes(policy, options, sizing),
    )
    if options.otlp is not None:
        manager.tracing = _tracing(options.node_cluster)
    return manager


def _strip_forged_headers(policy: Policy, options: GatewayOptions) -> core.TypedExtensionConfig:
    """Removes what only an admission or an authenticating filter may set, before Envoy looks for a route."""
    asked = {policy.request_headers.intent, policy.request_headers.deadline_ms}
    forged = [name for name in ADMITTED_HEADERS if name not in asked]
    if isinstance(policy.identity, HeaderIdentity) and not options.trust_identity_header:
        forged.append(policy.identity.header)
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=packed(
            early_mutation.HeaderMutation(
                mutations=[mutation_rules.HeaderMutation(remove=name) for name in forged]
            )
        ),
    )


def _http_filters(policy: Policy, options: GatewayOptions, sizing: Sizing) -> Iterator[hcm.HttpFilter]:
    """Authentication filters belong in front of these. Answers pass them in reverse: usage before ext_proc."""
    yield hcm.HttpFilter(name=EXT_PROC_FILTER, typed_config=packed(_ext_proc(policy, sizing)))
    if options.usage_filters:
        yield from usage_filters(dialect.usage for dialect in DIALECTS)
    yield hcm.HttpFilter(name="envoy.filters.http.router", typed_config=packed(router.Router()))


def _ext_proc(policy: Policy, sizing: Sizing) -> ext_proc.ExternalProcessor:
    send, skip = ext_proc.ProcessingModeHeaderSendMode.SEND, ext_proc.ProcessingModeHeaderSendMode.SKIP
    message = ext_proc.ExternalProcessor(
        stat_prefix="admission",
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=EXTPROC),
            retry_policy=_another_worker(),
            initial_metadata=[
                core.HeaderValue(key=MESSAGE_TIMEOUT_HEADER, value=str(sizing.message_timeout_ms))
            ],
        ),
        # Answers that are already streaming outlive the service; new requests cannot pass, see `routes`.
        failure_mode_allow=True,
        status_on_error=envoy_type.HttpStatus(code=envoy_type.StatusCode.ServiceUnavailable),
        message_timeout=duration(sizing.message_timeout_ms),
        max_message_timeout=duration(sizing.max_message_timeout_ms),
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=send,
            request_body_mode=ext_proc.ProcessingModeBodySendMode.BUFFERED,
            request_trailer_mode=skip,
            response_header_mode=skip,  # with SEND, clients get a closed socket instead of a 400 for broken HTTP
            response_body_mode=ext_proc.ProcessingModeBodySendMode.NONE,
            response_trailer_mode=send,  # keeps the stream open until the HTTP stream is gone: the lease's lifetime
        ),
        allow_mode_override=True,
        mutation_rules=mutation_rules.HeaderMutationRules(
            disallow_expression=matcher.RegexMatcher(
                regex="^(authorization|cookie|content-encoding|transfer-encoding)$"
            )
        ),
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(
                untyped=[ADMISSION_NAMESPACE, DESTINATION_NAMESPACE]
            )
        ),
    )
    if isinstance(policy.identity, MetadataIdentity):
        message.metadata_options.forwarding_namespaces = ext_proc.MetadataOptionsMetadataNamespaces(
            untyped=[policy.identity.namespace]
        )
    return message


def _another_worker() -> core.RetryPolicy:
    """A stream that a worker did not take goes to another one.

    To another one indeed: a dead worker has no open streams, so a choice of the least busy one would return to it.
    """
    return core.RetryPolicy(
        retry_on="connect-failure,refused-stream,unavailable",
        num_retries=2,
        retry_back_off=core.BackoffStrategy(base_interval=duration(10), max_interval=duration(50)),
        retry_host_predicate=[
            core.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=packed(PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=32,
    )


def _settling_log() -> accesslog.AccessLog:
    """One record to the service per request that was admitted, soon after its end however it ends."""
    admitted = matcher.MetadataMatcher(
        filter=ADMISSION_NAMESPACE,
        path=[matcher.MetadataMatcherPathSegment(key="decision")],
        value=matcher.ValueMatcher(string_match=matcher.StringMatcher(exact=Outcome.ADMITTED)),
    )
    return accesslog.AccessLog(
        name="envoy.access_loggers.http_grpc",
        filter=accesslog.AccessLogFilter(
            metadata_filter=accesslog.MetadataFilter(matcher=admitted, match_if_key_not_found=False)
        ),
        typed_config=packed(
            grpc_log.HttpGrpcAccessLogConfig(
                common_config=grpc_log.CommonGrpcAccessLogConfig(
                    log_name=ACCESS_LOG_NAME,
                    transport_api_version=core.ApiVersion.V3,
                    grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=EXTPROC)),
                    grpc_stream_retry_policy=_another_worker(),
                    buffer_flush_interval=duration(LOG_BATCH_MS),
                    buffer_size_bytes=LOG_BATCH_BYTES,
                )
            )
        ),
    )


def _readable_log() -> accesslog.AccessLog:
    return accesslog.AccessLog(
        name="envoy.access_loggers.stdout",
        typed_config=packed(
            stream_log.StdoutAccessLog(
                log_format=core.SubstitutionFormatString(json_format=Struct.from_dict(LOGGED))
            )
        ),
    )


def _tracing(service_name: str) -> hcm.HttpConnectionManagerTracing:
    """Envoy's own spans, labelled with the decision."""
    provider = trace.OpenTelemetryConfig(
        service_name=service_name,
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=OTLP), timeout=duration(500)
        ),
    )
    return hcm.HttpConnectionManagerTracing(
        provider=trace.TracingHttp(name="envoy.tracers.opentelemetry", typed_config=packed(provider)),
        random_sampling=envoy_type.Percent(value=100.0),
        custom_tags=[
            tracing.CustomTag(
                tag=f"admission.{field}",
                metadata=tracing.CustomTagMetadata(
                    kind=metadata.MetadataKind(request=metadata.MetadataKindRequest()),
                    metadata_key=metadata.MetadataKey(
                        key=ADMISSION_NAMESPACE, path=[metadata.MetadataKeyPathSegment(key=field)]
                    ),
                ),
            )
            for field in TRACED_FIELDS
        ],
    )
