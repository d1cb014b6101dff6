from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Decision(_message.Message):
    __slots__ = ("schema_version", "reservation", "decision", "reason", "tenant", "tier", "model", "dialect", "lane", "pool", "replica", "input_tokens", "output_tokens", "reserved_tokens", "work_units", "predicted_ttft_ms", "waited_ms", "retry_after_ms", "fallback", "policy_version", "deadline_ms")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORK_UNITS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    reservation: str
    decision: str
    reason: str
    tenant: str
    tier: str
    model: str
    dialect: str
    lane: str
    pool: str
    replica: str
    input_tokens: int
    output_tokens: int
    reserved_tokens: int
    work_units: int
    predicted_ttft_ms: int
    waited_ms: int
    retry_after_ms: int
    fallback: str
    policy_version: str
    deadline_ms: int
    def __init__(self, schema_version: _Optional[int] = ..., reservation: _Optional[str] = ..., decision: _Optional[str] = ..., reason: _Optional[str] = ..., tenant: _Optional[str] = ..., tier: _Optional[str] = ..., model: _Optional[str] = ..., dialect: _Optional[str] = ..., lane: _Optional[str] = ..., pool: _Optional[str] = ..., replica: _Optional[str] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., reserved_tokens: _Optional[int] = ..., work_units: _Optional[int] = ..., predicted_ttft_ms: _Optional[int] = ..., waited_ms: _Optional[int] = ..., retry_after_ms: _Optional[int] = ..., fallback: _Optional[str] = ..., policy_version: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...
