"""Bytes of the write-ahead log: WAL batches, and the records inside them.

A segment is a sequence of WAL batches and nothing else::

    batch  = salt 8 B | number u64 | body length u32 | version u8 | 0 0 0 | crc32c u32 | body
    body   = record*
    record = kind u8 | group u32 | index u64 | term u64 | data length u32 | data

All integers are little-endian. The CRC covers the header before it and the body. Each segment has
a random salt, which is part of its name. After damaged bytes, the salt shows where a batch may
start. No message can imitate a batch, because nobody outside knows the salt.

In a plain log the version is 3. In an encrypted log it is 4, and the data of every record is a
sealed frame, even when it is empty. The frame is bound to the batch's salt and number, the record's
position in the batch and its header: a frame that was moved does not open. The CRC covers the
sealed bytes, so a torn tail can be distinguished from rot without a key.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from crc32c import crc32c

from contrail_storage.seal.frames import SEAL_BYTES, SealBrokenError, Sealer

PLAIN_VERSION: Final = 3
SEALED_VERSION: Final = 4
# Release 0.2 wrote 1 and 2, with the same records. It refuses a log with higher ones in a sentence.
_SEALED: Final = {1: False, 2: True, PLAIN_VERSION: False, SEALED_VERSION: True}
SALT_BYTES: Final = 8
_BATCH: Final = struct.Struct("<8sQIB3x")
_CRC: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<BIQQI")
_CONTEXT: Final = struct.Struct("<8sQI")
BATCH_HEADER_BYTES: Final = _BATCH.size + _CRC.size
RECORD_HEADER_BYTES: Final = _RECORD.size


class RecordKind(IntEnum):
    """The kinds of records, by their effect on the log of a group; see :class:`Record`."""

    ENTRY = 1
    HARD_STATE = 2
    TRUNCATE = 3
    BASE = 4
    END = 5


_KINDS: Final = {int(kind): kind for kind in RecordKind}
_WITH_DATA: Final = frozenset({RecordKind.ENTRY, RecordKind.HARD_STATE})


@dataclass(slots=True)
class Record:
    """One decoded record; `data` is a view into the segment and valid as long as that.

    ENTRY adds the next entry. HARD_STATE sets term, vote (`data`: the voted node's id, empty for
    none) and, in place of the index, the member's flags (bit 0: restoring, bit 1: suspect).
    TRUNCATE cuts the log from `index` on; the entry before has `term`. BASE says that the log ends
    at (`index`, `term`): a log that has this entry is cut after it, any other becomes empty and
    continues after it. END removes the group.
    """

    kind: RecordKind
    group: int
    index: int
    term: int
    data: memoryview


class Batch(NamedTuple):
    """A complete WAL batch of a segment whose checksum matches; ``end`` is the offset after it."""

    number: int
    body: memoryview
    end: int
    sealed: bool


class Seal(NamedTuple):
    """The sealer of one batch's records, and the identity of that batch."""

    sealer: Sealer
    salt: bytes
    number: int

    def context(self, position: int, header: bytes | memoryview) -> bytes:
        """The bytes that the data of the record at ``position`` is bound to."""
        return _CONTEXT.pack(self.salt, self.number, position) + header


class MalformedRecordError(ValueError):
    """The body of a batch with a good checksum does not decode."""


class UnsupportedVersionError(ValueError):
    """A newer release wrote the log. Reading on could cut sound data as a torn tail."""


def batch_header(salt: bytes, number: int, *body: bytes, sealed: bool = False) -> bytes:
    """Return the header of WAL batch `number`; its body is given in parts."""
    version = SEALED_VERSION if sealed else PLAIN_VERSION
    head = _BATCH.pack(salt, number, sum(map(len, body)), version)
    crc = crc32c(head)
    for part in body:
        # Keep the interpreter's lock, as in `blocks`: the event loop would take it meanwhile.
        crc = crc32c(part, crc, gil_release_mode=0)
    return head + _CRC.pack(crc)


def record_header(kind: RecordKind, group: int, index: int, term: int, data_length: int) -> bytes:
    """Return the header of a record; its data follows."""
    return _RECORD.pack(kind, group, index, term, data_length)


