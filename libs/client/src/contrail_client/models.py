"""The values that methods of the client take and return: plain, frozen and typed.

They are msgspec structs, decoded directly from the bytes of an answer. That is several times faster
than frozen dataclasses, which would have to be filled from another object.

Times are the RFC 3339 texts of the API, with nanoseconds. Each also has a property that returns a
`datetime`, which has microseconds, and messages have `time_ns`. Durations are texts such as
`"30s"`; `to_timedelta` converts them, and wherever one is expected a `timedelta` is accepted.
Configurations are dictionaries with the field names of the API.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import force_setattr

from contrail_client.configs import ShownConsumerConfig, ShownStreamConfig
from contrail_client.errors import ApiProblem
from contrail_client.tables import to_pandas
from contrail_client.times import duration_text, parse_time_ns, to_datetime

Consistency = Literal["leader", "any"]
"""Which replica answers a read: the leader of the stream, or any that is at most 10 s behind."""

Headers = Mapping[str, str | Sequence[str]]
"""Headers to publish: each name has one value, or a list of values."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of a publish. If one does not hold, the message is refused with status 412."""

    stream: str | None = None
    last_seq: int | None = None
    last_subject_seq: int | None = None
    last_subject_seq_subject: str | None = None
    last_msg_id: str | None = None


class Message(msgspec.Struct, frozen=True):
    """A message to publish. Raises TypeError if a value has the wrong type.

    `payload` is bytes, or text that is stored as UTF-8. A header has one value (`str`) or several
    (a list of `str`). A message with `msg_id` is stored once within the stream's duplicate window;
    so the client may repeat a publish whose outcome is unknown. `ttl` is the time to live, for
    streams with `allow_msg_ttl`: at least 1 s, as a text ("90" for seconds, "1h30m"), a `timedelta`
    or "never".
    """

    subject: str
    payload: bytes | str = b""
    headers: Headers | None = None
    msg_id: str | None = None
    expected: Expected | None = None
    ttl: str | timedelta | None = None

    def __post_init__(self) -> None:
        _check_text("subject", self.subject)
        # Views and byte arrays may change later, while the message waits to be sent.
        if type(self.payload) is not bytes and not isinstance(self.payload, str):
            force_setattr(self, "payload", _payload(self.payload))
        if self.headers is not None:
            force_setattr(self, "headers", _headers(self.headers))
        if self.msg_id is not None:
            _check_text("msg_id", self.msg_id)
        if isinstance(self.ttl, timedelta):
            force_setattr(self, "ttl", duration_text(self.ttl))
        elif self.ttl is not None:
            _check_text("ttl", self.ttl)
        if self.expected is not None and not isinstance(self.expected, Expected):
            raise TypeError(f"expected must be an Expected, not {_kind(self.expected)}")


