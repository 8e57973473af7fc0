"""Keys of the store: ``u8 kind | u32 shard | ...``, big-endian: ordered by shard and number.

The rows of a shard whose number has the bit ``IN_MEMORY`` are in memory, never in a file.

| kind | key after the shard | value |
|---|---|---|
| ``A`` | - (the u32 is the group) | applied index and term, log time, digest |
| ``B`` | u64 base sequence | block |
| ``I`` | u64 base sequence | index row of the block; empty: removed from its page |
| ``G`` | u64 first sequence covered | page of index rows |
| ``M`` | - | stream record: configuration and identity |
| ``S`` | - | counters |
| ``N`` | u32 subject id | names of this and the following subjects, separated by NUL |
| ``P`` / ``p`` | u32 page / u64 index | subject state: page / delta |
| ``D`` | u64 index | message ids of one entry |
| ``T`` | u64 page | deleted sequences of one page |
| ``V`` | u64 page | sequences of one page that ``max_age`` does not remove |
| ``X`` | u64 deadline, u64 first sequence | sequences that are due then (i64 each) |
| ``C`` / ``c`` | u32 consumer (/ u64 number) | consumer: snapshot / delta |
| ``R`` | u32 group | members of a group (of the meta shard) |
| ``U`` | u32 node | incarnation and newest start of a node (of the meta shard) |
| ``E`` | u64 number | receipt of an erasure (of the meta shard) |
| ``F`` | u32 consumer, u32 number | consumer: messages to deliver first |
| ``J`` | u32 consumer, u32 number | consumer: a chunk of its pending deliveries |
| ``W`` | - | accepted damage |
| ``Q`` | u64 window | subject ids and sizes of the messages of a window |
| ``H`` | - | why the shard has stopped: it needed old messages that cannot be read |
| ``O`` | - | group of the shard (u32) |
| ``Z`` | u32 number | a producer and its last batch |
| ``Y`` | u64 id | empty: a shared subject key that is in use; id 0: the last id (u64) |
| ``K`` | - | second record (checkpoint) |
"""

import struct
from typing import Final

APPLIED: Final = b"A"
BLOCK: Final = b"B"
BLOCK_INDEX: Final = b"I"
BLOCK_PAGE: Final = b"G"
STREAM: Final = b"M"
COUNTERS: Final = b"S"
SUBJECT_NAME: Final = b"N"
SUBJECT_PAGE: Final = b"P"
SUBJECT_DELTA: Final = b"p"
DEDUPE: Final = b"D"
DELETED: Final = b"T"
EXEMPT: Final = b"V"
DEADLINE: Final = b"X"
CONSUMER: Final = b"C"
CONSUMER_DELTA: Final = b"c"
ERASURE: Final = b"E"
MEMBERS: Final = b"R"
NODE: Final = b"U"
PINNED: Final = b"F"
PENDING: Final = b"J"
LOSS: Final = b"W"
STOPPED: Final = b"H"
WINDOW: Final = b"Q"
GROUP: Final = b"O"
SUBJECT_KEY: Final = b"Y"
PRODUCER: Final = b"Z"
MARK_BYTES: Final = 16
"""Bytes of the mark of a subject, a keyed hash, by which its keys are found."""

SHARD_KINDS: Final = (
    BLOCK,
    BLOCK_INDEX,
    BLOCK_PAGE,
    STREAM,
    COUNTERS,
    SUBJECT_NAME,
    SUBJECT_PAGE,
    SUBJECT_DELTA,
    DEDUPE,
    DELETED,
    EXEMPT,
    DEADLINE,
    CONSUMER,
    CONSUMER_DELTA,
    PINNED,
    PENDING,
    LOSS,
    STOPPED,
    WINDOW,
    GROUP,
    SUBJECT_KEY,
    PRODUCER,
)
"""All kinds of rows that belong to one shard."""

META_KINDS: Final = (STREAM, ERASURE, MEMBERS, NODE)
"""All kinds of rows of the meta machine."""

_U32: Final = struct.Struct(">cI")
_U32_U32: Final = struct.Struct(">cII")
_U32_U64: Final = struct.Struct(">cIQ")
_U32_U64_U64: Final = struct.Struct(">cIQQ")
_U32_U32_U32: Final = struct.Struct(">cIII")
_U32_U32_U64: Final = struct.Struct(">cIIQ")


IN_MEMORY: Final = 1 << 31
"""The bit in the number of a shard or group that is kept only in memory."""
META_GROUP: Final = 0
"""The group of the meta machine."""
SHARD_GROUP: Final = 1
"""The group of shards that are not replicated."""
MEMORY_GROUP: Final = IN_MEMORY | SHARD_GROUP
"""The group of shards in memory. It has no log."""


def is_in_memory(shard_id: int) -> bool:
    """Whether the shard or group with ``shard_id`` is kept only in memory."""
    return shard_id >= IN_MEMORY


def shard_key(kind: bytes, shard_id: int) -> bytes:
    """Key of a shard's only row of ``kind``; the prefix, for kinds with more rows."""
    return _U32.pack(kind, shard_id)


def small_key(kind: bytes, shard_id: int, number: int) -> bytes:
    """Key of a row numbered by a u32 (subject id, page, consumer id, producer)."""
    return _U32_U32.pack(kind, shard_id, number)


def large_key(kind: bytes, shard_id: int, number: int) -> bytes:
    """Key of a row numbered by a u64 (sequence, log index, page)."""
    return _U32_U64.pack(kind, shard_id, number)


def consumer_delta_key(shard_id: int, consumer_id: int, number: int) -> bytes:
    """Key of the ``number``-th delta of a consumer."""
    return _U32_U32_U64.pack(CONSUMER_DELTA, shard_id, consumer_id, number)


def deadline_key(shard_id: int, deadline_ns: int, first_seq: int) -> bytes:
    """Key of the messages of one append that share a deadline; the first has ``first_seq``."""
    return _U32_U64_U64.pack(DEADLINE, shard_id, deadline_ns, first_seq)


def deadline_of(key: bytes) -> tuple[int, int]:
    """The deadline and the first sequence in a :func:`deadline_key`."""
    _, _, deadline_ns, first_seq = _U32_U64_U64.unpack(key)
    return deadline_ns, first_seq


def pinned_key(shard_id: int, consumer_id: int, number: int) -> bytes:
    """Key of the ``number``-th row of the messages that a consumer gets first."""
    return _U32_U32_U32.pack(PINNED, shard_id, consumer_id, number)


def pending_key(shard_id: int, consumer_id: int, number: int) -> bytes:
    """Key of the row with that number of a consumer's pending deliveries."""
    return _U32_U32_U32.pack(PENDING, shard_id, consumer_id, number)


def last_number(key: bytes, width: int) -> int:
    """The number in the last ``width`` bytes of ``key``."""
    return int.from_bytes(key[-width:], "big")


def prefix_end(prefix: bytes) -> bytes:
    """The smallest key above every key that starts with ``prefix``."""
    # No prefix is all ones: it begins with the letter of its kind.
    number = int.from_bytes(prefix, "big") + 1
    return number.to_bytes(len(prefix), "big")
