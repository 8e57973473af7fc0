"""The shared vocabulary: configurations, states and messages as plain structs.

The services exchange these structs, and storage stores them. The public JSON forms are models of
the api. Times and durations are integer nanoseconds; -1 means unlimited.
"""

from typing import Final, Literal

import msgspec

Headers = dict[str, list[str]]
"""Message headers: name (case kept as stored) to its values, in order."""

AckKind = Literal["ack", "nak", "term", "in_progress"]
DeliverPolicy = Literal[
    "all", "last", "new", "by_start_sequence", "by_start_time", "last_per_subject"
]
AckPolicy = Literal["none", "all", "explicit"]
Retention = Literal["limits", "interest", "workqueue"]
Storage = Literal["file", "memory"]
Compression = Literal["none", "lz4", "zstd", "s2"]
Erasure = Literal["rewrite", "subject_key"]
Rollup = Literal["sub", "all"]
"""The messages that a message replaces: all earlier ones of its subject, or of the stream."""

AdvisoryType = Literal[
    "stream_action",
    "consumer_action",
    "max_deliver",
    "terminated",
    "nak",
    "server_out_of_space",
    "domain_leader_elected",
    "leader_elected",
    "leader_lost",
    "quorum_lost",
]
"""Kinds of events, under JetStream's names; the last three are about a group of a cluster."""

AdvisoryAction = Literal["create", "modify", "delete"]

# JetStream's defaults.
DUPLICATE_WINDOW_NS: Final = 120_000_000_000
ACK_WAIT_NS: Final = 30_000_000_000
MAX_ACK_PENDING: Final = 1_000
MAX_WAITING: Final = 512
INACTIVE_THRESHOLD_NS: Final = 5_000_000_000
PAYLOAD_BYTES_MAX: Final = 1 << 20
HEADER_BYTES_MAX: Final = 64 * 1024
BATCH_MESSAGES_MAX: Final = 10_000

# Headers with a meaning, as in JetStream.
MSG_ID: Final = "Nats-Msg-Id"
EXPECTED_STREAM: Final = "Nats-Expected-Stream"
EXPECTED_LAST_SEQ: Final = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_SUBJECT_SEQ: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_SUBJECT_SEQ_SUBJECT: Final = "Nats-Expected-Last-Subject-Sequence-Subject"
EXPECTED_LAST_MSG_ID: Final = "Nats-Expected-Last-Msg-Id"
ROLLUP: Final = "Nats-Rollup"
TTL: Final = "Nats-TTL"
MARKER_REASON: Final = "Nats-Marker-Reason"
MARKER_MAX_AGE: Final = "MaxAge"
KV_OPERATION: Final = "KV-Operation"

TTL_NEVER: Final = -1
"""A time to live without an end; the stream's ``max_age`` does not shorten it."""


class ConsumerLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults and upper limits that a stream sets for its consumers; 0 means none."""

    inactive_threshold_ns: int = 0
    max_ack_pending: int = 0


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stream's configuration (JetStream's field names and meanings).

    ``compression`` applies to blocks written from now on. JetStream's ``s2`` is kept in the
    configuration, but blocks are written with lz4, which has about the same speed and ratio.

    Three settings are not in JetStream. ``encrypted`` demands a node that encrypts its data; a node
    with a key encrypts every stream. For ``shards`` and ``shard_by`` see
    :mod:`contrail_common.partition`. If ``erasure`` is ``subject_key``, each subject's content is
    encrypted with a key of its own, and an erasure of the subject first destroys that key.
    """

    name: str
    description: str = ""
    subjects: tuple[str, ...] = ()
    retention: Retention = "limits"
    storage: Storage = "file"
    discard: Literal["old", "new"] = "old"
    max_msgs: int = -1
    max_bytes: int = -1
    max_age_ns: int = 0
    max_msgs_per_subject: int = -1
    discard_new_per_subject: bool = False
    max_msg_size: int = -1
    max_consumers: int = -1
    duplicate_window_ns: int = DUPLICATE_WINDOW_NS
    num_replicas: int = 1
    allow_direct: bool = False
    sealed: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    allow_rollup_hdrs: bool = False
    allow_atomic: bool = False
    allow_msg_ttl: bool = False
    subject_delete_marker_ttl_ns: int = 0
    compression: Compression = "none"
    first_seq: int = 1
    consumer_limits: ConsumerLimits = ConsumerLimits()
    metadata: dict[str, str] = {}
    encrypted: bool = False
    shards: int = 1
    shard_by: tuple[int, ...] = ()
    erasure: Erasure = "rewrite"


class ConsumerConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A consumer's configuration (JetStream's field names and meanings).

    ``opt_start_cursor`` replaces ``opt_start_seq`` if the stream has several shards. In a request,
    a ``max_ack_pending`` or ``inactive_threshold_ns`` of 0 means the stream's default, see
    :func:`contrail_common.config_rules.complete_consumer`. ``num_replicas`` (0: the stream's) and
    ``mem_storage`` are kept for clients that send them, but have no effect: a consumer is stored
    with its stream.
    """

    name: str
    durable: bool
    description: str = ""
    deliver_policy: DeliverPolicy = "all"
    opt_start_seq: int = 0
    opt_start_time_ns: int = 0
    ack_policy: AckPolicy = "explicit"
    ack_wait_ns: int = ACK_WAIT_NS
    max_deliver: int = -1
    backoff_ns: tuple[int, ...] = ()
    filter_subjects: tuple[str, ...] = ()
    max_waiting: int = MAX_WAITING
    max_ack_pending: int = MAX_ACK_PENDING
    max_batch: int = 0
    max_expires_ns: int = 0
    max_bytes: int = 0
    headers_only: bool = False
    inactive_threshold_ns: int = 0
    metadata: dict[str, str] = {}
    opt_start_cursor: str = ""
    num_replicas: int = 0
    mem_storage: bool = False


class StreamState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The current contents of a stream; ``*_ts_ns`` are 0 while there is no such message.

    ``leader`` is present for each shard of a stream whose shards are led by several nodes: it
    accepts the messages for the shard. It is empty while it is not known.
    """

    messages: int
    bytes: int
    first_seq: int
    first_ts_ns: int
    last_seq: int
    last_ts_ns: int
    num_subjects: int
    num_deleted: int
    consumer_count: int
    leader: str | None = None


class DataLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The last of ``times`` losses that were accepted, so that the rest of the stream is served.

    ``messages`` are known to be lost and count as deleted; ``ranges`` has the sequences (first and
    last) of the first of them. ``unknown``: the newest messages before ``accepted_ns`` may be lost
    too, and their sequences are used again.
    """

    accepted_ns: int
    reason: str
    unknown: bool
    messages: int = 0
    ranges: list[tuple[int, int]] = []
    times: int = 1


class Replica(msgspec.Struct, frozen=True):
    """A copy of a stream on a node that does not lead it.

    ``lag``: log entries that it is behind. ``current``: it is whole and was up to date lately.
    ``offline``: its node does not answer.
    """

    name: str
    current: bool
    offline: bool
    lag: int


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration, state and identity of a stream. ``version`` counts configuration changes.

    If the stream has several shards, ``shards`` has their states, and ``state`` their sum, with the
    lowest first sequence and time and the highest last ones.
    ``durability`` is the guarantee of its publish acks: ``memory``, ``fsync`` or ``quorum-fsync``.
    ``data_loss`` is damage whose loss was accepted. ``replicas`` are the other copies, as the
    leader sees them.
    """

    config: StreamConfig
    created_ns: int
    state: StreamState
    incarnation: str
    version: int
    leader: str
    shards: list[StreamState] = []
    durability: str = "fsync"
    data_loss: DataLoss | None = None
    replicas: list[Replica] = []


class SequencePair(msgspec.Struct, frozen=True):
    """A position of a consumer: its own sequence and the stream's."""

    consumer_seq: int
    stream_seq: int
    last_active_ns: int = 0


class ConsumerShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a consumer in one shard of a stream that has several."""

    shard: int
    delivered: SequencePair
    ack_floor: SequencePair
    num_ack_pending: int
    num_redelivered: int
    num_pending: int


class ConsumerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration and progress of a consumer.

    If the stream has several shards, numbers are sums over ``shards``, except stream sequences,
    which are the highest of them. ``push_bound``: a subscription is bound to it.
    """

    stream: str
    config: ConsumerConfig
    created_ns: int
    version: int
    delivered: SequencePair
    ack_floor: SequencePair
    num_ack_pending: int
    num_redelivered: int
    num_waiting: int
    num_pending: int
    shards: list[ConsumerShardInfo] = []
    push_bound: bool = False


class StoredMessage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One message as a reader sees it; ``shard`` is set if the stream has several."""

    seq: int
    subject: str
    time_ns: int
    headers: Headers | None
    payload: bytes
    shard: int | None = None


class Advisory(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event. Fields that do not belong to its type are empty.

    ``stream_seq`` to ``reason`` describe a delivery: the message, the consumer sequence of its
    first delivery, the number of deliveries, and the client's reason. ``server`` began or ceased to
    lead ``group``, for the cause in ``reason``. The node that sends the event sets ``id`` and
    ``time_ns``.
    """

    type: AdvisoryType
    id: str = ""
    time_ns: int = 0
    stream: str = ""
    consumer: str = ""
    action: AdvisoryAction | None = None
    stream_seq: int = 0
    consumer_seq: int = 0
    deliveries: int = 0
    reason: str = ""
    server: str = ""
    group: int | None = None


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """The ``number`` (from 1 on) that a producer gave to a batch, above that of its last one."""

    producer: str
    number: int


class Expected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The expectations of a publish about the stream; None means no expectation."""

    stream: str | None = None
    """Name of the stream that captures the subject."""
    last_seq: int | None = None
    """Last sequence of the stream."""
    last_subject_seq: int | None = None
    """Last sequence of the subject; 0 means that it has no messages."""
    last_subject_seq_subject: str | None = None
    """Subject or filter to which `last_subject_seq` applies. Default: the subject of the message.
    """
    last_msg_id: str | None = None
    """Id of the last message of the stream."""


class PublishMessage(msgspec.Struct, array_like=True, gc=False):
    """One message to publish; the first three fields are the msgpack batch item of the wire.

    ``headers`` is stored unchanged. The fields after the payload are its interpretation, which
    :func:`contrail_edge.inputs.message_items.interpret` sets before the message goes to a shard.
    """

    subject: str
    headers: Headers | None
    payload: bytes
    msg_id: str | None = None
    expected: Expected | None = None
    rollup: Rollup | None = None
    ttl_ns: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the message asks for nothing but to be stored."""
        return (
            not self.msg_id
            and self.expected is None
            and self.rollup is None
            and self.ttl_ns is None
        )
