"""What a generated configuration says about itself, above the fields that need saying.

Keys are as in `to_yaml`. The reasons behind a choice are here rather than beside the code that makes it, because
whoever runs the gateway reads the file and not the code.
"""

from __future__ import annotations

from collections.abc import Mapping

COMMENTS: Mapping[str, str] = {
    "layered_runtime": "Switches of Envoy's own code.",
    "static_layer.envoy.reloadable_features.ext_proc_graceful_grpc_close": (
        "The stream to the service ends with a clean half-close instead of a reset that races with it."
    ),
    "static_layer.re2.max_program_size.error_level": (
        "All inference paths are one regular expression; the default stops at a handful."
    ),
    "overload_manager": "A flood of idle connections must not use up Envoy's descriptors.",
    "[inference].per_connection_buffer_limit_bytes": "Flow control only; bodies have limits of their own below.",
    "early_header_mutation_extensions": (
        "Removed from every request before anything looks at it: what only an admission may set, and with a policy "
        "that takes the tenant from a header, that header. A filter that authenticates sets it afterwards."
    ),
    "request_timeout": "Time to receive a whole request. A hold by the service does not count.",
    "stream_idle_timeout": (
        "No byte moves while a request is held, nor before an answer's first token, nor before the end of one that "
        "is not streamed: longest hold + 2 x the longest answer that the policy allows."
    ),
    "access_log.[envoy.access_loggers.http_grpc]": (
        "One record to the service per request that was admitted, within milliseconds of its end however it ends: it "
        "carries the reservation and the usage, and settles the tenant's account. A few travel together; larger "
        "batches would be lost when a worker dies, for Envoy repeats no more than 64 KiB, its description of itself "
        "included."
    ),
    "access_log.[envoy.access_loggers.stdout]": "The line for people.",
    "http_filters": "Filters that authenticate go in front of ext_proc.",
    "grpc_service.retry_policy": (
        "A worker that stops or dies refuses an exchange; another one takes it. Another one indeed: a dead worker "
        "has no open streams and would be the least busy one again."
    ),
    "common_config.grpc_stream_retry_policy": (
        "The same for the log's own stream, whose records would be lost with the worker that it was open to."
    ),
    "failure_mode_allow": (
        "Fails closed all the same: routes into pools match on a header that only an admission sets. What it allows "
        "is that answers that are already streaming outlive the service."
    ),
    "processing_mode": (
        "Response trailers: they keep the exchange's stream open until the HTTP request is gone, however it ends, "
        "which is the lifetime of its lease. Response headers: asking for them would hide Envoy's own 400s."
    ),
    "message_timeout": (
        "The longest hold of the policy + counting its largest context (3 us a token) + 1.5 s, at least 5 s. The "
        "default of 200 ms turns every hold into a 504."
    ),
    "grpc_service.initial_metadata": (
        "Tells the service what message_timeout is below, so that it keeps nobody waiting until Envoy gives up."
    ),
    "max_message_timeout": "The service may ask for more time, once per message.",
    "metadata_options": (
        "What the service may write: its decision, and the address of the replica that it reserved."
    ),
    "forwarding_namespaces": "What the service may read: the metadata that names the tenant.",
    "mutation_rules": "Headers that an admission has no business with.",
    "http_filters.[envoy.filters.http.sse_to_metadata]": (
        "Usage is read out of answers here, so that no answer ever crosses the service. Envoy marks this filter as "
        "work in progress; it needs 1.38 or newer."
    ),
    "allow_content_types_regex": "The default is an exact match, and engines write the charset after it.",
    "local_reply_config": (
        "Envoy's own errors in the words of the service's contract; the service's refusals pass the first mapper "
        "unchanged."
    ),
    "[inference].request_body_buffer_limit": (
        "The policy's body limit; Envoy answers 413 above it. It needs a route to a cluster to act on, which is "
        "why undecided requests have one."
    ),
    "route_config.virtual_hosts": (
        "A request matches `unrouted` first; with the service's header it then matches a pool."
    ),
    "routes.[models]": "No admission, no GPU work; any pool of the policy can tell.",
    "routes.[unrouted]": (
        "Inference before it is decided, and what is never decided because the service is down: a cluster without "
        "hosts answers 503."
    ),
    "routes.[unrouted-without-output]": (
        "The same for answers that have no output to account for: megabytes of embeddings are not parsed."
    ),
    "routes.[unknown]": "Engines have more endpoints than inference; none of them is for clients.",
    "clusters.[extproc]": (
        "The service: one endpoint per worker process, so that single exchanges are balanced. Each open request is "
        "one request here: the breaker is 2 x (requests that can be admitted + requests that can wait)."
    ),
    "common_lb_config": "Never to workers that are known to be down, however many are.",
    "[extproc].health_checks": "A draining worker says NOT_SERVING and is left alone within two intervals.",
    "clusters.[unrouted]": "No hosts, on purpose.",
    "connection_keepalive": "The service allows these pings; a stock gRPC server would close the connection.",
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions.common_http_protocol_options": (
        "Shorter than the engines' own: whoever reuses a connection that is being closed gets an error."
    ),
    "load_balancing_policy": (
        "The replica that the reservation is held on; without one, or on a retry, the least busy one."
    ),
}
