"""Apply committed entries: run the machines in order, answer callers, hand jobs to the writer."""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import structlog

from contrail_common import errors
from contrail_common.columns.blocks import Block, BlockCodec
from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import NO_CHAIN, Chain, next_digest
from contrail_storage.core.commands import (
    META_SHARD,
    AcceptLoss,
    Acknowledge,
    Advance,
    Append,
    Command,
    ConfigureStream,
    CreateGroup,
    Deliver,
    DeliverAcked,
    DropStream,
    Entry,
    FinishRestore,
    KeyCommand,
    ListStream,
    MetaCommand,
    NoteStart,
    NumberedAppend,
    ReceiptCommand,
    RegisterNode,
    ReserveStream,
    RestorePart,
    UnlistStream,
)
from contrail_storage.core.entry_codec import decode_entry, entry_crc
from contrail_storage.core.facts import SubjectFacts
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import ConsumerPut, Done, Refused, Result, Writes
from contrail_storage.core.stream.shard_state import Counters
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.replica.advisories import AdvisoryHub
from contrail_storage.replica.changes import Changes
from contrail_storage.replica.entries import EntryContext, Unapplied
from contrail_storage.replica.shard import Shard, SmallRun
from contrail_storage.replica.store_writer import (
    GoneBlock,
    Job,
    MergeJob,
    PageJob,
    RewriteJob,
    RowJob,
    StoreWriter,
    WriteJob,
    merge_job,
)
from contrail_storage.replica.write_behind import WriteBehind
from contrail_storage.store.block_codecs import codec_of
from contrail_storage.store.block_store import (
    UNREADABLE,
    BlockSpan,
    BlockStore,
    span_of,
)
from contrail_storage.store.shard_facts import ShardFacts
from contrail_storage.store.store_errors import StoreFailedError
from contrail_storage.store.windows import (
    WINDOW_BITS,
    delete_row,
    deletes_below,
    filled_windows,
    window_row,
)

MERGE_BLOCKS: Final = 64
MERGE_BYTES: Final = 128 * 1024
MERGE_MESSAGES: Final = 2_000
_SMALL_BYTES: Final = MERGE_BYTES // 4
_SMALL_MESSAGES: Final = MERGE_MESSAGES // 4
_MAKING: Final = (ConfigureStream, RestorePart, FinishRestore)
_ENDING: Final = (DropStream, AcceptLoss)
"""Commands that a stopped shard accepts: they need no messages, and they end the stop."""
_FREQUENT: Final = frozenset({Acknowledge, Advance, Append, Deliver, DeliverAcked, NumberedAppend})
"""Commands after which the same stream and the same consumers exist, with their configurations."""
_log = structlog.get_logger("contrail.apply")


def _makes(command: Command) -> bool:
    """Whether the command may create a shard."""
    return isinstance(command, _MAKING) and getattr(command, "may_create", True)


class StateDamagedError(Exception):
    """An entry needs stored data that cannot be read; other members of the group may have it."""


class JobSink(Protocol):
    """Accepts the jobs of applied entries, in order."""

    def put(self, job: WriteJob) -> None:
        """Add the job of the next entry."""
        ...

    def flush(self) -> None:
        """Hand on all held jobs."""
        ...