def _check_text(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {_kind(value)}")


def _payload(value: object) -> bytes:
    """Copy a payload that is not exactly `bytes` or a `str`, so that it cannot change later."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(
        f"payload must be bytes or a str, not {_kind(value)}; encode it first, "
        "for example with json.dumps"
    )


def _headers(headers: object) -> dict[str, list[str]]:
    """Headers with a list of values for each name. A `str` is one value, not a sequence."""
    if not isinstance(headers, Mapping):
        raise TypeError(f"headers must be a dict of names to values, not {_kind(headers)}")
    found: dict[str, list[str]] = {}
    for name, value in headers.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a header must be a str, not {_kind(name)}: {name!r}")
        values = [value] if isinstance(value, str) else value
        # Bytes are a sequence too, of integers.
        if isinstance(values, bytes | bytearray) or not isinstance(values, Sequence):
            raise TypeError(f"header {name} must be a str or a list of str, not {_kind(value)}")
        if not values:
            raise ValueError(f"header {name} has no value: give it one, or leave it out")
        for each in values:
            if not isinstance(each, str):
                raise TypeError(f"header {name} must be a list of str, but holds {_kind(each)}")
        found[name] = list(values)
    return found


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


class PubAck(msgspec.Struct, frozen=True):
    """The message is stored at `seq`; if it is a `duplicate`, it was stored there before.

    `durability` is the guarantee of the ack: `memory`, `fsync` or `quorum-fsync`.
    """

    stream: str
    seq: int
    duplicate: bool = False
    durability: str = ""
    shard: int | None = None


class BatchResult(msgspec.Struct, frozen=True):
    """One result for each message of a batch, in order: an ack or a refusal."""

    results: tuple[PubAck | ApiProblem, ...]

    @property
    def refused(self) -> dict[int, ApiProblem]:
        """The refusals, by position in the batch."""
        return {
            position: result
            for position, result in enumerate(self.results)
            if isinstance(result, ApiProblem)
        }

    def raise_refused(self) -> None:
        """Raise the first refusal, if there is one."""
        for problem in self.refused.values():
            raise problem


class AtomicAck(msgspec.Struct, frozen=True):
    """All messages of an atomic batch are stored, with consecutive sequences."""

    stream: str
    first_seq: int
    last_seq: int
    count: int
    shard: int | None = None


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored message, as in the JSON of the API.

    The payload is in `data` if it is UTF-8 text, otherwise in `data_base64`. `payload` returns it
    as bytes.
    """

    stream: str
    seq: int
    subject: str
    time: str
    headers: dict[str, list[str]] = {}
    data: str | None = None
    data_base64: bytes | None = None
    shard: int | None = None

    @property
    def payload(self) -> bytes:
        """The payload as it was published."""
        if self.data_base64 is not None:
            return self.data_base64
        return (self.data or "").encode()

    @property
    def stored_at(self) -> datetime:
        """When it was stored."""
        return to_datetime(self.time)

    @property
    def time_ns(self) -> int:
        """When it was stored, in nanoseconds since the epoch."""
        return parse_time_ns(self.time)


class Delivery(StoredMessage, frozen=True, kw_only=True):
    """A delivery of a consumer; `num_pending` messages follow it."""

    consumer_seq: int
    num_delivered: int
    num_pending: int
    ack_token: str


D = TypeVar("D", bound=Delivery)


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """A message that came over a WebSocket: as `Delivery`, with the payload as bytes in `data`.

    `ack_token` is empty if the message needs no acknowledgement.
    """

    stream: str
    seq: int
    subject: str
    time: str
    data: bytes
    headers: dict[str, list[str]] = {}
    consumer_seq: int = 0
    num_delivered: int = 1
    num_pending: int = 0
    ack_token: str = ""
    shard: int | None = None

    @property
    def place(self) -> int:
        """A number that identifies the message in its stream: `place_of` its shard and sequence."""
        return place_of(self.shard, self.seq)

    @property
    def payload(self) -> bytes:
        """The payload as it was published."""
        return self.data

    @property
    def stored_at(self) -> datetime:
        """When it was stored."""
        return to_datetime(self.time)

    @property
    def time_ns(self) -> int:
        """When it was stored, in nanoseconds since the epoch."""
        return parse_time_ns(self.time)

    @property
    def size(self) -> int:
        """Bytes that count for credit: subject, payload, and name, value and 4 for each header."""
        size = len(self.subject.encode()) + len(self.data)
        for name, values in self.headers.items():
            size += sum(len(name.encode()) + len(value.encode()) + 4 for value in values)
        return size


class MessageFacts:
    """The base of messages with methods to acknowledge them: the fields of a delivery."""

    __slots__ = ("delivered",)

    def __init__(self, delivered: Delivered) -> None:
        self.delivered = delivered

    @property
    def stream(self) -> str:
        """The stream of the message."""
        return self.delivered.stream

    @property
    def seq(self) -> int:
        """Its sequence in the stream."""
        return self.delivered.seq

    @property
    def shard(self) -> int | None:
        """The shard of the sequence; None if the stream has only one."""
        return self.delivered.shard

    @property
    def subject(self) -> str:
        """The subject it was published to."""
        return self.delivered.subject

    @property
    def payload(self) -> bytes:
        """The payload as it was published."""
        return self.delivered.data

    @property
    def headers(self) -> dict[str, list[str]]:
        """Its headers."""
        return self.delivered.headers

    @property
    def time(self) -> str:
        """When it was stored (RFC 3339)."""
        return self.delivered.time

    @property
    def stored_at(self) -> datetime:
        """When it was stored."""
        return to_datetime(self.time)

    @property
    def time_ns(self) -> int:
        """When it was stored, in nanoseconds since the epoch."""
        return self.delivered.time_ns

    @property
    def num_delivered(self) -> int:
        """The number of deliveries of the message, including this one."""
        return self.delivered.num_delivered

    @property
    def num_pending(self) -> int:
        """The number of messages that follow it."""
        return self.delivered.num_pending


class Gap(msgspec.Struct, frozen=True):
    """Sequences `first` to `last` of a stream were removed before an ordered reader read them.

    `shard` is their shard if the stream has several.
    """

    first: int
    last: int
    cause: str
    shard: int | None = None


class Pull(msgspec.Struct, Generic[D], frozen=True):
    """The answer to a pull: a sequence of messages, empty if none came in time."""

    messages: tuple[D, ...] = ()
    num_pending: int = 0

    def to_pandas(self) -> Any:
        """The messages as a `pandas.DataFrame`; see `tables.to_pandas`."""
        return to_pandas(self.messages)

    def __iter__(self) -> Iterator[D]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)


