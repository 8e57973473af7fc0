"""The replicated commands, and the log entry that contains them.

A command assigns no sequence numbers: ``apply`` does. ``apply`` also decides every expectation,
limit and duplicate, so it may refuse a command.
"""

# One module: an entry is decoded as the union of all commands, whose tags must differ.

import builtins
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import MessageColumns
from contrail_common.errors import ErrorSpec
from contrail_common.model import (
    TTL_NEVER,
    AckKind,
    Compression,
    ConsumerConfig,
    DataLoss,
    Numbered,
    Rollup,
    StreamConfig,
)
from contrail_common.texts import I64Array, U32Array
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core.expected import HashedExpected
from contrail_storage.core.id_index import ID_BYTES
from contrail_storage.core.results import Refused

REASON_MAX: Final = 1_000
"""Characters of the description of a damage that are kept."""
RANGES_MAX: Final = 100

# Tags 1, 6, 12 and 14 to 17 belong to commands of version 0.2. They are not used again, so that no
# older entry is taken for another one.

META_SHARD = 0
"""The shard id of the meta machine: stream names, subjects and shard ids."""


class Append(msgspec.Struct, tag=19, array_like=True):
    """Messages for one stream shard, in columns.

    ``subjects`` are the distinct subjects and ``subject_index`` (u32[n]) points into them; ``ids``
    has a 16-byte hash per message (zeros: none), or is None when no message has an id.
    ``expected``, ``rollups`` and ``ttls`` are keyed by the message's position. A roll-up replaces
    all earlier messages of its subject, or of the stream; then it is the first message here. TTLs
    are in ns, or TTL_NEVER. ``atomic``: store all messages or none.
    """

    subjects: list[str]
    subject_index: bytes
    columns: MessageColumns
    ids: bytes | None = None
    expected: dict[int, HashedExpected] | None = None
    rollups: dict[int, Rollup] | None = None
    atomic: bool = False
    ttls: dict[int, int] | None = None

    def is_sound(self) -> bool:
        """Whether there are messages and the columns agree, so that reading them cannot fail."""
        count = self.columns.count
        return (
            self.columns.is_sound()
            and len(self.subject_index) == 4 * count
            and self._has_subjects(count)
            and (self.ids is None or len(self.ids) == ID_BYTES * count)
            and (not self.rollups or self._rollups_are_sound(count))
            and (not self.ttls or self._ttls_are_sound(count))
        )

    def _has_subjects(self, count: int) -> bool:
        if not all(self.subjects):
            return False
        # Most commands have one message, and an array of one costs many times more.
        if count == 1:
            return int.from_bytes(self.subject_index, "little") < len(self.subjects)
        index = np.frombuffer(self.subject_index, np.uint32)
        return not np.count_nonzero(index >= len(self.subjects))

    def _rollups_are_sound(self, count: int) -> bool:
        rollups = (self.rollups or {}).items()
        return all(0 <= at < count and (not at or kind != "all") for at, kind in rollups)

    def _ttls_are_sound(self, count: int) -> bool:
        return all(
            0 <= at < count and (ttl_ns == TTL_NEVER or 0 < ttl_ns <= INT64_MAX)
            for at, ttl_ns in (self.ttls or {}).items()
        )


class NumberedAppend(Append, tag=24):
    """Messages of the batch with this ``number`` of a ``producer`` (`core.producers`)."""

    producer: str = ""
    number: int = 0

    @classmethod
    def of(cls, append: Append, numbered: Numbered) -> "NumberedAppend":
        """The command for the messages of ``append``."""
        fields = msgspec.structs.asdict(append)
        return cls(**fields, producer=numbered.producer, number=numbered.number)


