"""Restoring a shard from the records of an archive (``stream.archive_records`` writes them).

A restore applies parts, each an entry of the log, before the stream exists; the last command
creates it. After a crash, the rows of the store and the log together have all parts so far.
"""

from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.columns.blocks import BlockCorruptError, decode_block
from contrail_storage.core import commands as cmd
from contrail_storage.core.archive import format as archive
from contrail_storage.core.archive.format import (
    ArchiveError,
    Consumer,
    DeadlineRows,
    DeletedPages,
    ExemptPages,
    Ids,
    MorePending,
    Record,
    Subjects,
)
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.pending_deliveries import moved
from contrail_storage.core.pinned import Pinned
from contrail_storage.core.results import Done, Refused, Result, Step
from contrail_storage.core.stream.removal import limits
from contrail_storage.core.stream.shard_state import Counters, ShardState, StreamRecord

_encode: Final = msgspec.msgpack.Encoder().encode


def restore_part(state: ShardState, step: Step, command: cmd.RestorePart) -> Result:
    """Add some records of an archive to the shard."""
    if state.record is not None:
        return Refused(errors.STREAM_RESTORE_EXISTS.code)
    # The configuration comes with the last command only, and blocks are stored before it.
    state.restored_with = command.compression
    mark = step.writes.mark(state.shard_id)
    try:
        for record in command.records:
            _take_up(state, step, Record(*record))
    except (ArchiveError, BlockCorruptError) as error:
        # Only the rows are rolled back. The caller drops the shard, and its memory with it.
        step.writes.roll_back(mark)
        return Refused(errors.ARCHIVE_INVALID.code, str(error))
    return Done()


def finish_restore(state: ShardState, step: Step, command: cmd.FinishRestore) -> Result:
    """Create the stream once all parts are there."""
    if state.record is not None:
        return Refused(errors.STREAM_RESTORE_EXISTS.code)
    header, writes = command.header, step.writes
    state.subjects.restore_next_id(header.next_subject, writes)
    state.record = StreamRecord(
        header.config,
        header.incarnation,
        header.hash_key,
        header.created_ns,
        step.index,  # the version starts at the index, as for a new stream
        header.next_consumer,
        header.shard,
    )
    state.counters = Counters(
        header.first_seq,
        header.last_seq,
        header.messages,
        header.bytes,
        header.last_time_ns,
        header.last_id,
        header.digest,
        dict(header.replaced),
        header.keep_from,
        header.keep_to,
    )
    state.producers.restore(header.producers, writes)
    state.loss = header.loss
    if state.loss is not None:
        state.write_loss(writes)
    # The last messages may be in no block, if they were deleted: readers must not wait for them.
    writes.reached[state.shard_id] = header.last_seq
    state.write_counters(writes)
    state.write_record(writes)
    limits.recheck_subjects(state)
    return Done()


def _take_up(state: ShardState, step: Step, record: Record) -> None:
    """Add one record, which was checked before. Raises BlockCorruptError or ArchiveError."""
    kind, payload = record
    writes = step.writes
    if kind == archive.SUBJECTS:
        subjects = archive.decoded(payload, Subjects)
        state.subjects.restore(subjects.rows, subjects.names, writes)
    elif kind == archive.DELETED:
        state.deleted.restore(archive.decoded(payload, DeletedPages).pages, writes)
    elif kind == archive.EXEMPT:
        state.exempt.restore(archive.decoded(payload, ExemptPages).pages, writes)
    elif kind == archive.DEADLINES:
        state.deadlines.restore(archive.decoded(payload, DeadlineRows).rows, writes)
    elif kind == archive.IDS:
        state.dedupe.restore(archive.decoded(payload, Ids).runs, step)
    elif kind == archive.CONSUMER:
        _take_up_consumer(state, step, archive.decoded(payload, Consumer))
    elif kind == archive.PENDING:
        more = archive.decoded(payload, MorePending)
        consumer = state.consumers[more.number]
        consumer.pending.update(moved(more.pending, -step.skipped_ns))
        consumer.given_up.take_up(more.given_up)
        consumer.write_snapshot(writes)
    else:
        writes.blocks.append((state.shard_id, decode_block(payload)))


def _take_up_consumer(state: ShardState, step: Step, archived: Consumer) -> None:
    # Versions begin at the index, as those of a new consumer do.
    pending = moved(archived.state.pending, -step.skipped_ns)
    snapshot = msgspec.structs.replace(archived.state, version=step.index, pending=pending)
    consumer = ConsumerMachine.load(state.shard_id, archived.number, _encode(snapshot))
    pinned = Pinned.decode(archived.pinned, snapshot.pinned_end)
    if pinned is not None:
        consumer.pin(pinned, step.writes)
    consumer.write_snapshot(step.writes)
    state.consumers[archived.number] = consumer
    state.consumer_ids[snapshot.config.name] = archived.number
