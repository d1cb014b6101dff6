"""Envoy's own error answers, worded like the service's, so that a client sees one contract whoever refuses.

Envoy answers by itself when the service or a replica cannot be reached, when nothing moved for too long, and when
a body outgrows its buffer. Its plain-text 504 and 503 without Retry-After are what client SDKs retry at once.
The service's own refusals are local replies too, but carry their decision in dynamic metadata: they pass unchanged.
"""

from __future__ import annotations

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Struct

from extproc.adapters.envoy_names import ADMISSION_NAMESPACE
from extproc.domain.contract import CONTRACT, Retry
from extproc.domain.outcome import Reason

RETRY_AFTER_S = 2
"""Longer than a worker takes to come back or Envoy takes to notice that another one is there."""

_UNREACHABLE_FLAGS = ["UH", "UF", "UO", "UC", "UT", "LH", "LR", "UR", "NR", "NC", "URX", "SI", "DO", "OM"]
"""Response flags of answers that Envoy made because it could not get one: hosts, connections, breakers, timeouts."""


def local_replies() -> hcm.LocalReplyConfig:
    """Rewrites Envoy's own 413, 500, 502, 503 and 504; everything else stays as it is."""
    return hcm.LocalReplyConfig(
        mappers=[
            # The first mapper that matches is the only one: this one changes nothing.
            hcm.ResponseMapper(filter=_refused_by_the_service()),
            _mapper(
                Reason.BODY_TOO_LARGE,
                "The request body is larger than this gateway accepts.",
                _status(accesslog.ComparisonFilterOp.EQ, 413),
            ),
            _mapper(
                Reason.NO_CAPACITY,
                "The request could not be served: no admission service or engine answered. Try again later.",
                accesslog.AccessLogFilter(
                    response_flag_filter=accesslog.ResponseFlagFilter(flags=_UNREACHABLE_FLAGS)
                ),
            ),
            _mapper(
                Reason.INTERNAL_ERROR,
                "The gateway failed to handle the request. Try again later.",
                _status(accesslog.ComparisonFilterOp.GE, 500),
            ),
        ]
    )


def _mapper(reason: Reason, message: str, condition: accesslog.AccessLogFilter) -> hcm.ResponseMapper:
    """One row of the client contract, in a body that OpenAI's and Anthropic's clients both understand."""
    row = CONTRACT[reason]
    headers = {"x-admission-reason": str(reason)}
    if row.retry is Retry.LATER:
        headers["retry-after"] = str(RETRY_AFTER_S)
    else:
        headers["x-should-retry"] = "false"
    error = {
        "message": message,
        "type": row.openai_type,
        "param": None,
        "code": str(reason),
    }
    body = {"type": "error", "error": error, "request_id": "%REQ(X-REQUEST-ID)%"}
    return hcm.ResponseMapper(
        filter=condition,
        status_code=row.status,
        body_format_override=core.SubstitutionFormatString(json_format=Struct.from_dict(body)),
        headers_to_add=[
            core.HeaderValueOption(
                header=core.HeaderValue(key=key, value=value),
                append_action=core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for key, value in headers.items()
        ],
    )


def _status(op: accesslog.ComparisonFilterOp, status: int) -> accesslog.AccessLogFilter:
    return accesslog.AccessLogFilter(
        status_code_filter=accesslog.StatusCodeFilter(
            comparison=accesslog.ComparisonFilter(
                op=op,
                # Envoy insists on a runtime key by which the value could be overridden; nobody sets this one.
                value=core.RuntimeUInt32(default_value=status, runtime_key="extproc.local_reply_status"),
            )
        )
    )


def _refused_by_the_service() -> accesslog.AccessLogFilter:
    """The decision in the request's metadata has a reason, which only refusals have."""
    return accesslog.AccessLogFilter(
        metadata_filter=accesslog.MetadataFilter(
            matcher=matcher.MetadataMatcher(
                filter=ADMISSION_NAMESPACE,
                path=[matcher.MetadataMatcherPathSegment(key="reason")],
                value=matcher.ValueMatcher(present_match=True),
            ),
            match_if_key_not_found=False,
        )
    )
