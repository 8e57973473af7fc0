"""Configurations: dictionaries with the API's field names, typed for checkers and editors."""

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from contrail_client.times import Duration, Time


class ConsumerLimits(TypedDict, total=False):
    """Defaults and caps of a stream for its consumers."""

    inactive_threshold: Duration
    max_ack_pending: int


class StreamConfig(TypedDict, total=False):
    """Fields of a stream's configuration; the server has the defaults."""

    name: str
    description: str
    subjects: list[str]
    retention: Literal["limits", "interest", "workqueue"]
    storage: Literal["file", "memory"]
    discard: Literal["old", "new"]
    max_msgs: int
    max_bytes: int
    max_age: Duration
    max_msgs_per_subject: int
    discard_new_per_subject: bool
    max_msg_size: int
    max_consumers: int
    duplicate_window: Duration
    num_replicas: int
    allow_direct: bool
    deny_delete: bool
    deny_purge: bool
    allow_rollup_hdrs: bool
    allow_atomic: bool
    allow_msg_ttl: bool
    subject_delete_marker_ttl: Duration
    compression: Literal["none", "lz4", "zstd", "s2"]
    first_seq: int
    consumer_limits: ConsumerLimits
    metadata: dict[str, str]
    sealed: bool
    allow_msg_schedules: bool
    allow_msg_counter: bool
    placement: dict[str, Any] | None
    mirror: dict[str, Any] | None
    sources: list[dict[str, Any]]
    subject_transform: dict[str, Any] | None
    republish: dict[str, Any] | None
    encrypted: bool
    shards: int
    shard_by: list[int]
    erasure: Literal["rewrite", "subject_key"]


class ConsumerConfig(TypedDict, total=False):
    """Fields of a consumer's configuration; the server has the defaults."""

    name: str
    durable_name: str | None
    description: str
    deliver_policy: Literal[
        "all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"
    ]
    opt_start_seq: int
    opt_start_time: Time | None
    ack_policy: Literal["none", "all", "explicit"]
    ack_wait: Duration
    max_deliver: int
    backoff: list[Duration]
    filter_subject: str | None
    filter_subjects: list[str]
    replay_policy: Literal["instant", "original"]
    rate_limit_bps: int
    sample_freq: str
    max_waiting: int
    max_ack_pending: int
    max_batch: int
    max_expires: Duration
    max_bytes: int
    headers_only: bool
    inactive_threshold: Duration
    num_replicas: int
    mem_storage: bool
    pause_until: Time | None
    priority_groups: list[str]
    priority_policy: Literal["none", "overflow", "pinned_client", "prioritized"]
    metadata: dict[str, str]
    dead_letter: dict[str, Any] | None
    ordered_by: str | int | None
    replay_speed: str | int | None


if TYPE_CHECKING:
    ShownStreamConfig = StreamConfig
    ShownConsumerConfig = ConsumerConfig
else:
    # Plain dictionaries keep the fields that only a newer server has.
    ShownStreamConfig = ShownConsumerConfig = dict[str, Any]
