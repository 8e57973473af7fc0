"""Streams in JSON, as answers show them, and how the OpenAPI document describes these answers."""

from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec

from contrail_api.changes import ETAG, LOCATION
from contrail_common import model
from contrail_common.model import (
    ConsumerLimits,
    DataLoss,
    Erasure,
    Retention,
    Storage,
    StreamConfig,
    StreamInfo,
    StreamState,
)
from contrail_common.timeunits import format_duration, format_time, parse_time
from contrail_edge.http.responses import Response, json_response
from contrail_edge.inputs.preconditions import etag
from contrail_edge.inputs.schema_marks import DurationText, TimeText, Unavailable
from contrail_edge.routing import AnswerDoc, BodyDoc, HeaderDoc

DURABILITY: Final = HeaderDoc(
    name="Durability",
    description="How durable an acknowledged message of the stream is: `memory`, `fsync` or "
    "`quorum-fsync`.",
    example="fsync",
)
COLLECTION: Final = "/v1/streams"


class ConsumerLimitsJson(msgspec.Struct):
    """Defaults and upper limits for the consumers of a stream. Those not set are absent."""

    inactive_threshold: DurationText | msgspec.UnsetType = msgspec.UNSET
    max_ack_pending: int | msgspec.UnsetType = msgspec.UNSET


class StreamConfigJson(msgspec.Struct, kw_only=True):
    """A stream's complete configuration."""

    name: str
    description: str
    subjects: tuple[str, ...]
    retention: Retention
    storage: Storage
    discard: Literal["old", "new"]
    discard_new_per_subject: bool
    max_msgs: int
    max_bytes: int
    max_age: DurationText
    max_msgs_per_subject: int
    max_msg_size: int
    max_consumers: int
    duplicate_window: DurationText
    num_replicas: int
    placement: Unavailable[dict[str, Any] | None]
    mirror: Unavailable[dict[str, Any] | None]
    sources: Unavailable[list[dict[str, Any]]]
    subject_transform: Unavailable[dict[str, Any] | None]
    republish: Unavailable[dict[str, Any] | None]
    allow_direct: bool
    sealed: bool
    deny_delete: bool
    deny_purge: bool
    allow_rollup_hdrs: bool
    compression: Literal["none", "lz4", "zstd", "s2"]
    first_seq: int
    consumer_limits: ConsumerLimitsJson
    metadata: dict[str, str]
    allow_msg_ttl: bool
    subject_delete_marker_ttl: DurationText
    allow_atomic: bool
    allow_msg_schedules: Unavailable[bool]
    allow_msg_counter: Unavailable[bool]
    shards: int
    shard_by: tuple[int, ...]
    encrypted: bool
    erasure: Erasure


class StreamStateJson(msgspec.Struct, kw_only=True):
    """The messages that a stream contains. The times are null until the first message is stored."""

    messages: int
    """Number of messages."""
    bytes: int
    """Size of all messages in bytes, payloads and headers."""
    first_seq: int
    """Sequence of the first message."""
    first_ts: TimeText | None
    """Time of the first message."""
    last_seq: int
    """Sequence of the last message."""
    last_ts: TimeText | None
    """Time of the last message."""
    num_subjects: int
    """Number of subjects that have messages."""
    num_deleted: int
    """Number of sequences between the first and the last message whose messages were removed."""
    consumer_count: int
    """Number of consumers."""
    leader: str | msgspec.UnsetType = msgspec.UNSET
    """Of a shard: name of the node that leads it. Present if several nodes lead the shards."""


class ReplicaJson(msgspec.Struct):
    """Another copy of a stream's data, and how far it lags behind the leader."""

    name: str
    """Name of the node."""
    current: bool
    """True if the copy is whole and has been up to date within the last 2 s."""
    offline: bool
    """True if the node does not answer the leader."""
    lag: int
    """Number of committed log entries that the copy is behind the leader."""


class ClusterJson(msgspec.Struct):
    """The nodes that store a stream."""

    leader: str
    """Name of the node that leads the stream."""
    replicas: list[ReplicaJson]
    """The other copies, as the leader sees them."""


class DataLossJson(msgspec.Struct):
    """Data loss that was accepted when the server was started with ``accept_data_loss``.

    The stream has accepted loss this many ``times``; the other fields describe the latest.
    ``messages`` counts the messages known to be lost. ``ranges`` lists the first ranges of their
    sequences, which count as deleted. If ``newest_may_be_missing`` is true, messages published
    shortly before ``accepted`` may also be lost, and new messages reuse their sequences.
    """

    accepted: TimeText
    """Time at which the loss was accepted."""
    reason: str
    """What was damaged."""
    newest_may_be_missing: bool
    """True if messages published shortly before `accepted` may also be lost."""
    messages: int
    """Number of messages known to be lost."""
    ranges: list[tuple[int, int]]
    """First ranges of lost sequences, each as its first and last sequence."""
    times: int
    """How often the stream has accepted loss."""