class Precondition(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """The condition for putting a configuration, checked when the command is applied.

    ``create`` refuses to replace a different configuration, ``update`` to create a missing one.
    ``version`` is the required current version (If-Match; 0 for any). ``absent``: there must be no
    configuration (If-None-Match: *).
    """

    create: bool = False
    update: bool = False
    version: int | None = None
    absent: bool = False

    def refusal(
        self, version: int | None, exists: ErrorSpec, missing: ErrorSpec, *, same: bool
    ) -> Refused | None:
        """Why a configuration may not be put; ``version`` is the current one (None: there is none).

        ``same``: the current configuration is equal; if not, ``create`` refuses with ``exists``.
        ``update`` refuses with ``missing`` if there is none.
        """
        if version is None and self.version is not None:
            return Refused(errors.PRECONDITION_FAILED.code, "it does not exist")
        # If-Match and If-None-Match come first, as in HTTP: a failed condition is 412, whatever
        # else is wrong.
        if version is not None and (self.absent or self.version not in (None, 0, version)):
            return Refused(errors.PRECONDITION_FAILED.code, f"the version is {version}")
        if version is None and self.update:
            return Refused(missing.code)
        if version is not None and self.create and not same:
            return Refused(exists.code)
        return None


class ConfigureStream(msgspec.Struct, tag=2, array_like=True):
    """Create the shard's stream, or replace its configuration and keep its identity.

    ``shard`` is the number of this shard in the stream. The shards after the first take over its
    ``version``; 0 means the next version. Without ``given`` the command creates or replaces
    unconditionally: earlier versions logged it so, and the shards after the first get it so.
    """

    config: StreamConfig
    incarnation: str
    hash_key: bytes
    shard: int = 0
    version: int = 0
    given: Precondition | None = None

    @property
    def may_create(self) -> bool:
        """Whether the command may create a stream."""
        return self.given is None or not self.given.update


class DropStream(msgspec.Struct, tag=3, array_like=True, omit_defaults=True):
    """Remove everything in the shard.

    Only if its stream has this ``incarnation`` ("": any) and this ``version`` (None: any).
    """

    incarnation: str = ""
    version: int | None = None


class Trim(msgspec.Struct, tag=4, array_like=True, omit_defaults=True):
    """Remove messages below ``to_seq``; at most ``messages_max`` of them in this entry.

    The newest ``keep`` messages of the stream stay, counted when the command is applied.
    """

    to_seq: int
    messages_max: int
    keep: int = 0


class ExpireAge(msgspec.Struct, tag=5, array_like=True):
    """Remove messages past ``max_age`` at the entry's time; at most ``messages_max`` of them."""

    messages_max: int


class Expire(msgspec.Struct, tag=33, array_like=True):
    """Remove messages that are due, anywhere in the stream: ``seqs`` (i64, ascending).

    ``rows`` are the deadlines that passed, as pairs of deadline and first sequence (i64 each).
    Their rows are removed even if the messages are gone already. Without rows the messages are due
    by ``max_age``. ``markers`` (i64) are those of ``seqs`` that mark their subject as empty: these
    leave no marker. The leader reads that from the messages, and it holds whatever happens since.
    """

    seqs: bytes
    rows: bytes
    markers: bytes

    def is_sound(self) -> bool:
        """Whether the columns are whole, and the sequences ascend."""
        if len(self.seqs) % 8 or len(self.rows) % 16 or len(self.markers) % 8:
            return False
        seqs, rows = np.frombuffer(self.seqs, np.int64), np.frombuffer(self.rows, np.int64)
        return bool((seqs[1:] > seqs[:-1]).all()) and bool((rows >= 0).all())


class DeleteMessage(msgspec.Struct, tag=34, array_like=True):
    """Remove one message."""

    seq: int


RemovalReason = Literal["purge", "shredded", "limit", "rollup"]
"""Why messages are removed by subject.

``purge`` is refused by a stream that is sealed or denies purges. ``shredded``: the keys of the
messages are destroyed. ``limit``: their subjects have more than ``max_msgs_per_subject``.
``rollup``: a roll-up replaced them.
"""


class Remove(msgspec.Struct, tag=18, array_like=True, omit_defaults=True):
    """Remove messages that are the oldest of their subjects; those that are gone are passed over.

    The leader finds them (see :meth:`of`). With the reason ``limit``, a message stays unless its
    subject has too many when the command is applied. ``finished`` are roll-ups, by subject, that
    have nothing left to remove after this command.
    """

    reason: RemovalReason
    first_seq: int = 0
    distances: bytes = b"\1"
    sids: bytes = b"\1"
    sizes: bytes = b"\1"
    finished: dict[str, int] = {}

    @classmethod
    def of(cls, reason: RemovalReason, seqs: I64Array, sids: U32Array, sizes: I64Array) -> "Remove":
        """The command for ``seqs`` (ascending), with the subject number and size of each."""
        if not len(seqs):
            return cls(reason)
        first_seq = int(seqs[0])
        distances = np.diff(seqs, prepend=first_seq)
        return cls(reason, first_seq, _narrow(distances), _narrow(sids), _narrow(sizes))

    def messages(self) -> tuple[I64Array, U32Array, I64Array] | None:
        """Sequences, subject numbers and sizes; None if the columns do not agree."""
        distances, sids, sizes = (_wide(each) for each in (self.distances, self.sids, self.sizes))
        if distances is None or sids is None or sizes is None:
            return None
        if not len(distances) == len(sids) == len(sizes) or not 0 <= self.first_seq <= INT64_MAX:
            return None
        seqs = self.first_seq + np.cumsum(distances)
        if (seqs[1:] <= seqs[:-1]).any() or (sids >> 32).any() or (sizes >> 32).any():
            return None
        return seqs, sids.astype(np.uint32), sizes


def _narrow(values: I64Array | U32Array) -> bytes:
    """Values from 0 on in as few bytes each as the largest needs, after a byte with that width."""
    narrow = np.min_scalar_type(int(values.max()))
    return bytes((narrow.itemsize,)) + values.astype(narrow).tobytes()


def _wide(column: bytes) -> I64Array | None:
    """The values of :func:`_narrow`; None if the bytes are none."""
    width = column[0] if column else 0
    if width not in (1, 2, 4, 8) or (len(column) - 1) % width:
        return None
    values: NDArray[np.integer] = np.frombuffer(column, f"<u{width}", offset=1)
    return values.astype(np.int64)


class PutConsumer(msgspec.Struct, tag=7, array_like=True):
    """Create a consumer that starts at ``start_seq`` (0: after the last message), or update it.

    With ``pinned`` (``core.pinned``), it gets only these messages up to ``pinned_end``. Without
    ``given``, as earlier versions logged it, the command creates or updates unconditionally.
    """

    config: ConsumerConfig
    start_seq: int
    pinned: bytes = b""
    pinned_end: int = 0
    given: Precondition | None = None


class DropConsumer(msgspec.Struct, tag=8, array_like=True, omit_defaults=True):
    """Remove a consumer, if it is still at ``version`` (None: at any)."""

    consumer_id: int
    version: int | None = None


class Deliver(msgspec.Struct, tag=9, array_like=True):
    """Deliveries that the leader chose: ``seqs`` ascending, ``position`` the next to consider."""

    consumer_id: int
    epoch: int
    seqs: list[int]
    position: int


class Advance(msgspec.Struct, tag=13, array_like=True):
    """The position of a consumer, in total and not as an increment.

    ``consumer_seq`` and ``stream_seq`` are of its last delivery, ``position`` the next to consider.
    Consumers with ack policy ``none`` record no more than this. For others, with 0 for both
    sequences, it moves the position past messages that have to be checked (interest retention).
    """

    consumer_id: int
    epoch: int
    consumer_seq: int
    stream_seq: int
    position: int


class Acknowledge(msgspec.Struct, tag=10, array_like=True):
    """Acknowledgements: plain acks by sequence, and the other kinds with their delay.

    ``reasons`` has the texts that clients gave for a ``term``, by sequence.
    """

    consumer_id: int
    epoch: int
    acked: list[int]
    others: list[tuple[AckKind, int, int]] = []
    reasons: dict[int, str] = {}


class DeliverAcked(msgspec.Struct, tag=66, array_like=True):
    """As ``Deliver``, and then ``Acknowledge`` with the plain acks ``acked``; None: of ``seqs``.

    A client has acknowledged what it got before the delivery was recorded.
    """

    consumer_id: int
    epoch: int
    seqs: list[int]
    position: int
    acked: list[int] | None = None


class Exhaust(msgspec.Struct, tag=11, array_like=True):
    """Give up on pending messages whose last allowed delivery ran out."""

    consumer_id: int
    epoch: int
    seqs: list[int]


class EnforceLimits(msgspec.Struct, tag=31, array_like=True):
    """Remove the oldest messages over the limits of the stream; at most ``messages_max``."""

    messages_max: int


class ArchiveHeader(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The stream itself, as of the last sequence: identity, configuration, counters.

    ``next_subject`` and ``next_consumer`` are the next numbers to assign. ``replaced`` has roll-ups
    that are not finished. From ``keep_from`` up to ``keep_to`` there may be messages that no
    consumer needs. ``shard`` is the number of the shard in its stream. ``loss`` is accepted damage.
    ``producers`` have a name, the number of their last batch, and the first sequence from which
    ids are known (0: some are forgotten).
    """

    config: StreamConfig
    incarnation: str
    hash_key: builtins.bytes
    created_ns: int
    first_seq: int
    last_seq: int
    messages: int
    bytes: int
    last_time_ns: int
    last_id: builtins.bytes
    digest: int
    replaced: dict[str, int]
    next_subject: int
    next_consumer: int
    keep_from: int = 0
    keep_to: int = 0
    shard: int = 0
    loss: DataLoss | None = None
    producers: list[tuple[str, int, int]] = []


class RestorePart(msgspec.Struct, tag=40, array_like=True):
    """Records of an archive (``core.archive``), for a shard whose stream does not exist yet.

    Blocks are stored with ``compression``, the setting of the stream that will be created.
    """

    records: list[tuple[int, bytes]]
    compression: Compression


class FinishRestore(msgspec.Struct, tag=41, array_like=True):
    """All parts are applied: create the stream, with a new identity."""

    header: ArchiveHeader


class _KeyIds(msgspec.Struct, array_like=True):
    ids: bytes  # u64, ascending

    def is_sound(self) -> bool:
        """Whether there are ids, and they ascend."""
        if not self.ids or len(self.ids) % 8:
            return False
        numbers = np.frombuffer(self.ids, np.uint64)
        return bool(numbers[0]) and bool((numbers[1:] > numbers[:-1]).all())


class NameKeys(_KeyIds, tag=42, array_like=True):
    """Most members of a group have new subject keys; ``marks`` are those of their subjects."""

    marks: bytes


class RetireKeys(_KeyIds, tag=44, array_like=True):
    """Seal no more messages with the subject keys ``ids``.

    Refused unless ``term`` is that of the leader that proposes it.
    """

    term: int


class ShredKeys(_KeyIds, tag=43, array_like=True):
    """Members destroy what is left of the subject keys ``ids``, whose messages are removed.

    Refused unless ``term`` is that of the leader that proposes it; the keys are retired in it, too.
    """

    term: int


class ReserveStream(msgspec.Struct, tag=20, array_like=True):
    """Meta: claim a name and its subjects and get shard ids, ``shards`` of them in a row.

    ``in_memory``: only ``owner`` has the shards. ``groups`` has their groups, if not the usual one.
    """

    name: str
    subjects: tuple[str, ...]
    incarnation: str
    shards: int = 1
    in_memory: bool = False
    groups: tuple[int, ...] = ()
    owner: str = ""


class ListStream(msgspec.Struct, tag=21, array_like=True):
    """Meta: list the reserved stream, which exists by now, or change its subjects.

    ``config`` is for a stream in memory: a restart creates it again from that. ``incarnation``,
    here and below, identifies the stream ("": any of the name, as earlier versions logged it). A
    stream that is being removed, or was created again, is not changed.
    """

    name: str
    subjects: tuple[str, ...]
    config: StreamConfig | None = None
    incarnation: str = ""


class RenewStream(msgspec.Struct, tag=29, array_like=True):
    """Meta: the content of a listed stream in memory is lost; it gets new shard ids and identity.

    ``lost`` is the incarnation that is lost ("": any).
    """

    name: str
    incarnation: str
    lost: str = ""


class UnlistStream(msgspec.Struct, tag=22, array_like=True, omit_defaults=True):
    """Meta: the stream is being removed; its name stays taken until it is released."""

    name: str
    incarnation: str = ""


class ReleaseStream(msgspec.Struct, tag=23, array_like=True, omit_defaults=True):
    """Meta: the stream is gone; name and subjects are free."""

    name: str
    incarnation: str = ""


class EnforceInterest(msgspec.Struct, tag=32, array_like=True):
    """Remove messages that no consumer needs, within the range that was noted for that.

    Checks at most ``messages_max`` messages in this entry.
    """

    messages_max: int


class AcceptLoss(msgspec.Struct, tag=63, array_like=True):
    """Accept the damage of a shard and serve the rest of it.

    ``ranges`` of sequences, with ``messages`` messages in all, are known to be lost. ``unknown``:
    the last messages may be lost too, and their sequences may be used again. The stream gets the
    new ``incarnation``.
    """

    incarnation: str
    reason: str
    unknown: bool
    messages: int
    ranges: list[tuple[int, int]]


class AssignShards(msgspec.Struct, tag=64, array_like=True):
    """Meta: set a stream to ``shards`` shard ids from ``shard_id`` on, replacing what was known."""

    name: str
    subjects: tuple[str, ...]
    incarnation: str
    shard_id: int
    shards: int


class SkipNumbers(msgspec.Struct, tag=65, array_like=True):
    """Meta: the next ``count`` shard ids may have been given to streams that were lost."""

    count: int


class CreateGroup(msgspec.Struct, tag=30, array_like=True):
    """Meta: a Raft group with the nodes ``members``, by their ids; the preferred leader first."""

    number: int
    members: tuple[str, ...]


class NoteStart(msgspec.Struct, tag=37, array_like=True):
    """Meta: a node has started, for the ``boots``-th time, as the process ``process``."""

    name: str
    number: int
    incarnation: int
    boots: int
    process: int


class RegisterNode(msgspec.Struct, tag=38, array_like=True):
    """Meta: the disk of a node was lost; it gets the incarnation after ``above``.

    ``token`` (16 bytes) is the same in all requests of one process.
    """

    name: str
    number: int
    token: bytes
    above: int


class RecordErasure(msgspec.Struct, tag=50, array_like=True):
    """Meta: messages of ``shards`` were erased, and ``nodes`` must remove them from their files.

    ``indexes``: by group, an index at which the messages are deleted. ``shredded``: the keys that
    sealed them were destroyed.
    """

    erasure_id: str
    stream: str
    shards: tuple[int, ...]
    messages: int
    nodes: list[str]
    time_ns: int
    shredded: bool = False
    indexes: dict[int, int] = {}


class FinishErasures(msgspec.Struct, tag=51, array_like=True):
    """Meta: ``node`` has removed the bytes of some erasures from all its files."""

    erasure_ids: list[str]
    node: str
    time_ns: int


class ReopenErasures(msgspec.Struct, tag=52, array_like=True):
    """Meta: ``node`` gets data from another node, so its pending erasures begin anew.

    That data may have bytes that ``node`` has already removed, if the other node has not yet.
    """

    node: str


KeyCommand = NameKeys | RetireKeys | ShredKeys
ReceiptCommand = RecordErasure | FinishErasures | ReopenErasures
ConsumerChange = Deliver | Advance | Acknowledge | DeliverAcked | Exhaust
StreamCommand = (
    Append
    | NumberedAppend
    | ConfigureStream
    | DropStream
    | Trim
    | ExpireAge
    | Expire
    | DeleteMessage
    | Remove
    | PutConsumer
    | DropConsumer
    | ConsumerChange
    | EnforceLimits
    | EnforceInterest
    | RestorePart
    | FinishRestore
    | KeyCommand
    | AcceptLoss
)
MetaCommand = (
    ReserveStream
    | ListStream
    | RenewStream
    | UnlistStream
    | ReleaseStream
    | CreateGroup
    | NoteStart
    | RegisterNode
    | ReceiptCommand
    | AssignShards
    | SkipNumbers
)
Command = StreamCommand | MetaCommand


class Entry(msgspec.Struct, array_like=True):
    """One log entry: the log time stamped by the leader and commands by shard.

    ``skipped_ns``: the sum of the jumps of log time.
    """

    time_ns: int
    commands: list[tuple[int, Command]]
    skipped_ns: int = 0
