"""A stream's configuration in JSON: what is accepted, what it becomes, how it is shown."""

from typing import Any, Final, Literal, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from contrail_api.fields import DurationNs, Int64, Metadata, RequestModel
from contrail_common import errors
from contrail_common.config_rules import StreamDraft
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import ConsumerLimits, StreamConfig, StreamInfo, StreamState
from contrail_common.timeunits import format_duration, format_time


class ConsumerLimitsBody(RequestModel):
    """Defaults and caps for the consumers of a stream; 0 sets none."""

    inactive_threshold: DurationNs = 0
    max_ack_pending: Int64 = 0


class StreamConfigBody(RequestModel):
    """A stream's configuration; an omitted field takes its default."""

    model_config = ConfigDict(
        title="StreamConfigBody",
        json_schema_extra={
            "examples": [{"name": "ORDERS", "subjects": ["orders.>"], "max_age": "7d"}]
        },
    )

    name: str = Field(default="", description="Name of the stream; on a PUT the path gives it.")
    description: str = ""
    subjects: list[str] = Field(
        default_factory=list, description="Subjects it captures; by default its name."
    )
    retention: Literal["limits", "interest", "workqueue"] = Field(
        default="limits",
        description="limits: messages go by limits alone; interest: also once all consumers that "
        "want them have settled them; workqueue: also once one consumer has.",
    )
    storage: Literal["file", "memory"] = Field(
        default="file",
        description="memory: messages and consumers are in no file, and gone after a restart, with "
        "a new incarnation of the stream; cannot be changed.",
    )
    discard: Literal["old", "new"] = "old"
    discard_new_per_subject: bool = False
    max_msgs: Int64 = -1
    max_bytes: Int64 = -1
    max_age: DurationNs = 0
    max_msgs_per_subject: Int64 = -1
    max_msg_size: Int64 = -1
    max_consumers: Int64 = -1
    duplicate_window: DurationNs = Field(
        default=0, description="0 is the default: 2m, at most max_age."
    )
    num_replicas: Int64 = 1
    placement: dict[str, Any] | None = None
    mirror: dict[str, Any] | None = None
    sources: list[dict[str, Any]] | None = None
    subject_transform: dict[str, Any] | None = None
    republish: dict[str, Any] | None = None
    allow_direct: bool = False
    sealed: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    allow_rollup_hdrs: bool = False
    compression: Literal["none", "lz4", "zstd", "s2"] = Field(
        default="none", description="Of blocks on disk, written from now on; s2 is stored as lz4."
    )
    first_seq: Int64 = Field(default=1, ge=0)
    consumer_limits: ConsumerLimitsBody | None = None
    metadata: Metadata = Field(default_factory=dict)
    allow_msg_ttl: bool = Field(
        default=False, description="Messages may have a Nats-TTL; cannot be turned off."
    )
    subject_delete_marker_ttl: DurationNs = Field(
        default=0,
        description="At least 1s: where the last message of a subject expires, a marker that lives "
        "so long takes its place. Turns on allow_msg_ttl and allow_rollup_hdrs.",
    )
    allow_atomic: bool = False
    allow_msg_schedules: bool = False
    allow_msg_counter: bool = False
    shards: Int64 = 1
    shard_by: list[Int64] | None = None
    encrypted: bool = Field(
        default=False, description="Refuse the stream unless the server encrypts what it stores."
    )


_DRAFT_KEYS: Final = {
    **{name: name for name in StreamDraft.__annotations__ if not name.endswith("_ns")},
    "max_age": "max_age_ns",
    "duplicate_window": "duplicate_window_ns",
    "subject_delete_marker_ttl": "subject_delete_marker_ttl_ns",
}
_ONLY_DEFAULT: Final = tuple(
    name for name in StreamConfigBody.model_fields if name not in _DRAFT_KEYS
)
"""Fields that JetStream clients send, and that may only stand at their default here."""


def stream_draft(body: StreamConfigBody) -> StreamDraft:
    """What ``body`` gives of the fields that a stream has here.

    Raises STREAM_CONFIG_INVALID for a field that may only stand at its default and does not.
    """
    for name in _ONLY_DEFAULT:
        if not stands_at_default(body, name):
            raise unavailable(errors.STREAM_CONFIG_INVALID, name)
    draft = {
        _DRAFT_KEYS[name]: getattr(body, name)
        for name in body.model_fields_set
        if name in _DRAFT_KEYS
    }
    if "subjects" in draft:
        draft["subjects"] = tuple(draft["subjects"])
    if "consumer_limits" in draft:
        limits = body.consumer_limits or ConsumerLimitsBody()
        draft["consumer_limits"] = ConsumerLimits(
            inactive_threshold_ns=limits.inactive_threshold, max_ack_pending=limits.max_ack_pending
        )
    return cast(StreamDraft, draft)


def stands_at_default(body: BaseModel, name: str) -> bool:
    """Whether a field means the same as when it is omitted."""
    value = getattr(body, name)
    if isinstance(value, BaseModel):
        return all(stands_at_default(value, inner) for inner in type(value).model_fields)
    default = type(body).model_fields[name].default
    unlimited = default == -1 and isinstance(value, int) and value <= 0
    return bool(value == default or unlimited or not (value or default))


