"""Opens a damaged folder with everything that can be read. Only with ``accept_data_loss``.

A new store, log and record are made beside the damaged ones, and flushed. Then they replace the
damaged ones. A stream that may have lost anything gets another incarnation. The state of a shard
remains a prefix of its log: no entry after a gap in the log is applied.
"""

# One module: the steps of one repair share the folder, the losses and the new store, in this order.

import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import structlog

from contrail_common.columns.blocks import BlockCodec, decode_block
from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import RANGES_MAX, REASON_MAX
from contrail_storage.core.entry_codec import encode_entry
from contrail_storage.core.facts import facts_of
from contrail_storage.core.meta_machine import MetaMachine, StreamEntry
from contrail_storage.core.results import Writes
from contrail_storage.core.stream.data_loss import INDEX_STEP, NUMBER_STEP, Recount
from contrail_storage.core.stream.shard_state import StreamRecord
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import (
    LOG_NAME,
    NodeFileDamagedError,
    NodeIdentity,
    load_identity,
    save_identity,
)
from contrail_storage.options import NodeOptions
from contrail_storage.repair.readable_rows import ReadableRows, StrayRows
from contrail_storage.repair.salvage import SalvagedGroup, begin_again, cut_damaged, salvage
from contrail_storage.repair.swap import (
    CHECKPOINTS_NAME,
    STORE_NAME,
    begin_making,
    discard_unfinished,
    swap,
)
from contrail_storage.replica.advisories import AdvisoryHub
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.loading import applied_indexes, load_meta, load_shard, stored_shards
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.store_writer import StoreWriter, WriteJob
from contrail_storage.seal.frames import SealBrokenError
from contrail_storage.seal.keyring import Keyring, KeysRefusedError, find_keyring, has_keys
from contrail_storage.store.block_codecs import BLOCK_CODECS, codec_of
from contrail_storage.store.block_store import BlockStore, index_row, span_of
from contrail_storage.store.checkpoint import Checkpoint, newest_record
from contrail_storage.store.rocks_store import (
    Operation,
    RocksStore,
    StoreCorruptError,
    StoreError,
    StoreFailedError,
    StoreMissingError,
    StoreStalledError,
)
from contrail_storage.store.sealed_store import SealedStore, Store
from contrail_storage.streams.manager import HASH_KEY_BYTES
from contrail_storage.upkeep.checkpointer import DataLostError, marks_of

DAMAGED: Final = DataLostError, StoreCorruptError, NodeFileDamagedError, StoreMissingError
"""The errors that say that a folder is damaged."""

Node = TypeVar("Node")
OpenStore = Callable[[Path], RocksStore]

_GROUPS: Final = (0, 1)
_META, _SHARDS = _GROUPS
_BATCH_BYTES: Final = 4 << 20
_STALL_WAIT_S: Final = 0.01
_UNMADE: Final = (
    "the readable data could not be written next to the damaged files, which are unchanged; "
    "once the disk can be written, start again with accept_data_loss"
)
_UNSWAPPED: Final = (
    "the readable data was written, but has not replaced the damaged files yet; start again "
    "with accept_data_loss"
)
_log = structlog.get_logger("contrail.repair")


@dataclass(slots=True, frozen=True)
class Folder:
    """A node's folder, which no other process uses, and how to open its parts."""

    files: Files
    data_dir: Path
    node_keys: tuple[bytes, ...]
    open_store: OpenStore


@dataclass(slots=True)
class _Losses:
    """The known losses: messages and ranges by shard, or anything of any stream."""

    reason: str
    everywhere: bool
    known: dict[int, tuple[int, list[tuple[int, int]]]] = field(default_factory=dict)
    rows: Mapping[int, set[bytes]] = field(default_factory=dict)
    """Kinds of unreadable rows, by shard."""