class Range(msgspec.Struct, frozen=True):
    """A part of a stream. To continue, read from `next_seq`; `num_pending` messages follow.

    If several shards were read together, read from `cursor` to continue; `next_seq` is 0. With
    `consistency="any"`, it has everything that was acknowledged up to `staleness_ms` ago.
    """

    messages: tuple[StoredMessage, ...]
    next_seq: int = 0
    num_pending: int = 0
    cursor: str | None = None
    staleness_ms: int | None = None

    def to_pandas(self) -> Any:
        """The messages as a `pandas.DataFrame`; see `tables.to_pandas`."""
        return to_pandas(self.messages)


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a stream; the times are None while it has no message."""

    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    first_ts: str | None = None
    last_ts: str | None = None
    num_subjects: int = 0
    num_deleted: int = 0
    consumer_count: int = 0

    @property
    def first_at(self) -> datetime | None:
        """When the first message was stored."""
        return None if self.first_ts is None else to_datetime(self.first_ts)

    @property
    def last_at(self) -> datetime | None:
        """When the last message was stored."""
        return None if self.last_ts is None else to_datetime(self.last_ts)


class Difference(msgspec.Struct, frozen=True):
    """A field of an existing configuration that has another value than requested."""

    field: str
    wanted: Any
    existing: Any

    def __str__(self) -> str:
        return f"{self.field} is {self.existing!r}, not {self.wanted!r}"


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stream's configuration and state. `etag` names the version of the configuration.

    `data_loss` describes stored messages that were lost; it is empty if there are none. `differs`
    has the fields for which `ensure_stream` found another value than requested. `staleness_ms` is
    as in `Range`.
    """

    config: ShownStreamConfig
    created: str
    state: StreamState
    cluster: dict[str, Any] = {}
    shards: tuple[StreamState, ...] = ()
    data_loss: dict[str, Any] = {}
    etag: str = ""
    differs: tuple[Difference, ...] = ()
    staleness_ms: int | None = None

    @property
    def name(self) -> str:
        """The stream's name."""
        return str(self.config["name"])

    @property
    def created_at(self) -> datetime:
        """When it was created."""
        return to_datetime(self.created)


class ReplicaErasure(msgspec.Struct, frozen=True):
    """The progress of an erasure on one node; `reason` says why an attempt failed."""

    node: str
    status: Literal["pending", "done"]
    reason: str = ""


class Erasure(msgspec.Struct, frozen=True):
    """The receipt of an erasure. It is done when no file of any replica has the bytes.

    `shredded` means that the keys of the subjects were destroyed first.
    """

    id: str
    status: Literal["pending", "done"]
    messages: int
    replicas: tuple[ReplicaErasure, ...]
    shredded: bool = False


class SubjectCount(msgspec.Struct, frozen=True):
    """A subject and the number of its messages in a stream."""

    subject: str
    messages: int


class SequenceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A position of a consumer: the consumer sequence and the stream sequence."""

    consumer_seq: int
    stream_seq: int
    last_active: str | None = None

    @property
    def last_active_at(self) -> datetime | None:
        """When it last moved."""
        return None if self.last_active is None else to_datetime(self.last_active)


class ConsumerShardInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's progress in one shard of its stream."""

    shard: int
    delivered: SequenceInfo
    ack_floor: SequenceInfo
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_pending: int = 0


class ConsumerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer's configuration and progress. `etag` names the version of the configuration.

    If the stream has several shards, `shards` has the progress in each.
    """

    stream: str
    name: str
    created: str
    config: ShownConsumerConfig
    delivered: SequenceInfo
    ack_floor: SequenceInfo
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0
    num_pending: int = 0
    push_bound: bool = False
    paused: bool = False
    shards: tuple[ConsumerShardInfo, ...] = ()
    etag: str = ""

    @property
    def created_at(self) -> datetime:
        """When it was created."""
        return to_datetime(self.created)


EventType = Literal[
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
"""Types of events that can be requested."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened on the server. Fields that its type does not have are empty.

    `type` is an `EventType`, a type of a newer server, or `lost`. `lost` means that `count` events
    before this one are missing, of any stream and type; `count` is None if their number is unknown.
    `action` is `create`, `modify` or `delete`. `consumer_seq` is that of the first delivery of the
    message. `server` began or ceased to lead `group`.
    """

    type: str
    id: str
    timestamp: str
    stream: str = ""
    consumer: str = ""
    action: str = ""
    stream_seq: int = 0
    consumer_seq: int = 0
    deliveries: int = 0
    reason: str = ""
    server: str = ""
    group: int | None = None
    count: int | None = None

    @property
    def happened_at(self) -> datetime:
        """When it happened."""
        return to_datetime(self.timestamp)


class ReplaySplit(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed range of one shard, both ends included. Reading it twice gives the same messages.

    `messages` and `bytes` are estimates. `stream`, `incarnation`, `subject` and `consistency` are
    those of the plan.
    """

    shard: int
    from_seq: int
    to_seq: int
    messages: int = 0
    bytes: int = 0
    stream: str = ""
    incarnation: str = ""
    subject: str | None = None
    consistency: Consistency | None = None


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed range of a stream, cut into splits that can be read in parallel.

    `staleness_ms` is as in `Range`.
    """

    stream: str
    incarnation: str
    splits: tuple[ReplaySplit, ...]
    staleness_ms: int | None = None


def place_of(shard: int | None, seq: int) -> int:
    """A shard and a sequence as one number, with the shard above bit 64.

    In the first shard, and in a stream without shards, it is the sequence itself.
    """
    return (shard or 0) << 64 | seq
