"""Applying committed entries: machines in order, answers to the callers, jobs to the writer."""

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final, Protocol

import structlog

from contrail_common import errors
from contrail_common.columns.blocks import Block, BlockCodec
from contrail_common.timings import Timings
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import (
    META_SHARD,
    AcceptLoss,
    Command,
    ConfigureStream,
    DropStream,
    Entry,
    FinishRestore,
    RestorePart,
    decode_entry,
)
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import Refused, Result, Writes
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.replica.advisories import AdvisoryHub
from contrail_storage.replica.entries import EntryContext, Unapplied
from contrail_storage.replica.shard import Shard, SmallRun
from contrail_storage.replica.store_writer import (
    GoneBlock,
    Job,
    MergeJob,
    PageJob,
    RewriteJob,
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
    ShardFacts,
    span_of,
)
from contrail_storage.store.store_errors import StoreFailedError

MERGE_BLOCKS: Final = 64
MERGE_BYTES: Final = 128 * 1024
MERGE_MESSAGES: Final = 2_000
_SMALL_BYTES: Final = MERGE_BYTES // 4
_SMALL_MESSAGES: Final = MERGE_MESSAGES // 4
_MAKING: Final = (ConfigureStream, RestorePart, FinishRestore)
_ENDING: Final = (DropStream, AcceptLoss)
"""What a stopped shard takes: commands that need nothing of it, and end that it stands still."""
_log = structlog.get_logger("contrail.apply")


def _makes(command: Command) -> bool:
    """Whether it may be what a shard begins with."""
    return isinstance(command, _MAKING) and getattr(command, "may_create", True)


class JobSink(Protocol):
    """What takes the jobs of applied entries, in order."""

    def put(self, job: WriteJob) -> None:
        """Take the job of the next entry."""
        ...

    def flush(self) -> None:
        """Hand on what is held."""
        ...


class NodeTimings:
    """How long entries took, counted as they are applied."""

    def __init__(self) -> None:
        self.commits = Timings()
        self.applies = Timings()

    def applied(self, begun: float, own: EntryContext | None) -> None:
        """An entry was applied from ``begun`` until now; ``own`` when its requests came here."""
        now = perf_counter()
        self.applies.add(now - begun)
        if own is not None:
            self.commits.add(now - own.begun)