class Applier:
    """Applies entries on the event loop and keeps the shards' runtimes.

    All fields belong to the event loop, except where :meth:`codec_of` reads ``shards``.
    """

    def __init__(
        self,
        meta: MetaMachine,
        blocks: BlockStore,
        writer: StoreWriter,
        on_written: Callable[[], None],
        advisories: AdvisoryHub,
        merge_blocks: int = MERGE_BLOCKS,
        sink: JobSink | None = None,
    ) -> None:
        """``sink`` accepts the jobs; without it, a `WriteBehind` over ``writer`` does."""
        self.meta = meta
        self.written_indexes: dict[int, int] = {}
        """By group: the index up to which every entry is applied and in the store."""
        self.shards: dict[int, Shard] = {}
        """By number. The event loop changes it; the store's writer thread looks shards up."""
        self.chains: dict[int, Chain] = {}
        """By group: the log time and the digest of everything that was applied."""
        self.unwritten_bytes = 0
        """Bytes of applied entries that the store does not have yet."""
        self.changes = Changes()
        """What the applied commands changed."""
        self._blocks = blocks
        self._writer = writer
        self._on_written = on_written
        self._advisories = advisories
        self._merge_blocks = merge_blocks
        self.on_stopped: Callable[[Shard], None] = lambda shard: None
        """Called with a shard that has just stopped; its machine may be partly changed."""
        self.tells: Callable[[int], bool] = lambda group: True
        """Whether this node tells the events of a group; of its members, only one does."""
        self.is_replicated: Callable[[int], bool] = lambda group: False
        """Whether other nodes have the state of a group too."""
        self.on_cluster: Callable[[], None] = lambda: None
        """Called when the groups or nodes of the cluster have changed."""
        self.on_keys: Callable[[int, KeyCommand], None] = lambda shard_id, command: None
        """Called with a shard and each command about its subject keys."""
        self.on_reserved: Callable[[str], None] = lambda name: None
        """Called with the name of each stream that may be being made."""
        self.on_receipts: Callable[[MetaCommand], None] = lambda command: None
        """Called with each command that may have changed receipts of erasures."""
        self._behind: JobSink = sink or WriteBehind(writer, blocks, self.written)

    def new_shard(self, shard_id: int, group: int) -> Shard:
        """Return a shard without a stream, whose entries are in the log of ``group``."""
        machine = StreamMachine(shard_id, ShardFacts(self._blocks, shard_id))
        return Shard(machine, 0, group)

    def hash_key(self, shard_id: int) -> bytes:
        """The key that hashes the message ids of a shard; empty if the shard has no stream."""
        shard = self.shards.get(shard_id)
        record = shard.machine.record if shard is not None else None
        return record.hash_key if record is not None else b""

    def codec_of(self, shard_id: int) -> BlockCodec | None:
        """The codec that compresses the blocks of a shard. The writer's thread calls this too."""
        shard = None if keys.is_in_memory(shard_id) else self.shards.get(shard_id)
        return codec_of(shard.machine.compression) if shard is not None else None

    def apply(self, group: int, index: int, term: int, data: bytes, context: object) -> None:
        """Apply one committed entry; ``data`` is empty for Raft's own entries."""
        own = context if isinstance(context, EntryContext) else None
        job = WriteJob(group, index, term, [])
        if data:
            # Members of one group all decode, also the leader: then they apply the same, whatever
            # it proposed. A node alone keeps what it has, since copies cost a fifth of a publish.
            entry = own.entry if own is not None and own.entry else decode_entry(data)
            writes = Writes()
            results = self._apply_entry(group, index, term, entry, writes)
            # Counted until the store has it: above a bound, the proposer makes no more entries.
            job.bytes = len(data)
            self.unwritten_bytes += job.bytes
            if own is not None:
                # Before the writes are even gathered: the entry is durable in the log, so no caller
                # waits for the store.
                own.resolve(results)
            self._fill(job, writes)
            self._continue_chain(job, data, entry, results)
            self._behind.put(job)
            # After the results: a publisher gets its sequence before a reader can show the message.
            self._advance(writes)
        else:
            job.chain = self.chains.get(group, NO_CHAIN)
            self._behind.put(job)

    def _continue_chain(
        self, job: WriteJob, data: bytes, entry: Entry, results: list[Result | Unapplied]
    ) -> None:
        """Extend the group's digest by an entry that was applied."""
        if keys.is_in_memory(job.group):
            return
        counters: dict[int, Counters] = {}
        for shard_id, _ in entry.commands:
            shard = self.shards.get(shard_id)
            if shard is not None:
                counters[shard_id] = shard.machine.counters
        before = self.chains.get(job.group, NO_CHAIN)
        digest = next_digest(
            before.digest, job.index, job.term, entry_crc(data), results, counters.items()
        )
        time_ns = max(before.time_ns, entry.time_ns)
        self.chains[job.group] = job.chain = Chain(time_ns, digest, entry.skipped_ns)

    def _advance(self, writes: Writes) -> None:
        """Let readers see the appended messages."""
        for shard_id, _ in writes.blocks:
            self._advance_shard(shard_id)
        for shard_id in writes.reached:
            self._advance_shard(shard_id)

    def _advance_shard(self, shard_id: int) -> None:
        shard = self.shards.get(shard_id)
        if shard is None:
            return
        last_seq = shard.machine.counters.last_seq
        if last_seq > shard.applied_seq:
            shard.applied_seq = last_seq
            if shard.listeners:
                shard.notify()

    def flush(self) -> None:
        """Hand all waiting jobs to the store's writer now."""
        self._behind.flush()

    def _apply_entry(
        self, group: int, index: int, term: int, entry: Entry, writes: Writes
    ) -> list[Result | Unapplied]:
        results: list[Result | Unapplied] = []
        for shard_id, command in entry.commands:
            if shard_id == META_SHARD:
                results.append(self.meta.apply(command, writes))
                if isinstance(command, (CreateGroup, NoteStart, RegisterNode)):
                    self.on_cluster()
                if isinstance(command, (ReceiptCommand, RegisterNode)):
                    self.on_receipts(command)
                if isinstance(command, ReserveStream):
                    self.on_reserved(command.name)
                if isinstance(command, (ListStream, UnlistStream)):
                    self._note_listing(command.name)
                if writes.advisories:
                    self._notify(group, writes, entry.time_ns)
                continue
            shard = self.shards.get(shard_id)
            # A shard appears with the first command that may create its stream. A refused command
            # may leave it empty.
            if shard is None and _makes(command):
                shard = self.shards[shard_id] = self.new_shard(shard_id, group)
                # A start finds the shard by this row.
                writes.put(keys.shard_key(keys.GROUP, shard_id), group.to_bytes(4, "big"))
            if shard is None:
                results.append(Refused(errors.STREAM_NOT_FOUND.code))
                continue
            existed = shard.machine.exists
            result = self._apply_to(shard, index, term, entry, command, writes)
            results.append(result)
            self._note_change(shard, existed, command, result)
            if writes.advisories:
                self._notify(group, writes, entry.time_ns, shard.name)
            if isinstance(result, ConsumerPut) and not result.created:
                shard.notify()  # its waiting pulls may get more, even if the caller has left
            if not existed and shard.machine.exists and not shard.machine.counters.messages:
                # Numbering may begin above 1; there are no messages below to wait for.
                shard.applied_seq = shard.machine.counters.last_seq
        return results

    def _note_change(
        self, shard: Shard, existed: bool, command: Command, result: Result | Unapplied
    ) -> None:
        machine, changes = shard.machine, self.changes
        changes.shards.add(machine.shard_id)
        if machine.deleted.touched:
            changes.deletions.add(machine.shard_id)
        if type(command) in _FREQUENT:
            return
        if isinstance(command, KeyCommand) and isinstance(result, Done):
            self.on_keys(machine.shard_id, command)
        elif existed != machine.exists or isinstance(command, AcceptLoss):
            changes.note_all(machine.shard_id)
        elif not isinstance(result, Unapplied):
            changes.note_consumer(machine.shard_id, command, result)

    def _note_listing(self, name: str) -> None:
        """Note all shards of a stream: whether it is listed, or its subjects, may have changed."""
        entry = self.meta.streams.get(name)
        for shard_id in entry.shard_ids if entry is not None else ():
            self.changes.note_all(shard_id)

    def _notify(self, group: int, writes: Writes, time_ns: int, stream: str = "") -> None:
        if self.tells(group):
            self._advisories.notify(writes.advisories, time_ns, stream)
        writes.advisories.clear()

    def _apply_to(
        self,
        shard: Shard,
        index: int,
        term: int,
        entry: Entry,
        command: Command,
        writes: Writes,
    ) -> Result | Unapplied:
        # A later command would build on a state that lacks an earlier one.
        if shard.stopped and not isinstance(command, _ENDING):
            return Unapplied(shard.damaged)
        mark = writes.mark(shard.machine.shard_id)
        try:
            machine = shard.machine
            result = machine.apply(index, entry.time_ns, command, writes, entry.skipped_ns, term)
        except (*UNREADABLE, StoreFailedError) as error:
            # An unreadable block is not a result of the command. Nothing of the command is
            # written, and the shard stops before it.
            writes.roll_back(mark)
            if self.is_replicated(shard.group):
                raise StateDamagedError(f"entry {index}: {error}") from error
            self._stop(shard, f"messages cannot be read back: {error}")
            if not isinstance(error, StoreFailedError):
                # Damage is permanent, so it is recorded with this entry. A failed read of the disk
                # may succeed after a restart.
                row = shard.damaged.encode()
                writes.put(keys.shard_key(keys.STOPPED, shard.machine.shard_id), row)
            return Unapplied(shard.damaged)
        if isinstance(command, AcceptLoss):
            shard.damaged, shard.stopped = "", False
        return result

    def _stop(self, shard: Shard, reason: str) -> None:
        shard.damaged, shard.stopped = reason, True
        _log.critical("shard_stopped", shard=shard.machine.shard_id, reason=reason)
        shard.notify()
        self.on_stopped(shard)

    def _fill(self, job: WriteJob, writes: Writes) -> None:
        job.rows = writes.rows
        for shard_id, block in writes.blocks:
            span = self._blocks.add(shard_id, block)
            job.blocks.append((shard_id, block, span))
            if span.base_seq >> WINDOW_BITS != span.end_seq >> WINDOW_BITS:
                for facts in filled_windows(self._blocks, shard_id, span):
                    job.rows.append(window_row(shard_id, facts))
        for shard_id, first_seq in writes.trimmed.items():
            directory = self._blocks.directory(shard_id)
            # Whole blocks only. A block that the first sequence divides stays, and its dead part is
            # skipped.
            dropped = directory.drop_below(first_seq)
            for base_seq in dropped:
                job.dropped.append(GoneBlock(shard_id, base_seq, directory.is_paged(base_seq)))
            if dropped:
                job.rows += deletes_below(shard_id, dropped[0], first_seq)
        for shard_id in writes.dropped:
            # After the blocks of this entry were added: an entry may append to a stream and then
            # remove it.
            self._blocks.forget(shard_id)
            shard = self.shards.pop(shard_id)
            shard.notify()
        for shard_id in writes.trimmed:
            if shard_id in self.shards:
                self.shards[shard_id].notify()

    # Written -----------------------------------------------------------------------------------

    def written(self, jobs: list[Job]) -> None:
        """Note that jobs reached the store. Runs on the event loop."""
        for job in jobs:
            if isinstance(job, PageJob):
                continue
            if isinstance(job, RowJob):
                job.written.set()
                continue
            if isinstance(job, MergeJob):
                self._blocks.written(job.shard_id, job.merged)
                continue
            if isinstance(job, RewriteJob):
                for block, _ in job.blocks:
                    self._blocks.written(job.shard_id, block)
                job.written.set()
                continue
            self.unwritten_bytes -= job.bytes
            # Jobs of a group are reported in order, so this never decreases.
            self.written_indexes[job.group] = job.index
            for shard_id, block, span in job.blocks:
                self._blocks.written(shard_id, block)
                self._note_small(shard_id, span)
        self._on_written()

    def lost(self, jobs: list[Job]) -> None:
        """Note that jobs will never reach the store, which failed. Runs on the event loop."""
        for job in jobs:
            if isinstance(job, WriteJob):
                self.unwritten_bytes -= job.bytes
            elif isinstance(job, (RewriteJob, RowJob)):
                job.lost = True
                job.written.set()
        self._on_written()

    def take_over(self, fresh: "Applier", without: frozenset[int] = frozenset()) -> None:
        """Adopt the machines and blocks of ``fresh``, which are at the same indexes.

        It has no shards of the groups ``without``. Raises RuntimeError if their state differs; then
        nothing has changed.
        """

        def keeps(shard_id: int) -> bool:
            known = self.shards.get(shard_id)
            return keys.is_in_memory(shard_id) or (known is not None and known.group in without)

        stored = {number: one for number, one in self.shards.items() if not keeps(number)}
        if differing := _differing(stored, fresh.shards):
            raise RuntimeError(
                f"replaying the log produced a different state of shards {differing}"
            )
        self._blocks.take_over(fresh._blocks, keeps)
        for shard_id, shard in fresh.shards.items():
            known = self.shards.setdefault(shard_id, shard)
            known.machine = shard.machine
            known.machine.read_from(ShardFacts(self._blocks, shard_id))
            known.small_runs = shard.small_runs
            # A shard that stopped because a read failed continues if it can be read now.
            lasting = "" if known.stopped else known.damaged
            known.damaged, known.stopped = shard.damaged or lasting, shard.stopped
            known.applied_seq = max(known.applied_seq, shard.applied_seq)
            known.notify()
            self.changes.note_all(shard_id)
        self.written_indexes.update(fresh.written_indexes)
        self.chains.update(fresh.chains)

    def _note_small(self, shard_id: int, span: BlockSpan, level: int = 0) -> None:
        """Remember a small block, and merge the run of small blocks once it is long enough.

        Merged blocks that are still small form runs of their own. A stream that gets one message
        at a time therefore ends in full blocks after two or three merges of each message.
        """
        shard = self.shards.get(shard_id)
        if shard is None:
            return
        if shard.machine.deleted.touched:
            self.changes.deletions.add(shard_id)  # blocks that waited for a merge may not any more
        # A large block ends all runs: blocks are merged with their neighbours only.
        if span.bytes > _SMALL_BYTES or span.count > _SMALL_MESSAGES:
            shard.small_runs.clear()
            return
        run = shard.small_runs.setdefault(level, SmallRun())
        if run.base_seqs and span.end_seq - run.base_seqs[0] > 2 * MERGE_MESSAGES:
            # Most messages in between are deleted: blanks would take more space than messages.
            run = shard.small_runs[level] = SmallRun()
        run.add(span)
        if (
            len(run.base_seqs) >= self._merge_blocks
            or run.bytes >= MERGE_BYTES
            or run.count >= MERGE_MESSAGES
        ):
            del shard.small_runs[level]
            merged = self._merge(shard_id, run.base_seqs)
            if merged is not None:
                self._note_small(shard_id, merged, level + 1)

    def _merge(self, shard_id: int, base_seqs: list[int]) -> BlockSpan | None:
        blocks = [self._blocks.recall(shard_id, base_seq) for base_seq in base_seqs]
        known = [block for block in blocks if block is not None]
        # One of them is no longer in memory. Reading it back would cost more than many small
        # blocks.
        if len(known) != len(base_seqs):
            return None
        directory = self._blocks.directory(shard_id)
        job = merge_job(shard_id, known, directory.pages.stop)
        if not directory.replace(base_seqs, job.span):
            return None
        # The directory names the merged block from now on. The block is read from memory until
        # the writer has stored it.
        self._blocks.overlay(shard_id, job.merged)
        for base_seq in base_seqs[1:]:
            self._blocks.discard(shard_id, base_seq)  # nobody asks for it any more
        self._hand_over(job)
        return job.span

    def store_pages(self) -> None:
        """Store the directories of blocks in pages, as far as they are due."""
        self._behind.flush()  # a page that is dropped needs the rows of all dropped blocks
        if self._writer.failed:
            return
        for shard_id, directory in self._blocks.directories.items():
            if not keys.is_in_memory(shard_id):
                for due in directory.take_due_pages():
                    self._writer.submit(PageJob(shard_id, due))

    def keep_window(self, shard_id: int, facts: SubjectFacts) -> None:
        """Store the row of a window that was made from its blocks."""
        shard = self.shards.get(shard_id)
        if shard is None or not shard.machine.exists:
            return
        # A row for space and time only, as a rewrite: it waits for a store that works, and no row
        # may be written after those below the head were removed.
        failed = self._writer.failed and not keys.is_in_memory(shard_id)
        if not failed and facts.end_seq > shard.machine.counters.first_seq:
            self._hand_over(RowJob(shard_id, [window_row(shard_id, facts)]))

    def drop_window(self, shard_id: int, window: int) -> None:
        """Remove the row of a window that has no blocks any more."""
        # While the store does not work, the row stays. It does no harm.
        if keys.is_in_memory(shard_id) or not self._writer.failed:
            self._hand_over(RowJob(shard_id, [delete_row(shard_id, window)]))

    def pack_names(self, shard_id: int, pages: int) -> RowJob | None:
        """Write names of subjects without those of dead ones; None when all rows are like that.

        At most ``pages`` at a time. Raises StoreFailedError when the store has failed.
        """
        shard = self.shards.get(shard_id)
        # The state of a stopped shard may be partly changed.
        if shard is None or shard.stopped or not shard.machine.subjects.has_unpacked:
            return None
        self._behind.flush()  # otherwise earlier rows would be written after these
        if self._writer.failed and not keys.is_in_memory(shard_id):
            raise StoreFailedError("the store is not accepting writes")
        writes = Writes()
        shard.machine.subjects.pack_names(pages, writes)
        job = RowJob(shard_id, writes.rows)
        self._hand_over(job)
        return job

    def _hand_over(self, job: MergeJob | RewriteJob | RowJob) -> None:
        """Write blocks in the place of others: now if possible, otherwise on its thread."""
        if self._writer.write_now([job]):
            self.written([job])
        else:
            self._writer.submit(job)

    def rewrite(self, shard_id: int, old: BlockSpan, left: list[Block]) -> RewriteJob | None:
        """Replace the block ``old`` by ``left``; None when the directory no longer has ``old``.

        Raises StoreFailedError when the store has failed.
        """
        self._behind.flush()  # otherwise the waiting ``old`` would be joined to others unchanged
        # A rewrite is for space only, and no log has it. It waits for a store that works.
        if self._writer.failed and not keys.is_in_memory(shard_id):
            raise StoreFailedError("the store is not accepting writes")
        directory = self._blocks.directory(shard_id)
        if not directory.holds(old):
            return None
        # As with a merge: the directory changes first, and blocks are in memory until stored.
        gone = GoneBlock(shard_id, old.base_seq, directory.is_paged(old.base_seq))
        job = RewriteJob(shard_id, gone, [(block, span_of(block)) for block in left])
        self._blocks.discard(shard_id, old.base_seq)
        directory.cut(old.base_seq, [span for _, span in job.blocks])
        for block in left:
            self._blocks.overlay(shard_id, block)
        self._hand_over(job)
        return job


def _differing(known: Mapping[int, Shard], fresh: Mapping[int, Shard]) -> list[int]:
    """Numbers of shards whose state differs; empty if ``known`` is empty.

    A missing shard equals an empty one: a refused command may have left an empty shard.
    """
    if not known:
        return []
    numbers = known.keys() | fresh.keys()
    return sorted(one for one in numbers if _differ(known.get(one), fresh.get(one)))


def _differ(one: Shard | None, other: Shard | None) -> bool:
    if one is not None and other is not None and (one.damaged or other.damaged):
        return False  # where a shard stopped depends on what could be read at the time
    return _mark(one) != _mark(other)


def _mark(shard: Shard | None) -> tuple[bool, int, int, int]:
    if shard is None:
        return False, 0, 0, 0
    counters = shard.machine.counters
    return shard.machine.exists, counters.last_seq, counters.messages, counters.digest