def open_damaged(
    options: NodeOptions,
    files: Files,
    read: Callable[[], Node],
    parts: Callable[[Node], tuple[Store, Keyring | None]],
    close: Callable[[Node], None],
) -> Node:
    """Return the result of ``read``. With ``accept_data_loss``, first repair the folder.

    ``parts`` returns the store of a node that was read, and its keyring; ``close`` closes the node.
    """
    if not options.accept_data_loss:
        return read()
    folder = Folder(files, options.data_dir, options.node_keys, options.open_store)
    try:
        sound = read()
    except DAMAGED as error:
        accept_data_loss(folder, error)
        return read()
    try:
        unreadable = has_unreadable_rows(*parts(sound))
    except BaseException:
        close(sound)
        raise
    # The option was left in the start command. It must not change a folder that is sound.
    if not unreadable:
        _log.warning("nothing_to_accept", data_dir=str(options.data_dir))
        return sound
    close(sound)
    accept_data_loss(folder, None)
    return read()


def has_unreadable_rows(store: Store, keyring: Keyring | None) -> bool:
    """Whether a row of a store cannot be read, or could not be read before. Reads all rows."""
    rows = _readable(store.below if isinstance(store, SealedStore) else store, keyring)
    for _ in rows.rows():
        pass
    stopped = store.scan_keys(keys.STOPPED, keys.prefix_end(keys.STOPPED))
    return bool(rows.unreadable) or next(iter(stopped), None) is not None


def accept_data_loss(folder: Folder, damage: Exception | None) -> None:
    """Make the folder openable. ``damage`` is why it is not; None if rows cannot be read.

    Raises DataLostError if nothing sensible can be kept, KeysRefusedError, NodeFileDamagedError,
    or OSError if the disk fails. Then nothing has changed, unless the text says otherwise.
    """
    keyring = keyring_of(folder)
    try:
        _make(folder, damage, keyring)
    except BaseException as error:
        with suppress(OSError):  # if it fails, the next start does it
            discard_unfinished(folder.data_dir)
        if isinstance(error, (OSError, StoreFailedError)) and not isinstance(error, DAMAGED):
            raise OSError(f"{_UNMADE}: {error}") from error
        raise
    finally:
        if keyring is not None:
            keyring.close()
    try:
        aside = swap(folder.files, folder.data_dir)
    except OSError as error:
        raise OSError(f"{_UNSWAPPED}: {error}") from error
    _log.critical("data_loss_accepted", damaged_files=str(aside), reason=_reason(damage))


def _reason(damage: Exception | None) -> str:
    text = "stored rows or messages cannot be read" if damage is None else str(damage)
    return text[:REASON_MAX]


def _make(folder: Folder, damage: Exception | None, keyring: Keyring | None) -> None:
    """Make everything that replaces the damaged parts."""
    making = begin_making(folder.files, folder.data_dir)
    _make_identity(folder, making, keyring)
    unreadable, rows = _make_store(folder, making, keyring)
    store = folder.open_store(making / STORE_NAME)
    try:
        store.begin_writing()
        kept = store if keyring is None else SealedStore(store, keyring)
        whole = isinstance(damage, DataLostError) and damage.store_is_whole
        losses = _Losses(_reason(damage), everywhere=not whole and damage is not None, rows=rows)
        _Repair(folder, making, kept, keyring, losses, unreadable).run()
    finally:
        store.close()


def keyring_of(folder: Folder) -> Keyring | None:
    """The keyring of a damaged folder; None if it is not encrypted."""
    try:
        return find_keyring(folder.files, folder.data_dir, folder.node_keys)
    except NodeFileDamagedError:
        if not _identity_is_damaged(folder):
            raise
    # A damaged identity does not say whether the folder is encrypted. The file of data keys does.
    if not has_keys(folder.files, folder.data_dir):
        return None
    if not folder.node_keys:
        raise KeysRefusedError(f"{folder.data_dir} is encrypted, but no encryption key was given")
    return Keyring.load(folder.files, folder.data_dir, folder.node_keys)