def hard_state_record(group: int, term: int, voted_for: str | None, flags: int = 0) -> bytes:
    """Return a whole HARD_STATE record."""
    vote = (voted_for or "").encode()
    return _RECORD.pack(RecordKind.HARD_STATE, group, flags, term, len(vote)) + vote


def mark_record(kind: RecordKind, group: int, index: int, term: int) -> bytes:
    """Return a whole record without data: TRUNCATE, BASE or END."""
    return _RECORD.pack(kind, group, index, term, 0)


def read_batch(segment: memoryview, offset: int, salt: bytes) -> Batch | None:
    """Return the batch that starts at `offset`, or None unless a whole, sound one does.

    Raises UnsupportedVersionError for a sound batch of another version.
    """
    body_start = offset + BATCH_HEADER_BYTES
    if body_start > len(segment):
        return None
    found_salt, number, length, version = _BATCH.unpack_from(segment, offset)
    end = body_start + length
    # The length is not checked yet, so it may be anything: it must not lead out of the segment.
    if found_salt != salt or end > len(segment):
        return None
    (expected,) = _CRC.unpack_from(segment, body_start - _CRC.size)
    body = segment[body_start:end]
    if crc32c(body, crc32c(segment[offset : offset + _BATCH.size])) != expected:
        return None
    # After the checksum: a damaged version byte is damage, not a newer release.
    if version not in _SEALED:
        raise UnsupportedVersionError(
            f"WAL batch {number} has version {version}, above {SEALED_VERSION}"
        )
    return Batch(number, body, end, _SEALED[version])


def find_batch(data: bytes, start: int, salt: bytes) -> int | None:
    """Return the offset of the first sound batch at or after `start`, or None."""
    view = memoryview(data)
    offset = data.find(salt, start)
    while offset >= 0:
        # Any offset: the length of the damaged batch before cannot be trusted.
        if read_batch(view, offset, salt) is not None:
            return offset
        offset = data.find(salt, offset + 1)
    return None


def sealed_body(body: bytes, seal: Seal) -> bytes:
    """Return the body of a batch with the data of every record sealed."""
    parts: list[bytes] = []
    # Sealed by the writer thread, record by record: only there is the number of the batch known, to
    # which each frame is bound.
    for position, record in enumerate(records(memoryview(body))):
        size = len(record.data) + SEAL_BYTES
        header = record_header(record.kind, record.group, record.index, record.term, size)
        parts.append(header)
        parts.append(seal.sealer.seal(record.data, seal.context(position, header)))
    return b"".join(parts)


def records(body: memoryview, seal: Seal | None = None) -> Iterator[Record]:
    """Yield the records of a batch; `seal` opens sealed ones.

    Raises MalformedRecordError at the first record that is not sound.
    """
    for position, (record, header) in enumerate(_framed(body)):
        if seal is not None:
            try:
                opened = seal.sealer.open(record.data, seal.context(position, header))
            except SealBrokenError as error:
                raise MalformedRecordError(f"record {position}: {error}") from error
            record.data = memoryview(opened)
        if len(record.data) and record.kind not in _WITH_DATA:
            raise MalformedRecordError(f"{record.kind.name} carries data")
        yield record


def _framed(body: memoryview) -> Iterator[tuple[Record, memoryview]]:
    """Yield the records as stored, without opening them, and the bytes of their headers."""
    offset, size = 0, len(body)
    while offset < size:
        data_start = offset + RECORD_HEADER_BYTES
        if data_start > size:
            raise MalformedRecordError(f"record at {offset} is cut short")
        kind, group, index, term, length = _RECORD.unpack_from(body, offset)
        header = body[offset:data_start]
        offset = data_start + length
        if offset > size:
            raise MalformedRecordError(f"record of {length} bytes extends beyond its batch")
        try:
            record = Record(_KINDS[kind], group, index, term, body[data_start:offset])
        except KeyError:
            raise MalformedRecordError(f"{kind} is not a kind of record") from None
        yield record, header


def voted_for(record: Record) -> str | None:
    """Return the vote of a HARD_STATE record. Raises MalformedRecordError unless it is UTF-8."""
    try:
        return str(record.data, "utf-8") or None
    except UnicodeDecodeError as error:
        raise MalformedRecordError("vote is not UTF-8") from error