def unavailable(spec: errors.ErrorSpec, name: str) -> ApiError:
    """The refusal of a feature that this version does not have."""
    message = "not available in this version: only the default is accepted"
    return ApiError(spec, f"{name}: {message}", [FieldProblem(f"/{name}", message)], applied=False)


class StreamConfigJson(msgspec.Struct, kw_only=True):
    """A stream's complete configuration."""

    name: str
    description: str
    subjects: tuple[str, ...]
    retention: str
    storage: str
    discard: str
    discard_new_per_subject: bool
    max_msgs: int
    max_bytes: int
    max_age: str
    max_msgs_per_subject: int
    max_msg_size: int
    max_consumers: int
    duplicate_window: str
    num_replicas: int
    placement: dict[str, Any] | None
    mirror: dict[str, Any] | None
    sources: list[dict[str, Any]]
    subject_transform: dict[str, Any] | None
    republish: dict[str, Any] | None
    allow_direct: bool
    sealed: bool
    deny_delete: bool
    deny_purge: bool
    allow_rollup_hdrs: bool
    compression: str
    first_seq: int
    consumer_limits: dict[str, str | int]
    metadata: dict[str, str]
    allow_msg_ttl: bool
    subject_delete_marker_ttl: str
    allow_atomic: bool
    allow_msg_schedules: bool
    allow_msg_counter: bool
    shards: int
    shard_by: list[int] | None
    encrypted: bool


class StreamStateJson(msgspec.Struct, kw_only=True):
    """What a stream holds; the times are null while it has held no message."""

    messages: int
    bytes: int
    first_seq: int
    first_ts: str | None
    last_seq: int
    last_ts: str | None
    num_subjects: int
    num_deleted: int
    consumer_count: int


class ReplicaJson(msgspec.Struct):
    """One more copy of a stream's data, and how far behind the leader it is."""

    name: str
    current: bool
    offline: bool
    lag: int


class ClusterJson(msgspec.Struct):
    """Where a stream lives."""

    leader: str
    replicas: list[ReplicaJson]


class StreamInfoJson(msgspec.Struct, kw_only=True):
    """A stream: configuration, state and whereabouts."""

    config: StreamConfigJson
    created: str
    state: StreamStateJson
    cluster: ClusterJson


class StreamPage(msgspec.Struct):
    """One page of streams."""

    items: list[StreamInfoJson]
    next_page_token: str | None


class Purged(msgspec.Struct):
    """How many messages a purge removed."""

    purged: int


def config_json(config: StreamConfig) -> StreamConfigJson:
    """The configuration as it is shown; sent back in a PUT it changes nothing."""
    return StreamConfigJson(
        name=config.name,
        description=config.description,
        subjects=config.subjects,
        retention=config.retention,
        storage=config.storage,
        discard=config.discard,
        discard_new_per_subject=config.discard_new_per_subject,
        max_msgs=config.max_msgs,
        max_bytes=config.max_bytes,
        max_age=format_duration(config.max_age_ns),
        max_msgs_per_subject=config.max_msgs_per_subject,
        max_msg_size=config.max_msg_size,
        max_consumers=config.max_consumers,
        duplicate_window=format_duration(config.duplicate_window_ns),
        num_replicas=config.num_replicas,
        placement=None,
        mirror=None,
        sources=[],
        subject_transform=None,
        republish=None,
        allow_direct=config.allow_direct,
        sealed=config.sealed,
        deny_delete=config.deny_delete,
        deny_purge=config.deny_purge,
        allow_rollup_hdrs=config.allow_rollup_hdrs,
        compression=config.compression,
        first_seq=config.first_seq,
        consumer_limits=_limits_json(config.consumer_limits),
        metadata=config.metadata,
        allow_msg_ttl=config.allow_msg_ttl,
        subject_delete_marker_ttl=format_duration(config.subject_delete_marker_ttl_ns),
        allow_atomic=config.allow_atomic,
        allow_msg_schedules=False,
        allow_msg_counter=False,
        shards=1,
        shard_by=None,
        encrypted=config.encrypted,
    )


def _limits_json(limits: ConsumerLimits) -> dict[str, str | int]:
    shown: dict[str, str | int] = {}
    if limits.inactive_threshold_ns:
        shown["inactive_threshold"] = format_duration(limits.inactive_threshold_ns)
    if limits.max_ack_pending:
        shown["max_ack_pending"] = limits.max_ack_pending
    return shown


def info_json(info: StreamInfo) -> StreamInfoJson:
    """A stream as it is shown."""
    return StreamInfoJson(
        config=config_json(info.config),
        created=format_time(info.created_ns),
        state=_state_json(info.state),
        cluster=ClusterJson(info.leader, []),
    )


def _state_json(state: StreamState) -> StreamStateJson:
    return StreamStateJson(
        messages=state.messages,
        bytes=state.bytes,
        first_seq=state.first_seq,
        first_ts=format_time(state.first_ts_ns) if state.first_ts_ns else None,
        last_seq=state.last_seq,
        last_ts=format_time(state.last_ts_ns) if state.last_ts_ns else None,
        num_subjects=state.num_subjects,
        num_deleted=state.num_deleted,
        consumer_count=state.consumer_count,
    )
