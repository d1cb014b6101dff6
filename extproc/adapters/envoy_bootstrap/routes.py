"""Which requests go where: into a pool only with the header that an admission sets.

The service may be down without a request slipping past it, because the way to the engines does not exist for a
request that was not admitted. That is what makes it safe to let Envoy continue when the service fails, and so
to keep answers that are already streaming when it restarts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as AnyMessage
from envoy_data_plane.google.protobuf import Struct

from extproc.adapters.envoy_bootstrap.clusters import UNROUTED
from extproc.adapters.envoy_bootstrap.options import GatewayOptions
from extproc.adapters.envoy_bootstrap.rendering import duration, packed
from extproc.adapters.envoy_bootstrap.sizing import Sizing
from extproc.adapters.envoy_bootstrap.usage import BODY_FILTERS
from extproc.adapters.envoy_names import (
    ADMISSION_NAMESPACE,
    EXT_PROC_FILTER,
    FALLBACK_HEADER,
    LANE_HEADER,
    POOL_HEADER,
)
from extproc.dialects.reading import Dialect
from extproc.dialects.registry import DIALECTS
from extproc.domain.policy import Policy

UNROUTED_WITHOUT_OUTPUT = f"{UNROUTED}-without-output"

ANSWER_LIMIT_BYTES = 256 << 20
"""A route's buffer limit also bounds a plain JSON answer while its usage is read. The request's body has passed its
own, smaller limit by then."""

NOT_FOUND = {
    "error": {
        "message": "There is no such resource.",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
}


def routes(policy: Policy, options: GatewayOptions, sizing: Sizing) -> route.RouteConfiguration:
    """The route table, in the order in which Envoy tries it."""
    return route.RouteConfiguration(
        name="inference",
        virtual_hosts=[
            route.VirtualHost(
                name="inference",
                domains=["*"],
                # Envoy's own answer above this is a 413. It needs a `route:` to act on: see `unrouted` below.
                request_body_buffer_limit=sizing.body_limit_bytes,
                routes=[*_ungated(policy), *_gated(policy), *_unrouted(options.usage_filters), _unknown()],
            )
        ],
    )


def _ungated(policy: Policy) -> Iterator[route.Route]:
    """Requests that need no admission: liveness, and the list of models."""
    yield route.Route(
        name="healthz",
        match=route.RouteMatch(path="/healthz"),
        direct_response=route.DirectResponseAction(status=200, body=core.DataSource(inline_string="ok\n")),
        typed_per_filter_config=_without_admission(),
    )
    first_pool = next(iter(policy.pools.values()))
    yield route.Route(
        name="models",
        match=route.RouteMatch(path_separated_prefix="/v1/models", headers=[_method("GET")]),
        route=_to_cluster(first_pool.cluster),
        typed_per_filter_config=_without_admission(),
    )


def _gated(policy: Policy) -> Iterator[route.Route]:
    for pool in policy.pools.values():
        yield route.Route(
            name=f"pool-{pool.name}",
            match=route.RouteMatch(
                prefix="/",
                headers=[
                    route.HeaderMatcher(name=POOL_HEADER, string_match=matcher.StringMatcher(exact=pool.name))
                ],
            ),
            route=_to_cluster(pool.cluster),
            request_body_buffer_limit=ANSWER_LIMIT_BYTES,
            response_headers_to_add=[
                _told(LANE_HEADER, "lane"),
                _told(FALLBACK_HEADER, "fallback"),
            ],
        )


def _told(header: str, field: str) -> core.HeaderValueOption:
    """A field of the decision for the client; no header where the decision has no such field."""
    return core.HeaderValueOption(
        header=core.HeaderValue(key=header, value=f"%DYNAMIC_METADATA({ADMISSION_NAMESPACE}:{field})%"),
        append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _unrouted(usage_filters: bool) -> Iterator[route.Route]:
    """What an inference request matches before it is decided, and what one matches that never is: 503.

    A direct response would say the same, but has no body limit: bodies would be cut at the connection's buffer.
    """
    dialects: dict[str, list[Dialect]] = {UNROUTED: list(DIALECTS)}
    if usage_filters:
        # Which filters a request gets is settled by its first route. An answer without output, such as a megabyte
        # of embeddings, teaches nothing that was not counted before: parsing it would stall Envoy's other streams.
        dialects = {
            UNROUTED: [dialect for dialect in DIALECTS if dialect.usage.output_fields],
            UNROUTED_WITHOUT_OUTPUT: [dialect for dialect in DIALECTS if not dialect.usage.output_fields],
        }
    off = packed(route.FilterConfig(disabled=True))
    for name, served in dialects.items():
        yield route.Route(
            name=name,
            match=route.RouteMatch(
                safe_regex=matcher.RegexMatcher(regex=inference_paths(served)), headers=[_method("POST")]
            ),
            route=route.RouteAction(cluster=UNROUTED, timeout=duration(0)),
            typed_per_filter_config=(
                dict.fromkeys(BODY_FILTERS, off) if name == UNROUTED_WITHOUT_OUTPUT else {}
            ),
        )


def inference_paths(dialects: Iterable[Dialect]) -> str:
    """The regular expression of the paths that `dialects` serve: their paths after any prefix, or exact ones.

    Spellings with percent escapes do not match: nothing that is not admitted reaches an engine, so they may.
    """
    anywhere: list[str] = []
    exact: list[str] = []
    for dialect in dialects:
        anywhere.extend(re.escape(path).replace(r"\*", "[^/]+") for path in dialect.paths)
        exact.extend(re.escape(path) for path in dialect.exact_paths)
    return "|".join([f"(?:/.*)?(?:{'|'.join(anywhere)})", *exact])


def _unknown() -> route.Route:
    """Everything else ends here, instead of exploring the engines' other endpoints or being told to try again."""
    return route.Route(
        name="unknown",
        match=route.RouteMatch(prefix="/"),
        direct_response=route.DirectResponseAction(
            status=404,
            body_format=core.SubstitutionFormatString(json_format=Struct.from_dict(NOT_FOUND)),
        ),
        typed_per_filter_config=_without_admission(),
    )


def _to_cluster(name: str) -> route.RouteAction:
    return route.RouteAction(
        cluster=name,
        timeout=duration(0),  # an answer may take as long as it takes; silence is bounded by the idle timeout
        retry_policy=route.RetryPolicy(
            # Only failures before the engine can have seen the request: work is never done twice.
            retry_on="connect-failure,refused-stream,reset-before-request",
            num_retries=1,
            # The fallback of the pool's balancer does not know by itself which replica has just failed.
            retry_host_predicate=[
                route.RetryPolicyRetryHostPredicate(
                    name="envoy.retry_host_predicates.previous_hosts",
                    typed_config=packed(PreviousHostsPredicate()),
                )
            ],
            # Each attempt is a random pick: of two replicas, the one that failed is picked half of the time.
            host_selection_retry_max_attempts=32,
        ),
    )


def _method(name: str) -> route.HeaderMatcher:
    return route.HeaderMatcher(name=":method", string_match=matcher.StringMatcher(exact=name))


def _without_admission() -> dict[str, AnyMessage]:
    return {EXT_PROC_FILTER: packed(ext_proc.ExtProcPerRoute(disabled=True))}