def _identity_is_damaged(folder: Folder) -> bool:
    try:
        load_identity(folder.files, folder.data_dir)
    except NodeFileDamagedError:
        return True
    return False


def _make_identity(folder: Folder, making: Path, keyring: Keyring | None) -> None:
    if _identity_is_damaged(folder):
        node_id = f"n{secrets.token_hex(4)}"
        save_identity(folder.files, making, NodeIdentity(node_id, 1, encrypted=keyring is not None))


# The store --------------------------------------------------------------------------------------


def _readable(
    store: RocksStore, keyring: Keyring | None, folder: Path | None = None
) -> ReadableRows:
    """The readable rows of a store; others may be found in the files of ``folder``."""

    def opened(key: bytes, value: bytes) -> bytes:
        try:
            return value if keyring is None else keyring.open(value, key)
        except SealBrokenError as error:
            raise StoreCorruptError(str(error)) from error

    def checked(key: bytes, value: bytes) -> bytes:
        plain = opened(key, value)
        if key[:1] == keys.BLOCK:
            decode_block(plain, BLOCK_CODECS)
        return plain

    return ReadableRows(store, checked, StrayRows(folder, opened) if folder is not None else None)


def _make_store(
    folder: Folder, making: Path, keyring: Keyring | None
) -> tuple[bool, Mapping[int, set[bytes]]]:
    """Copy the readable rows of the store into a new one.

    Returns whether rows are missing, and the kinds of those that are known to be, by shard.
    """
    source, target = folder.data_dir / STORE_NAME, making / STORE_NAME
    if not source.exists():
        return True, {}
    repaired = making / "repaired"
    store, whole = _open_damaged_store(source, repaired)
    try:
        rows = _readable(store, keyring)
        if whole:
            for _ in rows.rows():
                pass
            whole = not rows.unreadable
        if not whole:
            rows = _readable(store, keyring, source)
            _copy(rows, folder.open_store(target))
    finally:
        store.close()
    if whole:
        # With links: copying a large store would take time and space that the disk may not have.
        RocksStore.clone(source, target)
    elif repaired.exists():
        shutil.rmtree(repaired)
    return not whole, rows.unreadable


def _open_damaged_store(source: Path, repaired: Path) -> tuple[RocksStore, bool]:
    """Open the store, or a repaired copy, for reading; and whether all its files exist."""
    try:
        return RocksStore.open_reading(source), True
    except StoreError:
        pass
    try:
        return RocksStore.open_reading(source, with_gaps=True), False
    except StoreError:
        # A repair drops damaged files. On a copy, so that the old store is kept as it was.
        RocksStore.clone(source, repaired)
        RocksStore.repair(repaired)
        return RocksStore.open_reading(repaired, with_gaps=True), False


def _copy(rows: ReadableRows, target: RocksStore) -> None:
    try:
        batch: list[Operation] = []
        size = 0
        for key, value in rows.rows():
            batch.append(("put", key, value))
            size += len(value)
            if size >= _BATCH_BYTES:
                _write(target, batch)
                batch, size = [], 0
        _write(target, batch)
        target.flush()
    finally:
        target.close()


def _write(store: Store, operations: list[Operation]) -> None:
    while True:
        try:
            store.write(operations)
        except StoreStalledError:
            time.sleep(_STALL_WAIT_S)
        else:
            return


class _WriteThrough:
    """A `JobSink` that writes the changes of each entry at once."""

    def __init__(self, blocks: BlockStore, applied: dict[int, int]) -> None:
        self.writer: StoreWriter
        self.failure: Exception | None = None
        self._blocks = blocks
        self._applied = applied

    def put(self, job: WriteJob) -> None:
        job.bytes = 0  # so that `write_now` accepts a job of any size
        while not self.writer.write_now([job]):
            if self.failure is not None:
                raise self.failure
            time.sleep(_STALL_WAIT_S)
        for shard_id, block, _ in job.blocks:
            self._blocks.written(shard_id, block)
        self._applied[job.group] = job.index

    def flush(self) -> None:
        """Do nothing: no job is held."""

    def fail(self, error: Exception) -> None:
        """Note that the store accepts no more writes."""
        self.failure = error