class StreamInfoJson(msgspec.Struct, kw_only=True):
    """A stream's configuration, state and location.

    For a stream with several shards, ``shards`` gives the state of each. ``state`` then has the
    sums over all shards, the lowest first sequence and time, and the highest last ones.
    """

    config: StreamConfigJson
    """The complete configuration."""
    created: TimeText
    """Time at which the stream was created."""
    state: StreamStateJson
    """The messages that the stream contains."""
    cluster: ClusterJson
    """The nodes that store the stream."""
    shards: list[StreamStateJson] | msgspec.UnsetType = msgspec.UNSET
    """State of each shard, if the stream has several."""
    data_loss: DataLossJson | msgspec.UnsetType = msgspec.UNSET
    """The latest accepted data loss, if there was any."""


class StreamPage(msgspec.Struct):
    """One page of streams."""

    items: list[StreamInfoJson]
    """The streams, by name."""
    next_page_token: str | None
    """Token of the next page; null on the last page."""


class SteppedDown(msgspec.Struct):
    """The node that leads a stream now."""

    leader: str
    """Name of the node."""


class Purged(msgspec.Struct):
    """The number of messages that a purge removed."""

    purged: int
    """Number of removed messages."""


def config_json(config: StreamConfig) -> StreamConfigJson:
    """Return the configuration for answers. Sent back in a PUT, it changes nothing."""
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
        # Fields of missing features are shown with their defaults, so that a client can send the
        # configuration back.
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
        shards=config.shards,
        shard_by=config.shard_by,
        encrypted=config.encrypted,
        erasure=config.erasure,
    )


def _limits_json(limits: ConsumerLimits) -> ConsumerLimitsJson:
    shown = ConsumerLimitsJson()
    if limits.inactive_threshold_ns:
        shown.inactive_threshold = format_duration(limits.inactive_threshold_ns)
    if limits.max_ack_pending:
        shown.max_ack_pending = limits.max_ack_pending
    return shown


def info_json(info: StreamInfo) -> StreamInfoJson:
    """Return a stream for answers."""
    return StreamInfoJson(
        config=config_json(info.config),
        created=format_time(info.created_ns),
        state=_state_json(info.state),
        cluster=ClusterJson(
            info.leader,
            [ReplicaJson(one.name, one.current, one.offline, one.lag) for one in info.replicas],
        ),
        shards=[_state_json(state) for state in info.shards] or msgspec.UNSET,
        data_loss=_loss_json(info.data_loss) if info.data_loss else msgspec.UNSET,
    )


def _loss_json(loss: DataLoss) -> DataLossJson:
    return DataLossJson(
        format_time(loss.accepted_ns),
        loss.reason,
        loss.unknown,
        loss.messages,
        loss.ranges,
        loss.times,
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
        leader=msgspec.UNSET if state.leader is None else state.leader,
    )


def info_response(info: StreamInfo, *, created: bool) -> Response:
    """Return a stream's info with its ETag and durability; 201 with its Location if it is new."""
    # The guarantee belongs to the stream, so a client can know it before the first publish.
    headers = [etag(info.version), (b"durability", info.durability.encode())]
    if created:
        location = f"{COLLECTION}/{quote(info.config.name, safe='')}"
        headers.append((b"location", location.encode()))
    return json_response(201 if created else 200, info_json(info), headers)


EXAMPLE: Final[Any] = msgspec.to_builtins(
    info_json(
        model.StreamInfo(
            config=model.StreamConfig(name="ORDERS", subjects=("orders.>",)),
            created_ns=parse_time("2026-01-31T08:00:00Z"),
            state=model.StreamState(
                messages=2,
                bytes=64,
                first_seq=1,
                first_ts_ns=parse_time("2026-01-31T08:01:00Z"),
                last_seq=2,
                last_ts_ns=parse_time("2026-01-31T08:02:00.5Z"),
                num_subjects=1,
                num_deleted=0,
                consumer_count=0,
            ),
            incarnation="",
            version=1,
            leader="n1",
        )
    )
)
_INFO: Final = {"application/json": BodyDoc(shape=StreamInfoJson, example=EXAMPLE)}
FOUND: Final = AnswerDoc(description="The stream.", content=_INFO, headers=(ETAG, DURABILITY))
CREATED: Final = AnswerDoc(
    description="The stream was created.", content=_INFO, headers=(ETAG, DURABILITY, LOCATION)
)
