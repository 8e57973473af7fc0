"""Checking that an archive describes a stream, record by record, before it is restored.

Checksums find damage; these checks find archives that were forged. A machine trusts its own rows,
so a restore must only write state that its commands could have produced.
"""

import struct
from typing import Final, NoReturn, cast

import msgspec
import numpy as np

from contrail_common.columns.blocks import Block, BlockCorruptError, decode_block
from contrail_common.columns.header_columns import can_be_sent
from contrail_common.config_rules import (
    ConsumerDraft,
    StreamDraft,
    normalise_consumer,
    normalise_stream,
)
from contrail_common.model import ConsumerConfig, DataLoss, SequencePair
from contrail_common.names import name_problem
from contrail_common.retention_rules import collision, kind_problem
from contrail_common.subjects import subject_problem
from contrail_common.texts import I64Array
from contrail_common.timeunits import INT64_MAX
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
    decoded,
)
from contrail_storage.core.commands import RANGES_MAX, REASON_MAX, ArchiveHeader
from contrail_storage.core.deleted import PAGE, DeletedSet
from contrail_storage.core.given_up import pages_are_sound
from contrail_storage.core.id_index import ID_BYTES
from contrail_storage.core.pinned import Pinned
from contrail_storage.core.producers import PRODUCERS_MAX
from contrail_storage.core.results import Writes
from contrail_storage.core.subjects.subject_table import NOT_LIVE

HASH_KEY_BYTES: Final = 32
_SEQ_MAX: Final = 1 << 62
_NUMBER_MAX: Final = 0xFFFF_FFFF
_GIVEN_MAX: Final = 1 << 31
"""Highest next number that an archive may have; above it half of the 32 bits is still free."""
_SUBJECT_ROW_BYTES: Final = 24


def _refuse(what: str) -> NoReturn:
    raise ArchiveError(f"the archive is inconsistent: {what}")


def _need(condition: bool, what: str) -> None:
    if not condition:
        _refuse(what)


