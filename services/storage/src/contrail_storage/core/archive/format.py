"""The archive format of streams: bytes from which a reader can tell whether they are complete.

Little-endian::

    start     8 bytes magic | u32 version
    record    u8 kind | u32 bytes of payload | payload | u32 CRC-32C
    ...
    record    of kind END, the last

The CRC of a record continues the CRC of the record before it (that of the first continues the
start). So a record that was changed, moved, repeated or left out breaks the chain. The end record
has counts and a BLAKE2b digest of every byte before it; nothing follows it. Payloads are msgpack.
Only blocks are in the form of ``contrail_common.columns.blocks``, without a codec. Each shard has
its records in this order::

    (HEADER, SUBJECTS*, DELETED*, EXEMPT*, DEADLINES*, IDS*, (CONSUMER PENDING*)*, BLOCK*)+, END

Version 1 has neither EXEMPT nor DEADLINES.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeVar

import crc32c
import msgspec

from contrail_storage.core.consumer_machine import Snapshot
from contrail_storage.core.pending_deliveries import Pending

MAGIC: Final = b"CTRLSNAP"
VERSION: Final = 2
RECORD_BYTES_MAX: Final = (4 << 20) - (64 << 10)
"""Bytes of a record, at most: a restore puts each record into one entry of the log."""

HEADER: Final = 1
SUBJECTS: Final = 2
DELETED: Final = 3
IDS: Final = 4
CONSUMER: Final = 5
PENDING: Final = 6
BLOCK: Final = 7
END: Final = 8
EXEMPT: Final = 9
DEADLINES: Final = 10

_ORDER: Final = (
    HEADER, SUBJECTS, DELETED, EXEMPT, DEADLINES, IDS, CONSUMER, PENDING, BLOCK, END,
)  # fmt: skip
_POSITIONS: Final = {kind: position for position, kind in enumerate(_ORDER)}

_START: Final = struct.Struct("<8sI")
_HEAD: Final = struct.Struct("<BI")
_CRC: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 32

T = TypeVar("T")


class ArchiveError(Exception):
    """The bytes are not a complete archive of a supported version. The text says what is wrong."""


class Record(NamedTuple):
    """One record. The kind decides the form of ``payload``."""

    kind: int
    payload: bytes


class Subjects(msgspec.Struct, array_like=True, frozen=True):
    """Live subjects, ascending by number: u32 number[n], i64 first[n], i64 last[n], u32 count[n].

    ``first`` is a lower bound. A negative ``last`` stands for an upper bound of the last sequence.
    """

    rows: bytes
    names: list[str]


class DeletedPages(msgspec.Struct, array_like=True, frozen=True):
    """Pages of deleted sequences, with their numbers: bitmaps of 4,096 sequences each."""

    pages: list[tuple[int, bytes]]


class ExemptPages(msgspec.Struct, array_like=True, frozen=True):
    """Pages of the messages exempt from ``max_age``, in the form of :class:`DeletedPages`."""

    pages: list[tuple[int, bytes]]


class DeadlineRows(msgspec.Struct, array_like=True, frozen=True):
    """Deadlines, ascending: log time (ns), and the sequences (i64[n], ascending) that are due."""

    rows: list[tuple[int, bytes]]


class Ids(msgspec.Struct, array_like=True, frozen=True):
    """The duplicate window, oldest first: log time (ns), 16-byte hashes, i64 sequences."""

    runs: list[tuple[int, bytes, bytes]]


class Consumer(msgspec.Struct, array_like=True, frozen=True):
    """A consumer with its number. Further pending deliveries may follow in other records.

    ``pinned`` lists the messages that it delivers first (``core.pinned``); all are below
    ``state.pinned_end``.
    """

    number: int
    state: Snapshot
    pinned: bytes = b""


class MorePending(msgspec.Struct, array_like=True, frozen=True):
    """Further pending deliveries of the last consumer, by sequence, and messages it gave up on."""

    number: int
    pending: dict[int, Pending]
    given_up: list[tuple[int, bytes]] = []


class End(msgspec.Struct, array_like=True, frozen=True):
    """Number of records of each kind, and the digest of every byte before this record."""

    records: dict[int, int]
    digest: bytes


def decoded(payload: bytes, shape: type[T]) -> T:
    """Decode ``payload`` as ``shape``. Raises ArchiveError."""
    try:
        return msgspec.msgpack.decode(payload, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArchiveError(f"a record of the archive cannot be read: {error}") from error


class ArchiveWriter:
    """Encodes an archive: :meth:`start` first, then records in order, then :meth:`end`."""

    def __init__(self) -> None:
        self._chain = _Chain()
        self._records: Counter[int] = Counter()

    def start(self) -> bytes:
        """Return the bytes before the first record: magic and version."""
        return self._chain.begin(_START.pack(MAGIC, VERSION))

    def record(self, record: Record) -> bytes:
        """Encode the next record."""
        self._records[record.kind] += 1
        return self._chain.seal(_HEAD.pack(record.kind, len(record.payload)) + record.payload)

    def end(self) -> bytes:
        """Encode the end record. Nothing may follow it."""
        end = End(dict(self._records), self._chain.digest)
        return self.record(Record(END, msgspec.msgpack.encode(end)))


class ArchiveReader:
    """Splits a byte stream into records; keeps at most one incomplete record in memory."""

    def __init__(self) -> None:
        self._chain = _Chain()
        self._held = bytearray()
        self._records: Counter[int] = Counter()
        self._kind = 0
        self._started = self.ended = False

    def feed(self, data: bytes) -> list[Record]:
        """Return the records that ``data`` completes, but not the end. Raises ArchiveError."""
        self._held += data
        if not self._started and not self._take_start():
            return []
        return list(self._take_records())

    def finish(self) -> None:
        """Note the end of the bytes. Raises ArchiveError unless the end record was the last."""
        if not self._started:
            raise ArchiveError("the archive is cut short before its first record")
        if not self.ended:
            raise ArchiveError("the archive is cut short: it does not end with an end record")

    def _take_start(self) -> bool:
        size = min(len(self._held), len(MAGIC))
        # As soon as a byte differs: somebody who uploads another file does not wait for its end.
        if self._held[:size] != MAGIC[:size]:
            raise ArchiveError("this is not a stream archive")
        if len(self._held) < _START.size:
            return False
        start = bytes(self._held[: _START.size])
        version = _START.unpack(start)[1]
        if not 1 <= version <= VERSION:
            raise ArchiveError(
                f"the archive has version {version}; this server reads 1 to {VERSION}"
            )
        self._chain.begin(start)
        del self._held[: _START.size]
        self._started = True
        return True

    def _take_records(self) -> Iterator[Record]:
        at = 0
        while len(self._held) - at >= _HEAD.size:
            if self.ended:
                break
            kind, size = _HEAD.unpack_from(self._held, at)
            # Before its payload is complete: a damaged size would make the reader collect up to 4
            # GiB.
            self._check_head(kind, size)
            stop = at + _HEAD.size + size
            if len(self._held) < stop + _CRC.size:
                break
            # Of the bytes before the end record: the next line adds the record itself to the chain.
            digest = self._chain.digest if kind == END else b""
            body = bytes(self._held[at:stop])
            if self._chain.seal(body) != body + self._held[stop : stop + _CRC.size]:
                raise ArchiveError(
                    f"the archive is damaged: the checksum of record {self._number} does not match"
                )
            at = stop + _CRC.size
            record = Record(kind, body[_HEAD.size :])
            if kind == END:
                self._end(record, digest)
            else:
                self._records[kind] += 1
                self._kind = kind
                yield record
        del self._held[:at]
        if self.ended and self._held:
            raise ArchiveError("the archive continues after its end record")

    @property
    def _number(self) -> int:
        return sum(self._records.values()) + 1

    def _check_head(self, kind: int, size: int) -> None:
        if kind not in _POSITIONS or size > RECORD_BYTES_MAX:
            raise ArchiveError(
                f"the archive is damaged: the head of record {self._number} is invalid"
            )
        # Consumers and their pending deliveries alternate. A header begins the next shard; all
        # other kinds only go forward.
        follows = kind == CONSUMER and self._kind == PENDING
        back = self._kind and _POSITIONS[kind] < _POSITIONS[self._kind]
        if kind != HEADER and (not self._kind or (back and not follows)):
            raise ArchiveError(f"the archive is out of order at record {self._number}")

    def _end(self, record: Record, digest: bytes) -> None:
        end = decoded(record.payload, End)
        if end.records != dict(self._records) or end.digest != digest:
            raise ArchiveError("the archive is damaged: its counts or its digest do not match")
        self.ended = True


class _Chain:
    """The running CRC and digest of an archive."""

    def __init__(self) -> None:
        self._crc = 0
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    @property
    def digest(self) -> bytes:
        """The digest of all bytes so far."""
        return self._digest.digest()

    def begin(self, start: bytes) -> bytes:
        """Add the start, and return it."""
        self._crc = crc32c.crc32c(start)
        self._digest.update(start)
        return start

    def seal(self, body: bytes) -> bytes:
        """Add a record without its CRC, and return it with its CRC."""
        self._crc = crc32c.crc32c(body, self._crc)
        sealed = body + _CRC.pack(self._crc)
        self._digest.update(sealed)
        return sealed
