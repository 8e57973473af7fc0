"""A stream machine out of its state into archive records, and back.

Restoring goes by parts, each an entry of the log, before the stream exists: the last command makes
it. Whatever is behind a crash, rows of the store and log together are all parts so far.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common.blocks import Block, MessageColumns, decode_block, encode_block, join_columns
from contrail_storage.core import archive
from contrail_storage.core.archive import ArchiveHeader, DeletedPages, Ids, Record, Subjects
from contrail_storage.core.consumer_machine import ConsumerMachine, Pending, Snapshot
from contrail_storage.core.results import Writes

if TYPE_CHECKING:
    from contrail_storage.core.stream_machine import StreamMachine

_PAGES: Final = 256
_ID_BYTES: Final = 128 * 1024
_PENDING: Final = 4_096

_encode: Final = msgspec.msgpack.Encoder().encode


class Consumer(msgspec.Struct, array_like=True, frozen=True):
    """A consumer with its number; more of what it has pending may follow."""

    number: int
    state: Snapshot


class MorePending(msgspec.Struct, array_like=True, frozen=True):
    """More of what the consumer before has pending, by sequence."""

    number: int
    pending: dict[int, Pending]


# Out -------------------------------------------------------------------------------------------


def header_of(machine: "StreamMachine") -> ArchiveHeader:
    """The header of an archive of a stream, which exists."""
    record, counters = machine.record, machine.counters
    assert record is not None
    return ArchiveHeader(
        config=record.config,
        incarnation=record.incarnation,
        hash_key=record.hash_key,
        created_ns=record.created_ns,
        first_seq=counters.first_seq,
        last_seq=counters.last_seq,
        messages=counters.messages,
        bytes=counters.bytes,
        last_time_ns=counters.last_time_ns,
        last_id=counters.last_id,
        digest=counters.digest,
        replaced=counters.replaced,
        next_subject=machine.subjects.next_id,
        next_consumer=record.next_consumer_id,
        part=record.part,
    )


def state_records(machine: "StreamMachine", *, consumers: bool) -> Iterator[Record]:
    """All records of an archive but those of its blocks and the last."""
    yield Record(archive.HEADER, _encode(header_of(machine)))
    for rows, names in machine.subjects.parts():
        yield Record(archive.SUBJECTS, _encode(Subjects(rows, names)))
    pages = machine.deleted.pages()
    for start in range(0, len(pages), _PAGES):
        yield Record(archive.DELETED, _encode(DeletedPages(pages[start : start + _PAGES])))
    runs: list[tuple[int, bytes, bytes]] = []
    size = 0
    for run in machine.dedupe.runs():
        runs.append(run)
        size += len(run[1])
        if size >= _ID_BYTES:
            yield Record(archive.IDS, _encode(Ids(runs)))
            runs, size = [], 0
    if runs:
        yield Record(archive.IDS, _encode(Ids(runs)))
    for consumer in machine.consumers.values() if consumers else ():
        yield from _consumer_records(consumer)


def _consumer_records(consumer: ConsumerMachine) -> Iterator[Record]:
    state = consumer.snapshot()
    pending = list(state.pending.items())
    first = msgspec.structs.replace(state, pending=dict(pending[:_PENDING]))
    yield Record(archive.CONSUMER, _encode(Consumer(consumer.consumer_id, first)))
    for start in range(_PENDING, len(pending), _PENDING):
        more = MorePending(consumer.consumer_id, dict(pending[start : start + _PENDING]))
        yield Record(archive.PENDING, _encode(more))


def block_record(machine: "StreamMachine", block: Block) -> Record | None:
    """The record of a block: what is not live has neither payload nor headers in it.

    None for a block that lies wholly below the first sequence.
    """
    first_seq = machine.counters.first_seq
    if block.last_seq < first_seq:
        return None
    if block.base_seq < first_seq:
        at = first_seq - block.base_seq
        columns = block.columns.slice(at, block.count)
        block = Block(first_seq, block.times_ns[at:], block.subject_ids[at:], columns)
    live = machine.deleted.live_mask(block.base_seq, block.count)
    if live is not None and not live.all():
        columns = _without(block.columns, live)
        block = Block(block.base_seq, block.times_ns, block.subject_ids, columns)
    return Record(archive.BLOCK, encode_block(block, 0))


def _without(columns: MessageColumns, live: NDArray[np.bool_]) -> MessageColumns:
    """``columns`` with nothing in the place of what is not ``live``."""
    borders = [0, *(np.flatnonzero(np.diff(live)) + 1).tolist(), len(live)]
    parts = [
        columns.slice(start, stop)
        if live[start]
        else MessageColumns(stop - start, bytes(4 * (stop - start + 1)), b"")
        for start, stop in pairwise(borders)
    ]
    return join_columns(parts)


# In --------------------------------------------------------------------------------------------


def take_record(machine: "StreamMachine", record: Record, index: int, writes: Writes) -> None:
    """Take up a record that was found sound; raises BlockCorruptError or ArchiveError if not."""
    kind, payload = record
    if kind == archive.SUBJECTS:
        subjects = archive.decoded(payload, Subjects)
        machine.subjects.restore(subjects.rows, subjects.names, writes)
    elif kind == archive.DELETED:
        machine.deleted.restore(archive.decoded(payload, DeletedPages).pages, writes)
    elif kind == archive.IDS:
        machine.dedupe.restore(archive.decoded(payload, Ids).runs, index, writes)
    elif kind == archive.CONSUMER:
        consumer = archive.decoded(payload, Consumer)
        # Versions begin at the index, as those of a new consumer do.
        state = msgspec.structs.replace(consumer.state, version=index)
        restored = ConsumerMachine.load(machine.shard, consumer.number, _encode(state))
        restored.write_snapshot(writes)
        machine.consumers[consumer.number] = restored
        machine.consumer_ids[state.config.name] = consumer.number
    elif kind == archive.PENDING:
        more = archive.decoded(payload, MorePending)
        restored = machine.consumers[more.number]
        restored.pending.update(more.pending)
        restored.write_snapshot(writes)
    else:
        writes.blocks.append((machine.shard, decode_block(payload)))
