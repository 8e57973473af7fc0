"""Calls to a node, their outcomes, and what a look shows: one history over several lives.

Records cross a pipe as msgpack, so everything here is a plain struct.
"""

from typing import Literal

import msgspec

from contrail_common.model import (
    AckKind,
    ConsumerConfig,
    ConsumerInfo,
    PublishMessage,
    StoredMessage,
    StreamConfig,
    StreamState,
)
from contrail_link.contract.consume import Delivery
from contrail_link.contract.publish import PubResult

# Calls -------------------------------------------------------------------------------------------


class PutStream(msgspec.Struct, frozen=True, tag=True):
    """Create the stream or replace its configuration."""

    config: StreamConfig


class DeleteStream(msgspec.Struct, frozen=True, tag=True):
    """Remove a stream."""

    stream: str


class Publish(msgspec.Struct, frozen=True, tag=True):
    """One request with one or more messages; with `atomic`, all are stored or none."""

    stream: str
    messages: list[PublishMessage]
    atomic: bool = False


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Delete one message."""

    stream: str
    seq: int


class Purge(msgspec.Struct, frozen=True, tag=True):
    """Remove messages of a subject: those below `up_to_seq`, all but the newest `keep`, or all."""

    stream: str
    up_to_seq: int = 0
    keep: int = 0
    subject: str = ""


class Erase(msgspec.Struct, frozen=True, tag=True):
    """Erase messages, or all of a subject; the answer is the receipt, done or not."""

    stream: str
    seqs: list[int]
    subject: str = ""


class AskErasure(msgspec.Struct, frozen=True, tag=True):
    """Read a receipt, and wait until it is done."""

    erasure_id: str


class Reclaim(msgspec.Struct, frozen=True, tag=True):
    """Reclaim the space of deleted messages: drop and rewrite blocks."""


class PutConsumer(msgspec.Struct, frozen=True, tag=True):
    """Create the consumer or replace its configuration."""

    stream: str
    config: ConsumerConfig


class DropConsumer(msgspec.Struct, frozen=True, tag=True):
    """Remove a consumer."""

    stream: str
    consumer: str


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Pull up to `batch` messages, without waiting."""

    stream: str
    consumer: str
    batch: int


class Ack(msgspec.Struct, frozen=True, tag=True):
    """Acknowledge deliveries; with `sync`, the answer means that it is durable."""

    stream: str
    consumer: str
    kind: AckKind
    seqs: list[int]
    sync: bool


class AckPulled(msgspec.Struct, frozen=True, tag=True):
    """Acknowledge up to `count` deliveries that are not acknowledged yet; becomes an `Ack`."""

    stream: str
    consumer: str
    kind: AckKind
    count: int
    sync: bool


class Look(msgspec.Struct, frozen=True, tag=True):
    """Read a consumer's progress."""

    stream: str
    consumer: str


class PassTime(msgspec.Struct, frozen=True, tag=True):
    """Move log time forward, do everything that is due then, and look at everything."""

    time_ns: int


class WriteOut(msgspec.Struct, frozen=True, tag=True):
    """Write everything that is applied to the store."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Take an archive of a stream with its consumers, and keep it until this life ends."""

    stream: str


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Create a stream from the archive of the stream `saved`."""

    stream: str
    saved: str


class TakeCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Flush the store and remove the segments of the log before it."""


Call = (
    PutStream
    | DeleteStream
    | Publish
    | Remove
    | Purge
    | Erase
    | AskErasure
    | Reclaim
    | PutConsumer
    | DropConsumer
    | Pull
    | Ack
    | Look
    | PassTime
    | WriteOut
    | Save
    | Restore
    | TakeCheckpoint
)

Step = list[Call | AckPulled]
"""Calls that are made together, in this order."""

# Outcomes ----------------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True, tag=True):
    """The call succeeded."""


class Published(msgspec.Struct, frozen=True, tag=True):
    """A result for each message; single ones may be refused or unknown."""

    results: list[PubResult]


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """The deliveries of a pull."""

    deliveries: list[Delivery]


class Looked(msgspec.Struct, frozen=True, tag=True):
    """Progress of a consumer."""

    info: ConsumerInfo


class Erased(msgspec.Struct, frozen=True, tag=True):
    """A receipt."""

    erasure_id: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The call was refused: without effect (`applied` False), or the server does not say (None)."""

    name: str
    detail: str
    applied: bool | None


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """The call may or may not have taken effect."""


Outcome = Done | Published | Delivered | Looked | Erased | Refused | Unknown

# Records -----------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A process opened the data and serves. Calls that the last one did not answer are in doubt."""


class Invoked(msgspec.Struct, frozen=True, tag=True):
    """A call begins, at a log time."""

    number: int
    call: Call
    time_ns: int = 0


class Returned(msgspec.Struct, frozen=True, tag=True):
    """A call ended, at a log time."""

    number: int
    outcome: Outcome
    time_ns: int = 0


class StreamView(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One stream, as every way of reading it shows."""

    config: StreamConfig
    state: StreamState
    claimed_subjects: tuple[str, ...]
    messages: list[StoredMessage]
    fetched: list[StoredMessage]
    replayed: list[int]
    consumers: dict[str, ConsumerInfo]


class Seen(msgspec.Struct, frozen=True, tag=True):
    """Everything a node holds; `unreadable` has the streams that it does not show, with the reason.

    With `kept`, everything is done that was due at the log time `time_ns`.
    """

    streams: dict[str, StreamView]
    listed: list[str]
    half_made: list[str]
    unreadable: dict[str, str]
    time_ns: int = 0
    kept: bool = False


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Everything that a consumer still delivers after all pending deliveries were returned."""

    stream: str
    consumer: str
    deliveries: list[Delivery]


ChangeKind = Literal["created", "synced", "renamed", "unlinked", "directory-synced"]


class FileChange(msgspec.Struct, frozen=True, tag=True):
    """A call to the disk that has returned; `path` and `target` are relative to the data folder."""

    kind: ChangeKind
    path: str
    target: str = ""
    size: int = 0
    inode: int = 0


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The script is complete; has the kinds of the calls to the disk, in order, per lane."""

    calls: dict[str, list[str]]


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The node cannot be opened, or has stopped itself; `reason` says why."""

    reason: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """An error that no node may show, with its traceback."""

    trace: str


Record = Opened | Invoked | Returned | Seen | Drained | FileChange | Finished | Stopped | Broken