class Applier:
    """Applies entries on the event loop and keeps the shards' runtimes."""

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
        """``sink`` is where jobs go, unless they are written behind by ``writer``."""
        self.meta = meta
        self.written_indexes: dict[int, int] = {}
        """Of each group, the index up to which everything is applied and in the store."""
        self.shards: dict[int, Shard] = {}
        self.last_entry_ns = 0
        self.unwritten_bytes = 0
        self._blocks = blocks
        self._writer = writer
        self._on_written = on_written
        self._advisories = advisories
        self._merge_blocks = merge_blocks
        self.on_stopped: Callable[[Shard], None] = lambda shard: None
        """Told of a shard that has just stopped: its machine may be half changed."""
        self._behind: JobSink = sink or WriteBehind(writer, blocks, self.written)

    def new_shard(self, number: int) -> Shard:
        """A shard without a stream yet."""
        machine = StreamMachine(number, ShardFacts(self._blocks, number))
        return Shard(machine, 0)

    def hash_key(self, number: int) -> bytes:
        """What message ids of a shard are hashed with; empty where there is no stream."""
        shard = self.shards.get(number)
        record = shard.machine.record if shard is not None else None
        return record.hash_key if record is not None else b""

    def codec_of(self, number: int) -> BlockCodec | None:
        """What the blocks of a shard are made smaller with; asked by the store's writer."""
        shard = None if keys.is_volatile(number) else self.shards.get(number)
        return codec_of(shard.machine.compression) if shard is not None else None

    def apply(self, group: int, index: int, term: int, data: bytes, context: object) -> None:
        """Apply one committed entry; ``data`` is empty for Raft's own entries."""
        own = context if isinstance(context, EntryContext) else None
        job = WriteJob(group, index, term, [])
        if data:
            entry = own.entry if own is not None else decode_entry(data)
            writes = Writes()
            results = self._apply_entry(index, entry, writes)
            self._fill(job, writes)
            job.bytes = len(data)
            self.unwritten_bytes += job.bytes
            if own is not None:
                own.resolve(results)
            self._behind.put(job)
            self._advance(writes)
        else:
            self._behind.put(job)

    def _advance(self, writes: Writes) -> None:
        """Let readers see what was appended."""
        for number in {number for number, _ in writes.blocks} | writes.reached.keys():
            shard = self.shards.get(number)
            if shard is not None:
                shard.advance(shard.machine.counters.last_seq)

    def flush(self) -> None:
        """Hand what waits to be written to the store now."""
        self._behind.flush()

    def _apply_entry(self, index: int, entry: Entry, writes: Writes) -> list[Result | Unapplied]:
        self.last_entry_ns = max(self.last_entry_ns, entry.time_ns)
        results: list[Result | Unapplied] = []
        for number, command in entry.commands:
            if number == META_SHARD:
                results.append(self.meta.apply(command, writes))
                self._tell(writes, entry.time_ns)
                continue
            shard = self.shards.get(number)
            if shard is None and _makes(command):
                shard = self.shards[number] = self.new_shard(number)
            if shard is None:
                results.append(Refused(errors.STREAM_NOT_FOUND.code))
                continue
            existed = shard.machine.exists
            results.append(self._apply_to(shard, index, entry.time_ns, command, writes))
            self._tell(writes, entry.time_ns, shard)
            if not existed and shard.machine.exists and not shard.machine.counters.messages:
                # Numbering may begin above 1: nothing below waits to be written.
                shard.applied_seq = shard.machine.counters.last_seq
        return results

    def _tell(self, writes: Writes, time_ns: int, shard: Shard | None = None) -> None:
        if writes.advisories:
            self._advisories.tell(writes.advisories, time_ns, shard.name if shard else "")
            writes.advisories.clear()

    def _apply_to(
        self, shard: Shard, index: int, time_ns: int, command: Command, writes: Writes
    ) -> Result | Unapplied:
        if shard.stopped and not isinstance(command, _ENDING):
            return Unapplied(shard.damaged)
        mark = writes.mark(shard.machine.shard)
        try:
            result = shard.machine.apply(index, time_ns, command, writes)
        except (*UNREADABLE, StoreFailedError) as error:
            # Whether a block reads back is not a result of the command: nothing of it is written,
            # and the shard stands still before it.
            writes.roll_back(mark)
            self._stop(shard, f"messages cannot be read back: {error}")
            if not isinstance(error, StoreFailedError):
                # Rot stays, and is written with this entry; a disk may read again after a restart.
                row = shard.damaged.encode()
                writes.put(keys.shard_key(keys.STOPPED, shard.machine.shard), row)
            return Unapplied(shard.damaged)
        if isinstance(command, AcceptLoss):
            shard.damaged, shard.stopped = "", False
        return result

    def _stop(self, shard: Shard, reason: str) -> None:
        shard.damaged, shard.stopped = reason, True
        _log.critical("shard_stopped", shard=shard.machine.shard, reason=reason)
        shard.notify()
        self.on_stopped(shard)

    def _fill(self, job: WriteJob, writes: Writes) -> None:
        job.rows = writes.rows
        for number, block in writes.blocks:
            job.blocks.append((number, block, self._blocks.add(number, block)))
        for number, first_seq in writes.trimmed.items():
            directory = self._blocks.directory(number)
            for base_seq in directory.drop_below(first_seq):
                job.dropped.append(GoneBlock(number, base_seq, directory.is_paged(base_seq)))
        for number in writes.dropped:
            self._blocks.forget(number)
            shard = self.shards.pop(number)
            shard.notify()
        for number in writes.trimmed:
            if number in self.shards:
                self.shards[number].notify()

    # Written -----------------------------------------------------------------------------------

    def written(self, jobs: list[Job]) -> None:
        """Jobs reached the store. Runs on the event loop."""
        for job in jobs:
            if isinstance(job, PageJob):
                continue
            if isinstance(job, MergeJob):
                self._blocks.written(job.shard, job.merged)
                continue
            if isinstance(job, RewriteJob):
                for block, _ in job.blocks:
                    self._blocks.written(job.shard, block)
                job.written.set()
                continue
            self.unwritten_bytes -= job.bytes
            self.written_indexes[job.group] = job.index
            for number, block, span in job.blocks:
                self._blocks.written(number, block)
                self._note_small(number, span)
        self._on_written()

    def lost(self, jobs: list[Job]) -> None:
        """Jobs will never reach the store, which failed. Runs on the event loop."""
        for job in jobs:
            if isinstance(job, WriteJob):
                self.unwritten_bytes -= job.bytes
            elif isinstance(job, RewriteJob):
                job.lost = True
                job.written.set()
        self._on_written()

    def take_over(self, fresh: "Applier") -> None:
        """Go on with the machines and blocks of ``fresh``, which stand at the same indexes.

        Raises RuntimeError when they hold something else; then nothing has changed.
        """
        stored = {number: one for number, one in self.shards.items() if not one.volatile}
        if differing := _differing(stored, fresh.shards):
            raise RuntimeError(
                f"replaying the log produced a different state of shards {differing}"
            )
        self._blocks.take_over(fresh._blocks, keys.is_volatile)
        for number, shard in fresh.shards.items():
            known = self.shards.setdefault(number, shard)
            known.machine = shard.machine
            known.machine.read_from(ShardFacts(self._blocks, number))
            known.small_runs = shard.small_runs
            # A shard that stood still over a disk that failed goes on, if it reads back now.
            lasting = "" if known.stopped else known.damaged
            known.damaged, known.stopped = shard.damaged or lasting, shard.stopped
            known.applied_seq = max(known.applied_seq, shard.applied_seq)
            known.notify()
        self.written_indexes.update(fresh.written_indexes)
        self.last_entry_ns = max(self.last_entry_ns, fresh.last_entry_ns)

    def _note_small(self, number: int, span: BlockSpan, level: int = 0) -> None:
        """Remember a small block; when a run of them is worth a block, have it merged.

        Merged blocks that are still small form runs of their own, so a stream fed one message
        at a time ends in full blocks after two or three merges of each message.
        """
        shard = self.shards.get(number)
        if shard is None:
            return
        if span.bytes > _SMALL_BYTES or span.count > _SMALL_MESSAGES:
            shard.small_runs.clear()
            return
        run = shard.small_runs.setdefault(level, SmallRun())
        if run.base_seqs and span.end_seq - run.base_seqs[0] > 2 * MERGE_MESSAGES:
            # Too little is left in between: blanks would take more room than messages.
            run = shard.small_runs[level] = SmallRun()
        run.add(span)
        if (
            len(run.base_seqs) >= self._merge_blocks
            or run.bytes >= MERGE_BYTES
            or run.count >= MERGE_MESSAGES
        ):
            del shard.small_runs[level]
            merged = self._merge(number, run.base_seqs)
            if merged is not None:
                self._note_small(number, merged, level + 1)

    def _merge(self, number: int, base_seqs: list[int]) -> BlockSpan | None:
        blocks = [self._blocks.recall(number, base_seq) for base_seq in base_seqs]
        known = [block for block in blocks if block is not None]
        if len(known) != len(base_seqs):
            return None
        directory = self._blocks.directory(number)
        job = merge_job(number, known, directory.pages.stop)
        if not directory.replace(base_seqs, job.span):
            return None
        # The directory names the merged block from now on; its body stands in memory until the
        # writer has stored it.
        self._blocks.overlay(number, job.merged)
        self._hand_over(job)
        return job.span

    def store_pages(self) -> None:
        """Have the directories of blocks stored in pages as far as they are due."""
        self._behind.flush()  # a page that goes must find the rows of all blocks that went
        if self._writer.failed:
            return
        for number, directory in self._blocks.directories.items():
            if not keys.is_volatile(number):
                for due in directory.take_due_pages():
                    self._writer.submit(PageJob(number, due))

    def _hand_over(self, job: MergeJob | RewriteJob) -> None:
        """Have blocks written in the place of others."""
        if self._writer.write_now([job]):
            self.written([job])
        else:
            self._writer.submit(job)

    def rewrite(self, number: int, old: BlockSpan, left: list[Block]) -> RewriteJob | None:
        """Put what is ``left`` of it in the place of ``old``; None when that no longer stands.

        Raises StoreFailedError while the store is given up.
        """
        self._behind.flush()  # where ``old`` waits, it would be joined to others as it was
        if self._writer.failed and not keys.is_volatile(number):
            raise StoreFailedError("the store is not accepting writes")
        directory = self._blocks.directory(number)
        if not directory.holds(old):
            return None
        # As with a merge: the directory first, the bodies in memory until they are stored.
        gone = GoneBlock(number, old.base_seq, directory.is_paged(old.base_seq))
        job = RewriteJob(number, gone, [(block, span_of(block)) for block in left])
        self._blocks.discard(number, old.base_seq)
        directory.cut(old.base_seq, [span for _, span in job.blocks])
        for block in left:
            self._blocks.overlay(number, block)
        self._hand_over(job)
        return job


def _differing(known: Mapping[int, Shard], fresh: Mapping[int, Shard]) -> list[int]:
    """Shards that do not hold the same; none of a node that held nothing yet.

    An empty shard is as good as none: a command that was refused may have left one.
    """
    if not known:
        return []
    numbers = known.keys() | fresh.keys()
    return sorted(one for one in numbers if _differ(known.get(one), fresh.get(one)))


def _differ(one: Shard | None, other: Shard | None) -> bool:
    if one is not None and other is not None and (one.damaged or other.damaged):
        return False  # where each of them stopped depends on what could be read
    return _mark(one) != _mark(other)


def _mark(shard: Shard | None) -> tuple[bool, int, int, int]:
    if shard is None:
        return False, 0, 0, 0
    counters = shard.machine.counters
    return shard.machine.exists, counters.last_seq, counters.messages, counters.digest
