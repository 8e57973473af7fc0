"""A stream machine with the store and the blocks that a node gives it, all in memory."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from contrail_common.columns.blocks import Block, columns_of, join_blocks
from contrail_common.columns.sealed_columns import Seals
from contrail_common.model import Advisory, ConsumerConfig, Expected, Headers, Rollup, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.expected import HashedExpected, ProvenExpected
from contrail_storage.core.facts import MessageFacts, SubjectFacts, facts_of
from contrail_storage.core.id_index import ID_BYTES, NO_ID, IdHashes
from contrail_storage.core.results import Appended, Refused, Result, Row, Writes
from contrail_storage.core.stream.data_loss import Recount
from contrail_storage.core.stream.removal import deletion
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.core.stream.strip_dead import between_live, strip_dead
from contrail_storage.core.stream.ttl import raised_ttls
from contrail_storage.store.windows import facts_of_blocks

SHARD = 7
_WINDOW = 8


@dataclass(frozen=True)
class Message:
    """One message to append."""

    subject: str
    payload: bytes = b""
    headers: Headers | None = None
    msg_id: str | None = None
    expected: Expected | None = None
    rollup: Rollup | None = None
    ttl_ns: int | None = None


@functools.cache
def hash_of(message_id: str | None) -> bytes:
    """The 128 bits that stand for a message id."""
    if not message_id:
        return NO_ID
    return hashlib.blake2b(message_id.encode(), digest_size=ID_BYTES).digest()


def append_of(messages: Sequence[Message], *, atomic: bool = False) -> cmd.Append:
    """The command that appends ``messages``."""
    subjects = sorted({message.subject for message in messages})
    index = np.array([subjects.index(message.subject) for message in messages], np.uint32)
    expected = {
        at: hashed_expected(message.expected)
        for at, message in enumerate(messages)
        if message.expected is not None
    }
    return cmd.Append(
        subjects,
        index.tobytes(),
        columns_of([each.payload for each in messages], [each.headers for each in messages]),
        b"".join(hash_of(message.msg_id) for message in messages)
        if any(message.msg_id for message in messages)
        else None,
        expected or None,
        {at: each.rollup for at, each in enumerate(messages) if each.rollup} or None,
        atomic,
        {at: each.ttl_ns for at, each in enumerate(messages) if each.ttl_ns is not None} or None,
    )


def sealed(config: StreamConfig, command: cmd.Append) -> cmd.Append:
    """``command`` as it is logged where subjects have keys: the machine sees no content."""
    columns, ttls = raised_ttls(config, command.columns, command.ttls)
    cells = columns.in_cells()
    cells.seals = Seals.of([1 << 32] * columns.count, columns.sizes())
    return msgspec.structs.replace(command, columns=cells, ttls=ttls)


def removal_of(
    machine: StreamMachine,
    subjects: Iterable[str],
    to_seq: int = 1 << 62,
    reason: cmd.RemovalReason = "purge",
) -> cmd.Remove:
    """What a leader proposes to remove the messages of subjects below a sequence."""
    counters, ids = machine.counters, machine.subjects.ids
    seqs = np.arange(counters.first_seq, min(to_seq, counters.last_seq + 1))
    seqs, sids, sizes, _ = deletion.live_messages(machine, seqs)
    own = np.isin(sids, [ids.get(subject, -1) for subject in subjects])
    return cmd.Remove.of(reason, seqs[own], sids[own], sizes[own])


def hashed_expected(expected: Expected) -> HashedExpected:
    """Expectations as they stand in a command."""
    return HashedExpected(
        expected.stream,
        expected.last_seq,
        expected.last_subject_seq,
        expected.last_subject_seq_subject,
        None if expected.last_msg_id is None else hash_of(expected.last_msg_id),
        *((expected.as_of, expected.newest) if isinstance(expected, ProvenExpected) else ()),
    )


def configure(config: StreamConfig) -> cmd.ConfigureStream:
    """The command that makes or changes the stream."""
    return cmd.ConfigureStream(config, "made-once", b"k" * 32)


def consumer_config(name: str, **fields: object) -> ConsumerConfig:
    """A durable consumer's configuration."""
    return ConsumerConfig(name=name, durable=True, **fields)  # type: ignore[arg-type]


