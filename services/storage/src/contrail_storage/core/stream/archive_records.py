"""The state of a shard as the records of an archive, which ``stream.restore`` reads."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
import numpy as np

from contrail_common.columns.blocks import Block, MessageColumns, encode_block
from contrail_storage.core import key_layout as keys
from contrail_storage.core.archive import format as archive
from contrail_storage.core.archive.format import (
    Consumer,
    DeadlineRows,
    DeletedPages,
    ExemptPages,
    Ids,
    MorePending,
    Record,
    Subjects,
)
from contrail_storage.core.commands import ArchiveHeader
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.pending_deliveries import moved
from contrail_storage.core.stream.deadlines import DeadlineRow
from contrail_storage.core.stream.shard_state import ShardState
from contrail_storage.core.stream.strip_dead import strip_dead

_PAGES: Final = 256
_ID_BYTES: Final = 128 * 1024
_RUN_OVERHEAD: Final = 16
_DEADLINE_BYTES: Final = 128 * 1024
_DEADLINE_OVERHEAD: Final = 16
_PENDING: Final = 4_096
_GIVEN_UP: Final = 1_024

_encode: Final = msgspec.msgpack.Encoder().encode


def header_of(state: ShardState) -> ArchiveHeader:
    """The header of an archive of a stream, which exists."""
    record, counters = state.record, state.counters
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
        next_subject=state.subjects.next_of_archive,
        next_consumer=record.next_consumer_id,
        keep_from=counters.keep_from,
        keep_to=counters.keep_to,
        shard=record.shard,
        loss=state.loss,
        producers=state.producers.archived(),
    )


def state_records(
    state: ShardState,
    deadlines: Iterable[tuple[bytes, bytes]],
    *,
    consumers: bool,
    skipped_ns: int = 0,
) -> Iterator[Record]:
    """Yield all records of an archive except blocks and the end record.

    ``deadlines`` are the shard's rows of that kind, in key order. ``skipped_ns`` is the sum of the
    jumps of its log time: all times in an archive are log times.
    """
    yield Record(archive.HEADER, _encode(header_of(state)))
    for rows, names in state.subjects.parts():
        yield Record(archive.SUBJECTS, _encode(Subjects(rows, names)))
    pages = state.deleted.pages()
    for start in range(0, len(pages), _PAGES):
        yield Record(archive.DELETED, _encode(DeletedPages(pages[start : start + _PAGES])))
    pages = state.exempt.pages()
    for start in range(0, len(pages), _PAGES):
        yield Record(archive.EXEMPT, _encode(ExemptPages(pages[start : start + _PAGES])))
    yield from _deadline_records(state, deadlines)
    runs: list[tuple[int, bytes, bytes]] = []
    size, last_ns, held = 0, state.counters.last_time_ns, len(state.dedupe.held)
    # The window may have become longer since held ids expired: it must not bring them back.
    expired_ns = max(last_ns - state.config.duplicate_window_ns, 0)
    for at, (elapsed_ns, ids, seqs) in enumerate(state.dedupe.runs()):
        # No id is newer than the last message: a jump after that counts for nothing.
        time_ns = min(elapsed_ns + skipped_ns, expired_ns if at < held else last_ns)
        runs.append((time_ns, ids, seqs))
        size += len(ids) + _RUN_OVERHEAD
        if size >= _ID_BYTES:
            yield Record(archive.IDS, _encode(Ids(runs)))
            runs, size = [], 0
    if runs:
        yield Record(archive.IDS, _encode(Ids(runs)))
    for consumer in state.consumers.values() if consumers else ():
        yield from _consumer_records(consumer, skipped_ns)


def _deadline_records(
    state: ShardState, deadlines: Iterable[tuple[bytes, bytes]]
) -> Iterator[Record]:
    """Deadlines of messages that are live."""
    rows: list[DeadlineRow] = []
    size = 0
    for key, row in deadlines:
        seqs = np.frombuffer(row, np.int64)
        # Rows of removed messages stay until they are due. A check of the archive would refuse
        # them.
        live = (seqs >= state.counters.first_seq) & state.deleted.are_live(seqs)
        if live.any():
            rows.append((keys.deadline_of(key)[0], seqs[live].tobytes()))
            size += len(row) + _DEADLINE_OVERHEAD
        if size >= _DEADLINE_BYTES:
            yield Record(archive.DEADLINES, _encode(DeadlineRows(rows)))
            rows, size = [], 0
    if rows:
        yield Record(archive.DEADLINES, _encode(DeadlineRows(rows)))


def _consumer_records(consumer: ConsumerMachine, skipped_ns: int) -> Iterator[Record]:
    whole = consumer.snapshot()
    pending = list(moved(whole.pending, skipped_ns).items())
    given_up = whole.given_up
    first = msgspec.structs.replace(
        whole, pending=dict(pending[:_PENDING]), given_up=given_up[:_GIVEN_UP]
    )
    pinned = b"" if consumer.pinned is None else consumer.pinned.encode()
    yield Record(archive.CONSUMER, _encode(Consumer(consumer.consumer_id, first, pinned)))
    # A consumer may have more pending messages than fit into a record.
    for start in range(_PENDING, len(pending), _PENDING):
        more = MorePending(consumer.consumer_id, dict(pending[start : start + _PENDING]))
        yield Record(archive.PENDING, _encode(more))
    for start in range(_GIVEN_UP, len(given_up), _GIVEN_UP):
        more = MorePending(consumer.consumer_id, {}, given_up[start : start + _GIVEN_UP])
        yield Record(archive.PENDING, _encode(more))


def _as_they_are(columns: MessageColumns) -> MessageColumns:
    return columns


def block_record(
    state: ShardState,
    block: Block,
    opened: Callable[[MessageColumns], MessageColumns] = _as_they_are,
) -> Record | None:
    """The record of a block. Its dead messages have neither payload nor headers.

    ``opened`` returns columns without seals: an archive is plain. Returns None for a block that is
    completely below the first sequence.
    """
    first_seq = state.counters.first_seq
    if block.last_seq < first_seq:
        return None
    # The head may divide a block; what is below it was removed and must not be in an archive.
    if block.base_seq < first_seq:
        at = first_seq - block.base_seq
        columns = block.columns.slice(at, block.count)
        block = Block(first_seq, block.times_ns[at:], block.subject_ids[at:], columns)
    live = state.deleted.live_mask(block.base_seq, block.count)
    if live is not None and not live.all():
        block = strip_dead(block, live)
    plain = opened(block.columns)
    if plain is not block.columns:
        block = Block(block.base_seq, block.times_ns, block.subject_ids, plain)
    return Record(archive.BLOCK, encode_block(block, 0))
