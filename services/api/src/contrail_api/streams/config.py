"""A stream's configuration in JSON as requests send it, and its conversion."""

from typing import Any, Final, Literal, cast

from pydantic import ConfigDict, Field

from contrail_api.fields import (
    DurationNs,
    Int64,
    Metadata,
    Name,
    RequestModel,
    Unavailable,
    stands_at_default,
    unavailable,
    unavailable_fields,
)
from contrail_common import errors
from contrail_common.config_rules import StreamDraft
from contrail_common.model import ConsumerLimits, Erasure


class ConsumerLimitsBody(RequestModel):
    """Defaults and upper limits for the consumers of a stream. 0 means none."""

    inactive_threshold: DurationNs = 0
    """Default and maximum of `inactive_threshold`."""
    max_ack_pending: Int64 = 0
    """Default and maximum of `max_ack_pending`."""


class StreamConfigBody(RequestModel):
    """A stream's configuration. Omitted fields take their defaults."""

    model_config = ConfigDict(
        title="StreamConfigBody",
        json_schema_extra={
            "examples": [{"name": "ORDERS", "subjects": ["orders.>"], "max_age": "7d"}]
        },
    )

    name: Name = Field(
        default="", description="Name of the stream. With PUT it comes from the path."
    )
    description: str = ""
    """Text of your own."""
    subjects: list[str] = Field(
        default_factory=list,
        description="Subjects that the stream captures. Default: the stream's name.",
    )
    retention: Literal["limits", "interest", "workqueue"] = Field(
        default="limits",
        description="When messages are removed. `limits`: only when a limit is reached. "
        "`interest`: also once every consumer whose filter matches has acknowledged or "
        "terminated the message. `workqueue`: also once one consumer has.",
    )
    storage: Literal["file", "memory"] = Field(
        default="file",
        description="`memory`: messages and consumers are never written to disk. A restart loses "
        "them and gives the stream a new incarnation. Cannot be changed.",
    )
    discard: Literal["old", "new"] = "old"
    """What happens at a limit. `old`: the oldest messages are removed. `new`: new messages are
    refused with 507."""
    discard_new_per_subject: bool = False
    """With `discard: new`, also refuse messages at `max_msgs_per_subject`."""
    max_msgs: Int64 = -1
    """Maximum number of messages; -1 means no limit."""
    max_bytes: Int64 = -1
    """Maximum size of all messages in bytes; -1 means no limit."""
    max_age: DurationNs = 0
    """Messages are removed when they are older than this; 0s means never."""
    max_msgs_per_subject: Int64 = -1
    """Maximum number of messages of each subject; -1 means no limit."""
    max_msg_size: Int64 = -1
    """Maximum size of a message in bytes, payload and headers; -1 means no limit."""
    max_consumers: Int64 = -1
    """Maximum number of consumers; -1 means no limit."""
    duplicate_window: DurationNs = Field(
        default=0,
        description="How long message ids are remembered to detect duplicates. 0 means the "
        "default: 2m, or max_age if that is shorter.",
    )
    num_replicas: Int64 = 1
    """Number of nodes that store the stream. More than 1 requires a cluster."""
    placement: Unavailable[dict[str, Any] | None] = None
    mirror: Unavailable[dict[str, Any] | None] = None
    sources: Unavailable[list[dict[str, Any]] | None] = None
    subject_transform: Unavailable[dict[str, Any] | None] = None
    republish: Unavailable[dict[str, Any] | None] = None
    allow_direct: bool = False
    """Accepted and returned for JetStream compatibility, but has no effect."""
    sealed: bool = False
    """True once the stream is read-only. It cannot be made writable again."""
    deny_delete: bool = False
    """Refuse to delete or erase single messages. Cannot be disabled once enabled."""
    deny_purge: bool = False
    """Refuse to purge the stream. Cannot be disabled once enabled."""
    allow_rollup_hdrs: bool = False
    """Allow messages to replace earlier ones with Nats-Rollup."""
    compression: Literal["none", "lz4", "zstd", "s2"] = Field(
        default="none",
        description="Compression of new blocks on disk. `s2` is accepted for JetStream "
        "compatibility; its blocks are written as lz4.",
    )
    first_seq: Int64 = Field(default=1, ge=0)
    """Sequence of the first message. Cannot be changed."""
    consumer_limits: ConsumerLimitsBody | None = None
    """Defaults and upper limits for the consumers of the stream."""
    metadata: Metadata = Field(default_factory=dict)
    """Names and values of your own."""
    allow_msg_ttl: bool = Field(
        default=False,
        description="Allow messages to set a TTL with Nats-TTL. Cannot be disabled once enabled.",
    )
    subject_delete_marker_ttl: DurationNs = Field(
        default=0,
        description="If set (at least 1s), a delete marker is stored when the last message of a "
        "subject expires. The marker itself expires after this time. Enables "
        "allow_msg_ttl and allow_rollup_hdrs.",
    )
    allow_atomic: bool = False
    """Allow atomic batches."""
    allow_msg_schedules: Unavailable[bool] = False
    allow_msg_counter: Unavailable[bool] = False
    shards: Int64 = Field(
        default=1,
        description="Number of shards, 1 to 64. Messages are distributed among shards by subject. "
        "Cannot be changed.",
    )
    shard_by: list[Int64] | None = Field(
        default=None,
        description="Positions (from 1) of the subject tokens that select the shard. Default: the "
        "whole subject.",
    )
    encrypted: bool = Field(
        default=False,
        description="Refuse to create the stream unless the server encrypts stored data.",
    )
    erasure: Erasure = Field(
        default="rewrite",
        description="`subject_key` encrypts the messages of each subject with a key of its own. "
        "Erasing a subject destroys its key, which makes every copy of its messages "
        "unreadable, wherever it is. Requires file storage and no compression. "
        "Cannot be changed.",
    )


_DRAFT_KEYS: Final = {
    **{name: name for name in StreamDraft.__annotations__ if not name.endswith("_ns")},
    "max_age": "max_age_ns",
    "duplicate_window": "duplicate_window_ns",
    "subject_delete_marker_ttl": "subject_delete_marker_ttl_ns",
}
_ONLY_DEFAULT: Final = unavailable_fields(StreamConfigBody)


def stream_draft(body: StreamConfigBody) -> StreamDraft:
    """Return the fields that ``body`` sets.

    Raises STREAM_CONFIG_INVALID for an unavailable field that does not have its default.
    """
    for name in _ONLY_DEFAULT:
        if not stands_at_default(body, name):
            raise unavailable(errors.STREAM_CONFIG_INVALID, name)
    # Only given fields: pedantic mode treats a given value differently from a default.
    draft = {
        _DRAFT_KEYS[name]: getattr(body, name)
        for name in body.model_fields_set
        if name in _DRAFT_KEYS
    }
    if "subjects" in draft:
        draft["subjects"] = tuple(draft["subjects"])
    if "shard_by" in draft:
        draft["shard_by"] = tuple(draft["shard_by"] or ())
    if "consumer_limits" in draft:
        limits = body.consumer_limits or ConsumerLimitsBody()
        draft["consumer_limits"] = ConsumerLimits(
            inactive_threshold_ns=limits.inactive_threshold, max_ack_pending=limits.max_ack_pending
        )
    return cast(StreamDraft, draft)