Outcome = tuple[str, int]
"""What became of a message: ("stored" or "duplicate", sequence) or ("refused", code)."""


def outcomes(result: Result, count: int) -> list[Outcome]:
    """The outcome of each message of an append."""
    if isinstance(result, Refused):
        return [("refused", result.code)] * count
    assert isinstance(result, Appended)
    assert result.count == count
    seq = result.first_seq
    found: list[Outcome] = []
    for at in range(count):
        verdict = (result.exceptions or {}).get(at)
        if isinstance(verdict, Refused):
            found.append(("refused", verdict.code))
        elif verdict is not None:
            found.append(("duplicate", verdict))
        else:
            found.append(("stored", seq))
            seq += 1
    return found


class RowStore:
    """The rows of a store: a dict, changed by operations in their order."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def write(self, operations: Iterable[Row]) -> None:
        """Take the operations one after the other."""
        for operation in operations:
            match operation:
                case ("put", key, value):
                    self.rows[key] = value
                case ("delete", key):
                    self.rows.pop(key, None)
                case ("delete_range", start, stop):
                    for key in [key for key in self.rows if start <= key < stop]:
                        del self.rows[key]

    def scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """(key, value) under ``prefix`` in key order."""
        return [(key, self.rows[key]) for key in sorted(self.rows) if key.startswith(prefix)]


class Shelf:
    """The blocks of a stream that are not wholly below its first sequence.

    Asking for a message whose block is gone fails, as it would on a node. ``joined`` neighbours are
    answered as one run: replicas merge their blocks as they like.
    """

    def __init__(self, joined: int = 1) -> None:
        self.blocks: list[Block] = []
        self._joined = joined

    def add(self, block: Block) -> None:
        """The newest block."""
        assert not self.blocks or self.blocks[-1].last_seq < block.base_seq
        self.blocks.append(block)

    def trim(self, first_seq: int) -> None:
        """Drop the blocks wholly below ``first_seq``."""
        self.blocks = [block for block in self.blocks if block.last_seq >= first_seq]

    def reclaim(self, is_live: Callable[[int], bool]) -> None:
        """Drop what has no live message, all but the last, and empty the rest of what is gone."""
        kept: list[Block] = []
        for block in self.blocks:
            seqs = range(block.base_seq, block.last_seq + 1)
            live = np.array([is_live(seq) for seq in seqs])
            if block is self.blocks[-1]:
                kept.append(strip_dead(block, live))
            elif live.any():
                kept += between_live(block, live, gap=1)
        self.blocks = kept

    def clear(self) -> None:
        """The stream is gone."""
        self.blocks = []

    def facts_at(self, seq: int) -> MessageFacts:
        """Facts of the run that holds ``seq``."""
        for at, block in enumerate(self.blocks):
            if block.base_seq <= seq <= block.last_seq:
                start = at - at % self._joined
                near = self.blocks[start : start + self._joined]
                if near[-1].last_seq + 1 - near[0].base_seq > sum(one.count for one in near):
                    near = [block]  # what lay between them is gone
                return facts_of(join_blocks(near))
        raise AssertionError(f"the block of sequence {seq} is gone")

    def subjects_at(self, seq: int) -> SubjectFacts:
        """Facts of the window that holds ``seq``, if it is full and no blocks are joined."""
        facts, base_seq = self.facts_at(seq), seq - seq % _WINDOW
        if self._joined > 1 or base_seq + _WINDOW > self.blocks[-1].last_seq:
            return facts
        return facts_of_blocks(base_seq, base_seq + _WINDOW, self.blocks)


@dataclass
class Rig:
    """A machine, its rows and its blocks; ``restart`` builds the machine anew from the rows."""

    shelf: Shelf = field(default_factory=Shelf)
    store: RowStore = field(default_factory=RowStore)
    index: int = 0
    reported: list[Advisory] = field(default_factory=list)
    skipped_ns: int = 0
    """The sum of the jumps of log time."""

    def __post_init__(self) -> None:
        self.machine = StreamMachine(SHARD, self.shelf)

    def apply(self, time_ns: int, *commands: cmd.Command) -> list[Result]:
        """Apply one entry: its results; what it writes is written."""
        self.index += 1
        writes = Writes()
        results = [
            self.machine.apply(self.index, time_ns, command, writes, self.skipped_ns)
            for command in commands
        ]
        self.store.write(writes.rows)
        self.reported += writes.advisories
        for shard, block in writes.blocks:
            assert shard == SHARD
            self.shelf.add(block)
        if SHARD in writes.trimmed:
            self.shelf.trim(writes.trimmed[SHARD])
        if SHARD in writes.dropped:
            self.shelf.clear()
        return results

    def deadline_rows(self) -> dict[tuple[int, int], list[int]]:
        """The deadline rows: sequences by deadline and first sequence."""
        prefix = keys.shard_key(keys.DEADLINE, SHARD)
        return {
            keys.deadline_of(key): np.frombuffer(row, np.int64).tolist()
            for key, row in self.store.scan(prefix)
        }

    def recount(self, *, marks_lost: bool = False) -> tuple[int, list[tuple[int, int]]]:
        """Count what the blocks hold, as after damage, and load that; returns what is lost."""
        recount, writes = Recount(self.machine, marks_lost=marks_lost), Writes()
        for block in self.shelf.blocks:
            recount.take(facts_of(block))
        lost = recount.finish(0, writes)
        self.store.write(writes.rows)
        self.restart()
        return lost

    def begin_numbers_at(self, number: int) -> None:
        """New subjects get numbers from ``number`` on, as behind many that came and went."""
        writes = Writes()
        self.machine.subjects.restore_next_id(number, writes)
        self.store.write(writes.rows)

    def restart(self) -> None:
        """Throw the machine away and load it from its rows."""
        self.machine = StreamMachine.load(SHARD, self.shelf, self.store.scan)


def picture(machine: StreamMachine, message_ids: Iterable[str] = ()) -> dict[str, object]:
    """Everything that a machine knows, as values that compare."""
    counters, table = machine.counters, machine.subjects
    return {
        "record": repr(machine.record),
        "counters": repr(counters),
        "next subject": table.next_id,
        "subjects": {
            name: (
                sid,
                int(table.first[table.numbered.slot(sid)]),
                int(table.last[table.numbered.slot(sid)]),
                int(table.counts[table.numbered.slot(sid)]),
            )
            for sid, name in table.live()
        },
        "deleted": [
            seq
            for seq in range(counters.first_seq, min(counters.last_seq, counters.first_seq + 999))
            if seq in machine.deleted
        ],
        "exempt": machine.exempt.pages(),
        "ids": {
            each: int(machine.dedupe.find(IdHashes.of(hash_of(each)))[0]) for each in message_ids
        },
        "producers": machine.producers.archived(),
        "consumer ids": dict(machine.consumer_ids),
        "consumers": {
            number: {
                "config": repr(each.config),
                "created": each.created_ns,
                "version": each.version,
                "epoch": each.epoch,
                "next": each.next_seq,
                "delivered": repr(each.delivered),
                "floor": repr(each.floor),
                "pending": {seq: repr(item) for seq, item in each.pending.items()},
                "acked ahead": sorted(each.acked_ahead),
                "given up": list(each.given_up),
                "pinned": each.pinned and (each.pinned.encode(), each.pinned.end_seq),
            }
            for number, each in machine.consumers.items()
        },
    }