# The state --------------------------------------------------------------------------------------


class _Repair:
    """Applies the readable log and the losses to the new store, and makes a new log and record.

    Used by one thread, before the node exists.
    """

    def __init__(
        self,
        folder: Folder,
        making: Path,
        store: Store,
        keyring: Keyring | None,
        losses: _Losses,
        unreadable: bool,
    ) -> None:
        # The damaged folder; only read.
        self._folder = folder
        # The folder in which the new parts are made.
        self._making = making
        # The new store.
        self._store = store
        # Seals the new store and log; None if the folder is not encrypted.
        self._keyring = keyring
        # Known so far; `_recount` and `run` add to it.
        self._losses = losses
        # Whether rows of the old store could not be read.
        self._unreadable = unreadable
        # The names of streams, as of the entries that are applied.
        self._meta = MetaMachine()
        # The blocks of the new store.
        self._blocks = BlockStore(store)
        # By group: the last applied index. The store always has it.
        self._applied = applied_indexes(self._scan)
        through = _WriteThrough(self._blocks, self._applied)
        through.writer = StoreWriter(
            store, StoreStalledError, lambda _: None, through.fail, self._codec_of
        )
        # Has the shards' machines; writes each entry to the store before the next one.
        self._applier = Applier(
            self._meta, self._blocks, through.writer, lambda: None, AdvisoryHub(), sink=through
        )
        # By stream: its new incarnation, once it is known to have lost something.
        self._incarnations: dict[str, str] = {}
        for group in _GROUPS:
            self._applied.setdefault(group, 0)
        # The newest record of a checkpoint, which proves sequences; None if it cannot be read.
        self._proven = newest_record(folder.files, folder.data_dir / CHECKPOINTS_NAME)

    def run(self) -> None:
        """Do everything. When it returns, everything is flushed."""
        self._load()
        found = salvage(
            self._folder.files, self._folder.data_dir / LOG_NAME, self._applied, self._keyring
        )
        cut_damaged(found.values())
        # The entries first, in their places in the log. The loss is accepted at an index above all
        # of them.
        for group in _GROUPS:
            for data, index, term in found[group].entries:
                self._applier.apply(group, index, term, data, None)
        self._pass_known_sequences()
        lost = self._losses.everywhere or self._unreadable
        if lost or found[_META].lost:
            self._apply_last(_META, found[_META], self._names())
        if lost or found[_SHARDS].lost or self._losses.known:
            self._losses.everywhere = self._losses.everywhere or found[_SHARDS].lost
            self._apply_losses(found)
        self._finish(found)

    def _scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.scan(prefix, keys.prefix_end(prefix))

    def _codec_of(self, shard_id: int) -> BlockCodec | None:
        shard = self._applier.shards.get(shard_id)
        return codec_of(shard.machine.compression) if shard is not None else None

    def _load(self) -> None:
        """Load what is stored; count each shard again from the messages that can be read."""
        load_meta(self._scan, self._meta)
        named = {
            shard_id: entry
            for entry in self._meta.streams.values()
            if not keys.is_in_memory(entry.shard_id)
            for shard_id in entry.shard_ids
        }
        for shard_id in sorted(named.keys() | self._stored_numbers()):
            shard = load_shard(self._scan, shard_id, self._blocks)
            if not shard.machine.exists and self._has_blocks(shard_id):
                entry = named.get(shard_id)
                # Without a name, nobody could read or remove these messages. Dropping them silently
                # is worse than not starting.
                if entry is None:
                    raise DataLostError(
                        f"{self._losses.reason}. Shard {shard_id} has messages, but neither its "
                        "name nor its configuration can be read. Even accept_data_loss "
                        "cannot open the folder: restore it from a backup"
                    )
                if entry.stage == "listed":
                    self._recreate_configuration(shard.machine, entry)
            if shard.machine.exists:
                self._recount(shard.machine)
                # Entries after the stop were not applied, even if every message can be read now.
                if shard.stopped:
                    self._losses.known.setdefault(shard_id, (0, []))
                shard = self._load_again(shard_id)
            self._applier.shards[shard_id] = shard

    def _stored_numbers(self) -> set[int]:
        """Shards that have a configuration, counters or blocks."""
        kinds = keys.STREAM, keys.COUNTERS, keys.BLOCK_INDEX
        found = {
            int.from_bytes(key[1:5], "big")
            for kind in kinds
            for key in self._store.scan_keys(kind, keys.prefix_end(kind))
        }
        return found - {cmd.META_SHARD}

    def _has_blocks(self, shard_id: int) -> bool:
        prefix = keys.shard_key(keys.BLOCK, shard_id)
        return next(self._store.scan_keys(prefix, keys.prefix_end(prefix)), None) is not None

    def _recreate_configuration(self, machine: StreamMachine, entry: StreamEntry) -> None:
        """Make a sealed configuration for messages without one, so that they can be read."""
        config = StreamConfig(
            name=entry.name, subjects=entry.subjects, shards=entry.shards, sealed=True
        )
        machine.record = StreamRecord(
            config,
            entry.incarnation,
            secrets.token_bytes(HASH_KEY_BYTES),
            time.time_ns(),
            self._applied[_SHARDS],
            NUMBER_STEP,
            machine.shard_id - entry.shard_id,
        )
        writes = Writes()
        machine.write_record(writes)
        _write(self._store, list(writes.rows))
        self._losses.everywhere = True
        _log.critical("configuration_lost", stream=entry.name)

    def _pass_known_sequences(self) -> None:
        """Skip sequences that the newest record proves, so that they are not used again."""
        marks = self._proven.shards if self._proven is not None else {}
        for shard_id, mark in marks.items():
            shard = self._applier.shards.get(shard_id)
            if shard is None or not shard.machine.exists:
                continue
            if shard.machine.counters.last_seq < mark.last_sequence:
                self._recount(shard.machine, mark.last_sequence)
                self._applier.shards[shard_id] = self._load_again(shard_id)

    def _load_again(self, shard_id: int) -> Shard:
        """Load directory and machine of a shard whose rows a recount has rewritten."""
        self._blocks.forget(shard_id)
        shard = load_shard(self._scan, shard_id, self._blocks)
        shard.machine.recounted = True
        return shard

    def _recount(self, machine: StreamMachine, last_seq: int = 0) -> None:
        shard_id, end_seq = machine.shard_id, 0
        marks_lost = keys.DELETED in self._losses.rows.get(shard_id, ())
        recount = Recount(machine, marks_lost=marks_lost)
        rows: list[Operation] = []
        for kind in (keys.BLOCK_INDEX, keys.BLOCK_PAGE, keys.WINDOW):
            prefix = keys.shard_key(kind, shard_id)
            rows.append(("delete_range", prefix, keys.prefix_end(prefix)))
        for key, value in self._scan(keys.shard_key(keys.BLOCK, shard_id)):
            block = decode_block(value, BLOCK_CODECS)
            if block.base_seq < end_seq:
                rows.append(("delete", key))  # merged into the block before it
                continue
            end_seq = block.last_seq + 1
            recount.take(facts_of(block))
            index_key = keys.large_key(keys.BLOCK_INDEX, shard_id, block.base_seq)
            rows.append(("put", index_key, index_row(span_of(block))))
        writes = Writes()
        messages, ranges = recount.finish(last_seq, writes)
        _write(self._store, rows + list(writes.rows))
        if messages:
            before, known = self._losses.known.get(shard_id, (0, []))
            self._losses.known[shard_id] = before + messages, (known + ranges)[:RANGES_MAX]

    def _apply_last(
        self, group: int, held: SalvagedGroup, commands: Iterable[tuple[int, cmd.Command]]
    ) -> None:
        """Apply commands at an index above all indexes that were ever used."""
        index = max(self._applied[group], held.highest) + INDEX_STEP
        entry = cmd.Entry(time.time_ns(), list(commands))
        self._applier.apply(group, index, held.end_term, encode_entry(entry), None)

    def _names(self) -> list[tuple[int, cmd.Command]]:
        """Return commands that make the names match the existing shards."""
        shards = self._applier.shards
        commands: list[cmd.Command] = []
        taken: set[int] = set()
        for entry in list(self._meta.streams.values()):
            taken.update(entry.shard_ids)
            first = shards.get(entry.shard_id)
            there = first is not None and first.machine.exists
            # Streams in memory have no stored shard, and reserved ones not yet.
            if not (there or keys.is_in_memory(entry.shard_id) or entry.stage == "reserved"):
                commands.append(cmd.ReleaseStream(entry.name))
                if entry.stage == "listed":
                    _log.critical("stream_lost", stream=entry.name)
        for shard_id, shard in sorted(shards.items()):
            record = shard.machine.record
            if shard_id in taken or record is None or record.shard:
                continue
            if shard_id < self._meta.next_shard_id and not self._unreadable:
                continue  # its name was released, so only the end of its removal is missing
            config = record.config
            commands.append(
                cmd.AssignShards(
                    config.name, config.subjects, record.incarnation, shard_id, config.shards
                )
            )
            _log.warning("stream_named_again", stream=config.name)
        # Lost commands may have given ids to streams. Their rows or entries may still exist.
        commands.append(cmd.SkipNumbers(NUMBER_STEP))
        return [(cmd.META_SHARD, command) for command in commands]

    def _apply_losses(self, found: dict[int, SalvagedGroup]) -> None:
        losses, shards = self._losses, self._applier.shards
        commands: list[tuple[int, cmd.Command]] = []
        named = {
            shard_id: entry
            for entry in self._meta.streams.values()
            if not keys.is_in_memory(entry.shard_id)
            for shard_id in entry.shard_ids
        }
        for shard_id, entry in named.items():
            shard = shards.get(shard_id)
            affected = losses.everywhere or any(one in losses.known for one in entry.shard_ids)
            if shard is None or not shard.machine.exists or not affected:
                continue
            messages, ranges = losses.known.get(shard_id, (0, []))
            incarnation = self._incarnation(entry)
            commands.append(
                (
                    shard_id,
                    cmd.AcceptLoss(incarnation, losses.reason, losses.everywhere, messages, ranges),
                )
            )
            _log.critical(
                "stream_lost_messages",
                stream=entry.name,
                shard=shard_id,
                messages=messages,
                ranges=ranges,
                newest_may_be_missing=losses.everywhere,
            )
        # Shards without a name are only kept with the damaged files.
        orphans = [shard_id for shard_id in shards if shard_id not in named]
        commands += [(shard_id, cmd.DropStream()) for shard_id in orphans]
        self._apply_last(_SHARDS, found[_SHARDS], commands)

    def _incarnation(self, entry: StreamEntry) -> str:
        """The new incarnation of a stream, the same for all its shards."""
        fresh = self._incarnations.get(entry.name)
        if fresh is None:
            fresh = self._incarnations[entry.name] = secrets.token_hex(8)
        return fresh

    def _finish(self, found: dict[int, SalvagedGroup]) -> None:
        files = self._folder.files
        # The record proves what is flushed, and the new log begins after it.
        self._store.flush()
        shards = stored_shards(self._applier)
        checkpoint = Checkpoint(self._store, self._making / CHECKPOINTS_NAME, files)
        checkpoint.take(self._applied, marks_of(shards))
        stands = {
            group: (self._applied[group], held.end_term, held) for group, held in found.items()
        }
        begin_again(files, self._making / LOG_NAME, self._keyring, stands)