class ArchiveCheck:
    """Checks the records of one shard in order. Raises ArchiveError at the first invalid record.

    A configuration that this server would refuse is an ApiError with the field's name.
    """

    def __init__(self) -> None:
        self.header: ArchiveHeader
        self._deleted = DeletedSet(0)  # complete before the first EXEMPT record
        self._names: set[str] = set()  # of all subjects so far: each occurs once
        self._numbers: list[I64Array] = [np.zeros(0, np.int64)]  # subject numbers, ascending
        # First and last sequence and count of the subjects, parallel to `_numbers`.
        self._rows: list[tuple[I64Array, I64Array, I64Array]] = []
        self._next_subject = 0  # subject numbers ascend: the next is at least this
        self._page = self._exempt_page = -1  # the last page numbers; the next are higher
        self._deadline = (0, 0)  # the last deadline with its first sequence; the next is later
        self._id_seq = self._id_time_ns = 0  # of the last message id; the next are not lower
        self._consumers: dict[str, ConsumerConfig] = {}  # by name; each occurs once
        self._consumer = 0  # number of the last consumer, to which PENDING records belong
        self._pending: set[int] = set()  # pending sequences of that consumer: each occurs once
        self._given_up_page = -1  # the last page number of its given-up messages
        self._blocks: _Blocks | None = None  # made by the first block, or by `finish`

    def take(self, record: Record) -> None:
        """Check the next record."""
        kind, payload = record
        match kind:
            case archive.HEADER:
                self._take_header(decoded(payload, ArchiveHeader))
            case archive.SUBJECTS:
                self._take_subjects(decoded(payload, Subjects))
            case archive.DELETED:
                self._take_deleted(decoded(payload, DeletedPages))
            case archive.EXEMPT:
                self._take_exempt(decoded(payload, ExemptPages))
            case archive.DEADLINES:
                self._take_deadlines(decoded(payload, DeadlineRows))
            case archive.IDS:
                self._take_ids(decoded(payload, Ids))
            case archive.CONSUMER:
                self._take_consumer(decoded(payload, Consumer))
            case archive.PENDING:
                self._take_pending(decoded(payload, MorePending))
            case _:
                self._messages().take(_block(payload))

    def finish(self) -> None:
        """Check what needs all records: the number and sizes of messages. Raises ArchiveError."""
        self._messages().finish()

    @property
    def consumers(self) -> frozenset[str]:
        """Names of the consumers."""
        return frozenset(self._consumers)

    def _take_header(self, header: ArchiveHeader) -> None:
        self.header = header
        config = header.config
        draft = {name: getattr(config, name) for name in StreamDraft.__annotations__}
        normal = normalise_stream(cast(StreamDraft, draft))
        # A configuration of a stream is complete: every command stores it with its defaults filled
        # in. One that changes now was not written by a server.
        _need(normal == config, "the configuration is incomplete")
        _need(len(header.hash_key) == HASH_KEY_BYTES, "the key of message ids")
        _need(len(header.last_id) == ID_BYTES, "the last message id")
        _need(
            1 <= header.first_seq <= header.last_seq + 1 <= _SEQ_MAX, "the first or last sequence"
        )
        _need(
            0 <= header.messages <= header.last_seq + 1 - header.first_seq, "the number of messages"
        )
        _need(
            bool(header.messages) or header.first_seq == header.last_seq + 1,
            "the number of messages",
        )
        _need(0 <= header.bytes <= INT64_MAX, "the number of bytes")
        _need(0 <= header.created_ns <= INT64_MAX, "the times of the stream")
        _need(0 <= header.last_time_ns <= INT64_MAX, "the times of the stream")
        _need(0 <= header.digest <= _NUMBER_MAX, "the digest")
        _need(0 <= header.next_subject <= _NUMBER_MAX, "the next subject number")
        _need(1 <= header.next_consumer <= _GIVEN_MAX, "the next consumer number")
        _need(header.loss is None or _is_sound_loss(header.loss), "the record of data loss")
        _need(
            0 <= header.keep_from <= header.keep_to <= header.last_seq + 1,
            "the range of messages kept by interest",
        )
        for subject, to_seq in header.replaced.items():
            _need(subject_problem(subject) is None, "a subject")
            _need(0 <= to_seq <= header.last_seq + 1, "a roll-up")
        _check_producers(header)

    def _take_subjects(self, subjects: Subjects) -> None:
        rows, count = subjects.rows, len(subjects.names)
        _need(count > 0 and len(rows) == _SUBJECT_ROW_BYTES * count, "subjects")
        numbers = np.frombuffer(rows, np.uint32, count).astype(np.int64)
        first = np.frombuffer(rows, np.int64, count, 4 * count)
        last = np.frombuffer(rows, np.int64, count, 12 * count)
        counts = np.frombuffer(rows, np.uint32, count, 20 * count).astype(np.int64)
        _need(bool((np.diff(numbers, prepend=self._next_subject - 1) > 0).all()), "subjects")
        self._next_subject = int(numbers[-1]) + 1
        _need(self._next_subject <= self.header.next_subject, "subjects")
        _need(int(first.min()) >= 1 and int(counts.min()) >= 1, "subjects")
        for name in subjects.names:
            _need(name not in self._names and subject_problem(name) is None, "a subject's name")
            self._names.add(name)
        self._numbers.append(numbers)
        self._rows.append((first, last, counts))

    def _take_deleted(self, deleted: DeletedPages) -> None:
        self._page = self._check_pages(deleted.pages, self._page, "deleted sequences")
        self._deleted.restore(deleted.pages, Writes())

    def _check_pages(self, pages: list[tuple[int, bytes]], last: int, what: str) -> int:
        """Check that pages ascend after the number ``last``; return the last number."""
        low, high = self.header.first_seq // PAGE, self.header.last_seq // PAGE
        for number, page in pages:
            _need(max(last + 1, low) <= number <= high, what)
            _need(len(page) == PAGE // 8, what)
            last = number
        return last

    def _take_exempt(self, exempt: ExemptPages) -> None:
        what = "the messages exempt from max_age"
        self._exempt_page = self._check_pages(exempt.pages, self._exempt_page, what)
        for number, page in exempt.pages:
            marks = np.unpackbits(np.frombuffer(page, np.uint8))
            self._need_live(np.flatnonzero(marks) + number * PAGE, what)

    def _take_deadlines(self, deadlines: DeadlineRows) -> None:
        what = "deadlines"
        for deadline_ns, packed in deadlines.rows:
            _need(len(packed) > 0 and len(packed) % 8 == 0, what)
            seqs = np.frombuffer(packed, np.int64)
            key = deadline_ns, int(seqs[0])
            _need(self._deadline < key and deadline_ns <= INT64_MAX, what)
            _need(bool((seqs[1:] > seqs[:-1]).all()), what)
            self._need_live(seqs, what)
            self._deadline = key

    def _need_live(self, seqs: I64Array, what: str) -> None:
        """Check that the sequences ascend, and that all are of live messages."""
        if not len(seqs):
            return
        first, last = int(seqs[0]), int(seqs[-1])
        _need(self.header.first_seq <= first <= last <= self.header.last_seq, what)
        _need(bool(self._deleted.are_live(seqs).all()), what)

    def _take_ids(self, ids: Ids) -> None:
        _need(bool(ids.runs), "message ids")
        for time_ns, hashes, packed in ids.runs:
            count = len(packed) // 8
            _need(count > 0 and len(packed) == 8 * count, "message ids")
            _need(len(hashes) == ID_BYTES * count, "message ids")
            _need(self._id_time_ns <= time_ns <= self.header.last_time_ns, "times of message ids")
            seqs = np.frombuffer(packed, np.int64)
            _need(bool((np.diff(seqs, prepend=self._id_seq) > 0).all()), "message ids")
            self._id_time_ns, self._id_seq = time_ns, int(seqs[-1])
            _need(self._id_seq <= self.header.last_seq, "message ids")

    def _take_consumer(self, consumer: Consumer) -> None:
        state, config = consumer.state, consumer.state.config
        draft = {name: getattr(config, name) for name in ConsumerDraft.__annotations__}
        normal = normalise_consumer(cast(ConsumerDraft, draft))
        _need(normal == config and config.name not in self._consumers, "a consumer")
        retention, others = self.header.config.retention, self._consumers.values()
        fits = kind_problem(config, retention) or collision(config, retention, others)
        _need(fits is None, "a consumer's filter")
        _need(self._consumer < consumer.number < self.header.next_consumer, "a consumer's number")
        self._consumer = consumer.number
        self._consumers[config.name] = config
        self._pending = set()
        _need(0 <= state.created_ns <= INT64_MAX, "a consumer's time")
        _need(1 <= state.epoch <= _GIVEN_MAX, "a consumer's epoch")
        _need(0 <= state.next_seq <= INT64_MAX, "a consumer's position")
        _need(_is_sound(state.delivered) and _is_sound(state.floor), "a consumer's position")
        _need(all(0 < seq <= INT64_MAX for seq in state.acked_ahead), "a consumer's position")
        self._check_pinned(consumer)
        self._given_up_page = -1
        self._take_pending(MorePending(consumer.number, state.pending, state.given_up))

    def _check_pinned(self, consumer: Consumer) -> None:
        end_seq, what = consumer.state.pinned_end, "the messages a consumer delivers first"
        _need(0 <= end_seq <= self.header.last_seq + 1, what)
        _need(bool(end_seq) == bool(consumer.pinned), what)
        if end_seq:
            pinned = Pinned.decode(consumer.pinned, end_seq)
            _need(pinned is not None and consumer.state.next_seq < end_seq, what)

    def _take_pending(self, more: MorePending) -> None:
        _need(more.number == self._consumer, "the pending deliveries of a consumer")
        for seq, item in more.pending.items():
            _need(
                0 < seq <= self.header.last_seq and seq not in self._pending, "a pending delivery"
            )
            _need(0 < item.attempts <= _GIVEN_MAX, "a pending delivery")
            _need(0 < item.consumer_seq <= INT64_MAX, "a pending delivery")
            _need(0 <= item.deadline_ns <= INT64_MAX, "a pending delivery")
            self._pending.add(seq)
        for number, _ in more.given_up[:1]:
            _need(number > self._given_up_page, "the messages a consumer gave up on")
        _need(
            pages_are_sound(more.given_up, self.header.last_seq),
            "the messages a consumer gave up on",
        )
        for number, _ in more.given_up[-1:]:
            self._given_up_page = number

    def _messages(self) -> "_Blocks":
        if self._blocks is None:
            header, deleted = self.header, self._deleted
            span = header.last_seq + 1 - header.first_seq
            _need(deleted.total == deleted.count(header.first_seq, header.last_seq), "deletions")
            _need(deleted.total == span - header.messages, "the number of messages")
            _need(not span or header.first_seq not in deleted, "the first sequence")
            self._blocks = _Blocks(header, deleted, np.concatenate(self._numbers), self._rows)
        return self._blocks


class _Blocks:
    """Compares the messages in the blocks with the other records of the archive."""

    def __init__(
        self,
        header: ArchiveHeader,
        deleted: DeletedSet,
        numbers: I64Array,
        rows: list[tuple[I64Array, I64Array, I64Array]],
    ) -> None:
        self._header = header
        self._deleted = deleted
        self._numbers = numbers
        self._rows = rows
        self._next_seq = header.first_seq
        self._time_ns = self._bytes = 0
        self._first = np.full(len(numbers), INT64_MAX)
        self._last = np.zeros(len(numbers), np.int64)
        self._counts = np.zeros(len(numbers), np.int64)

    def take(self, block: Block) -> None:
        """Check the next block."""
        header = self._header
        self._pass_gap(block.base_seq, "a block does not follow the one before")
        _need(block.last_seq <= header.last_seq, "a block ends after the last sequence")
        self._next_seq = block.last_seq + 1
        _need(bool((np.diff(block.times_ns, prepend=self._time_ns) >= 0).all()), "times")
        self._time_ns = int(block.times_ns[-1])
        _need(self._time_ns <= header.last_time_ns, "times")
        _need(int(block.subject_ids.max()) < header.next_subject, "the subject of a message")
        live = self._deleted.live_mask(block.base_seq, block.count)
        at = np.arange(block.count) if live is None else np.flatnonzero(live)
        self._bytes += int(block.columns.sizes_at(at).sum())
        self._count(block.subject_ids[at].astype(np.int64), at + block.base_seq)

    def _pass_gap(self, seq: int, what: str) -> None:
        """Check that all sequences before ``seq`` that have no block are deleted."""
        _need(self._next_seq <= seq <= self._deleted.next_live(self._next_seq, seq), what)
        self._next_seq = seq

    def _count(self, sids: I64Array, seqs: I64Array) -> None:
        if not len(sids):
            return
        _need(len(self._numbers) > 0, "the subject of a message")
        at = np.minimum(np.searchsorted(self._numbers, sids), len(self._numbers) - 1)
        _need(bool((self._numbers[at] == sids).all()), "the subject of a message")
        np.minimum.at(self._first, at, seqs)
        np.maximum.at(self._last, at, seqs)
        np.add.at(self._counts, at, 1)

    def finish(self) -> None:
        """Compare the totals of the blocks with the header and the subjects."""
        header = self._header
        self._pass_gap(header.last_seq + 1, "blocks are missing at the end")
        _need(self._bytes == header.bytes, "the size of the messages")
        if not self._rows:
            return
        first, last, counts = (np.concatenate(each) for each in zip(*self._rows, strict=True))
        _need(bool((self._counts == counts).all()), "the number of messages of a subject")
        # The newest message ever stored, which may be deleted. Version 0.2 wrote negative bounds.
        later = last[self._last != last]
        bound = (later < 0) | (later == NOT_LIVE)
        bound[~bound] = ~self._deleted.are_live(later[~bound])
        _need(bool(bound.all()), "the last message of a subject")
        _need(bool((self._last <= np.abs(last)).all()), "the last message of a subject")
        _need(bool((self._first >= first).all()), "the first message of a subject")


def _block(payload: bytes) -> Block:
    try:
        block = decode_block(payload)
    except (BlockCorruptError, ValueError, struct.error) as error:
        raise ArchiveError(f"a block of the archive cannot be read: {error}") from error
    _need(block.count > 0 and block.columns.is_sound(), "the columns of a block")
    headers = block.columns.headers
    _need(headers is None or can_be_sent(headers), "the headers of a message")
    _need(block.columns.seals is None, "a block is encrypted with subject keys")
    return block


def _is_sound(pair: SequencePair) -> bool:
    return all(0 <= number <= INT64_MAX for number in msgspec.structs.astuple(pair))


def _check_producers(header: ArchiveHeader) -> None:
    producers, low_seq = header.producers, 1
    _need(len({name for name, _, _ in producers}) == len(producers) <= PRODUCERS_MAX, "producers")
    for name, number, first_seq in producers:
        _need(name_problem(name) is None and 1 <= number <= INT64_MAX, "a producer")
        _need(first_seq == 0 or low_seq <= first_seq <= header.last_seq + 1, "a producer")
        low_seq = max(low_seq, first_seq)


def _is_sound_loss(loss: DataLoss) -> bool:
    return (
        0 <= loss.accepted_ns <= INT64_MAX
        and 0 <= loss.messages <= _SEQ_MAX
        and 1 <= loss.times <= _GIVEN_MAX
        and len(loss.reason) <= REASON_MAX
        and len(loss.ranges) <= RANGES_MAX
        and all(0 < first <= last <= _SEQ_MAX for first, last in loss.ranges)
    )
