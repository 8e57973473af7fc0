"""The archive of a stream: one run of bytes that shows itself whether it is whole.

Little-endian::

    start     8 bytes magic | u32 version
    record    u8 kind | u32 bytes of payload | payload | u32 CRC-32C
    ...
    record    of kind END, the last

The CRC of a record goes on from that of the record before it (the first from the start), so a
record that was changed, moved, doubled or left out breaks the chain. The end record holds counts
and a BLAKE2b digest of every byte before it; nothing follows it. Payloads are msgpack, but for
blocks, which are ``contrail_common.columns.blocks`` without a codec. Kinds come in this order, for
each shard of the stream::

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

from contrail_storage.core.consumer_machine import Pending, Snapshot

MAGIC: Final = b"CTRLSNAP"
VERSION: Final = 2
RECORD_BYTES_MAX: Final = (4 << 20) - (64 << 10)
"""A record fits an entry of the log, of which it becomes a part."""

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
_PLACES: Final = {kind: place for place, kind in enumerate(_ORDER)}

_START: Final = struct.Struct("<8sI")
_HEAD: Final = struct.Struct("<BI")
_CRC: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 32

T = TypeVar("T")


class ArchiveError(Exception):
    """The bytes are not a whole archive of this version; the text says what is wrong."""


class Record(NamedTuple):
    """One record; ``payload`` is what its kind says."""

    kind: int
    payload: bytes


class Subjects(msgspec.Struct, array_like=True, frozen=True):
    """Live subjects, by number: u32 number[n], i64 first[n], i64 last[n], u32 count[n] and names.

    ``first`` is a lower bound.
    """

    rows: bytes
    names: list[str]


class DeletedPages(msgspec.Struct, array_like=True, frozen=True):
    """Pages of the deleted sequences, by number: bitmaps of 4,096 sequences each."""

    pages: list[tuple[int, bytes]]


class ExemptPages(msgspec.Struct, array_like=True, frozen=True):
    """Pages of the sequences that no age removes, as :class:`DeletedPages` has them."""

    pages: list[tuple[int, bytes]]


class DeadlineRows(msgspec.Struct, array_like=True, frozen=True):
    """Deadlines in order: log time, and the sequences (i64[n], ascending) that are due then."""

    rows: list[tuple[int, bytes]]


class Ids(msgspec.Struct, array_like=True, frozen=True):
    """The duplicate window, oldest first: log time, 16-byte hashes and i64 sequences of entries."""

    runs: list[tuple[int, bytes, bytes]]


class Consumer(msgspec.Struct, array_like=True, frozen=True):
    """A consumer with its number; more of what it has pending may follow.

    ``pinned`` is what it gets first (``core.pinned``), up to ``pinned_end`` of the state.
    """

    number: int
    state: Snapshot
    pinned: bytes = b""


class MorePending(msgspec.Struct, array_like=True, frozen=True):
    """More of what the consumer before has pending, by sequence, and of what it gave up on."""

    number: int
    pending: dict[int, Pending]
    given_up: list[tuple[int, bytes]] = []


class End(msgspec.Struct, array_like=True, frozen=True):
    """How many records of each kind there are, and the digest of all that stands before."""

    records: dict[int, int]
    digest: bytes


def decoded(payload: bytes, shape: type[T]) -> T:
    """``payload`` as ``shape``; ArchiveError when it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ArchiveError(f"a record of the archive cannot be read: {error}") from error


class ArchiveWriter:
    """Puts records into bytes, one after the other, behind the bytes of :meth:`start`."""

    def __init__(self) -> None:
        self._chain = _Chain()
        self._records: Counter[int] = Counter()

    def start(self) -> bytes:
        """What stands before the first record."""
        return self._chain.begin(_START.pack(MAGIC, VERSION))

    def record(self, record: Record) -> bytes:
        """The bytes of a record."""
        self._records[record.kind] += 1
        return self._chain.seal(_HEAD.pack(record.kind, len(record.payload)) + record.payload)

    def end(self) -> bytes:
        """The bytes of the end record."""
        end = End(dict(self._records), self._chain.digest)
        return self.record(Record(END, msgspec.msgpack.encode(end)))


class ArchiveReader:
    """Cuts bytes into records as they come; holds at most one record that is not complete."""

    def __init__(self) -> None:
        self._chain = _Chain()
        self._held = bytearray()
        self._records: Counter[int] = Counter()
        self._kind = 0
        self._started = self.ended = False

    def feed(self, data: bytes) -> list[Record]:
        """The records that ``data`` completes, without the end record; ArchiveError."""
        self._held += data
        if not self._started and not self._take_start():
            return []
        return list(self._take_records())

    def finish(self) -> None:
        """There is no more: ArchiveError unless the end record was the last."""
        if not self._started:
            raise ArchiveError("the archive is cut short before its first record")
        if not self.ended:
            raise ArchiveError("the archive is cut short: it does not end with an end record")

    def _take_start(self) -> bool:
        size = min(len(self._held), len(MAGIC))
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
            self._check_head(kind, size)
            stop = at + _HEAD.size + size
            if len(self._held) < stop + _CRC.size:
                break
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
        if kind not in _PLACES or size > RECORD_BYTES_MAX:
            raise ArchiveError(
                f"the archive is damaged: the head of record {self._number} is invalid"
            )
        follows = kind == CONSUMER and self._kind == PENDING
        back = self._kind and _PLACES[kind] < _PLACES[self._kind]
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
        """Of all bytes so far."""
        return self._digest.digest()

    def begin(self, start: bytes) -> bytes:
        """Take the start; answers it."""
        self._crc = crc32c.crc32c(start)
        self._digest.update(start)
        return start

    def seal(self, body: bytes) -> bytes:
        """Take a record; answers it with its CRC."""
        self._crc = crc32c.crc32c(body, self._crc)
        sealed = body + _CRC.pack(self._crc)
        self._digest.update(sealed)
        return sealed
