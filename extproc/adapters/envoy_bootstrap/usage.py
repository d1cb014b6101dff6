"""Filters that read token usage out of answers inside Envoy, so that no answer ever crosses this service.

Where an answer reports usage is known to the dialects; here their paths become Envoy's extraction rules. Envoy does
not know which dialect an answer has, so the rules of all dialects apply to every answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.content_parsers.json import v3 as json_parser
from envoy_data_plane.envoy.extensions.filters.http.header_to_metadata import v3 as header_to_metadata
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata import v3 as json_to_metadata
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata import v3 as sse_to_metadata
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.type.matcher import v3 as matcher

from extproc.adapters.envoy_bootstrap.rendering import packed
from extproc.adapters.envoy_names import USAGE_INPUT_TOKENS, USAGE_NAMESPACE, USAGE_OUTPUT_TOKENS
from extproc.dialects.reading import JsonPath, UsageField, UsagePaths

LARGEST_EVENT_BYTES = 1 << 20
"""A stream's last event may repeat the whole answer (Responses API); a larger one is passed on but not read."""

JSON_CONTENT_TYPE = r"(?i)application/json\s*(;.*)?"

STREAM_FILTER = "envoy.filters.http.sse_to_metadata"
BODY_FILTER = "envoy.filters.http.json_to_metadata"
HEADER_FILTER = "envoy.filters.http.header_to_metadata"
BODY_FILTERS = (STREAM_FILTER, BODY_FILTER)
"""The filters that parse bodies."""

Places = Callable[[UsageField], tuple[JsonPath, ...]]


def usage_filters(dialects: Iterable[UsagePaths]) -> list[hcm.HttpFilter]:
    """The filters that read usage for all `dialects`, in the order in which Envoy should have them."""
    usages = tuple(dialects)
    return [_stream_filter(usages), _body_filter(usages), *_header_filters(usages)]


def usage_keys(usages: Iterable[UsagePaths], places: Places) -> dict[JsonPath, str]:
    """The metadata key of each place where an answer may report a number, without repetition.

    Raises ValueError if two dialects give one place different meanings.
    """
    keys: dict[JsonPath, str] = {}
    for usage in usages:
        for side, fields in (
            (USAGE_INPUT_TOKENS, usage.input_fields),
            (USAGE_OUTPUT_TOKENS, usage.output_fields),
        ):
            for index, field in enumerate(fields, start=1):
                key = side if index == 1 else f"{side}_{index}"
                for path in places(field):
                    if keys.setdefault(path, key) != key:
                        raise ValueError(
                            f"usage path {'.'.join(path)} is both {keys[path]} and {key}: "
                            "give it the same position in the usage fields of every dialect"
                        )
    return keys


def _rules(keys: dict[JsonPath, str]) -> Iterator[json_to_metadata.JsonToMetadataRule]:
    for path, key in keys.items():
        yield json_to_metadata.JsonToMetadataRule(
            selectors=[json_to_metadata.JsonToMetadataSelector(key=segment) for segment in path],
            on_present=json_to_metadata.JsonToMetadataKeyValuePair(
                metadata_namespace=USAGE_NAMESPACE,
                key=key,
                type=json_to_metadata.JsonToMetadataValueType.NUMBER,
            ),
        )


def _stream_filter(usages: tuple[UsagePaths, ...]) -> hcm.HttpFilter:
    """Reads every event of an answer of type text/event-stream; the last number found stands."""
    parser = json_parser.JsonContentParser(
        rules=[
            json_parser.JsonContentParserRuleConfig(rule=rule)
            for rule in _rules(usage_keys(usages, lambda field: field.stream))
        ]
    )
    return hcm.HttpFilter(
        name=STREAM_FILTER,
        typed_config=packed(
            sse_to_metadata.SseToMetadata(
                response_rules=sse_to_metadata.SseToMetadataProcessingRules(
                    max_event_size=LARGEST_EVENT_BYTES,
                    content_parser=core.TypedExtensionConfig(
                        name="envoy.content_parsers.json", typed_config=packed(parser)
                    ),
                )
            )
        ),
    )


def _body_filter(usages: tuple[UsagePaths, ...]) -> hcm.HttpFilter:
    """Reads an answer of type application/json."""
    rules = list(_rules(usage_keys(usages, lambda field: field.body)))
    return hcm.HttpFilter(
        name=BODY_FILTER,
        typed_config=packed(
            json_to_metadata.JsonToMetadata(
                response_rules=json_to_metadata.JsonToMetadataMatchRules(
                    rules=rules,
                    # The default is an exact match, and engines write the charset after it.
                    allow_content_types_regex=matcher.RegexMatcher(regex=JSON_CONTENT_TYPE),
                )
            )
        ),
    )


def _header_filters(usages: tuple[UsagePaths, ...]) -> Iterator[hcm.HttpFilter]:
    """Reads the headers of engines that report usage there; nothing if no engine does."""
    keys: dict[str, str] = {}
    for usage in usages:
        if usage.input_header is not None:
            keys[usage.input_header] = USAGE_INPUT_TOKENS
        if usage.output_header is not None:
            keys[usage.output_header] = USAGE_OUTPUT_TOKENS
    if keys:
        rules = [
            header_to_metadata.ConfigRule(
                header=header,
                on_header_present=header_to_metadata.ConfigKeyValuePair(
                    metadata_namespace=USAGE_NAMESPACE,
                    key=key,
                    type=header_to_metadata.ConfigValueType.NUMBER,
                ),
            )
            for header, key in keys.items()
        ]
        yield hcm.HttpFilter(
            name=HEADER_FILTER,
            typed_config=packed(header_to_metadata.Config(response_rules=rules)),
        )
