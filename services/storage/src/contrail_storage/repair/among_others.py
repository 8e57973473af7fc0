"""Opens the damaged folder of a cluster's node. Other nodes have its replicas, whole.

A damaged part, the store or the log, is set aside, and an empty one takes its place. The member of
each replicated group then fetches what it lacks, as one that was away or whose state is damaged.
Shards that are not replicated have their only copy here: if the damaged part may have something of
them, the start is refused. With ``accept_data_loss``, it sets the whole folder aside; the node then
begins as one whose folder was lost.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from contrail_storage.core import key_layout as keys
from contrail_storage.core.chain import NO_CHAIN, encode_applied, entry_of
from contrail_storage.core.key_layout import META_GROUP
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import (
    LOG_NAME,
    NodeIdentity,
    Stage,
    load_identity,
    read_node_file,
    save_identity,
    write_node_file,
)
from contrail_storage.options import Cluster, NodeOptions
from contrail_storage.repair.open_damaged import DAMAGED, Folder, Node, keyring_of
from contrail_storage.repair.salvage import SalvagedGroup, begin_again, cut_damaged, salvage
from contrail_storage.repair.swap import CHECKPOINTS_NAME, STORE_NAME, begin_making, swap
from contrail_storage.replica.raft_port import SUSPECT
from contrail_storage.seal.keyring import Keyring
from contrail_storage.store.sealed_store import SealedStore, Store
from contrail_storage.store.store_errors import StoreCorruptError
from contrail_storage.upkeep.checkpointer import DataLostError
from contrail_storage.wal.log_state import RESTORING, list_segments
from contrail_storage.wal.replay import RecoveredGroup, replay

_LOG: Final = "log"
_STORE: Final = "store"
_FOLDER: Final = "folder"
_UNUSABLE: Final = "unusable"
"""A file in the store's folder, so that it goes where the store goes."""
_NOWHERE: Final = 0, 0
"""Index and term of a group that has applied nothing."""
_NO_ENTRY: Final = 1 << 63
"""An index above that of any entry."""
_log = structlog.get_logger("contrail.repair")


def open_among_others(
    options: NodeOptions, files: Files, cluster: Cluster, read: Callable[[], Node]
) -> tuple[Node, str]:
    """Return the result of ``read``, and what was set aside for it and why, in a sentence.

    Raises what ``read`` raises if the damage cannot be mended without a loss.
    """
    told: dict[str, str] = {}
    while True:
        try:
            _check_usable(files, options.data_dir)
            return read(), "; ".join(told.values())
        except DAMAGED as error:
            only_log = isinstance(error, DataLostError) and error.store_is_whole
            part = _LOG if only_log else _STORE
            if part in told or _FOLDER in told:
                raise
            if not _Mending(options, files, cluster).replace(part):
                if not options.accept_data_loss:
                    raise
                part = _FOLDER
                _begin_anew(options, files, error)
            told[part] = f"the {part} was damaged and is set aside: {error}"


def mark_unusable(files: Files, data_dir: Path, reason: str) -> None:
    """Let the next start set the store aside, because a file of it is damaged. Blocks; OSError.

    Not every start would notice: the damage shows when the file is to be compacted.
    """
    write_node_file(files, data_dir / STORE_NAME / _UNUSABLE, reason.encode())


def _check_usable(files: Files, data_dir: Path) -> None:
    """Raise StoreCorruptError, or NodeFileDamagedError, if the store was marked."""
    mark = data_dir / STORE_NAME / _UNUSABLE
    with suppress(FileNotFoundError):
        if _UNUSABLE in files.list_names(mark.parent):
            raise StoreCorruptError(read_node_file(files, mark).decode())


class _Mending:
    """Replaces one damaged part of a folder by an empty one."""

    def __init__(self, options: NodeOptions, files: Files, cluster: Cluster) -> None:
        self._options = options
        self._files = files
        self._folder = options.data_dir
        names = cluster.nodes
        # The group of the shards that are not replicated.
        self._own = names.index(options.name) + 1
        # Every group of which this node may have been a member: groups are only made as planned.
        self._replicated = {META_GROUP} | {
            entry.number
            for entry in cluster.groups
            if len(entry.members) > 1 and options.name in entry.members
        }

    def replace(self, part: str) -> bool:
        """Replace a part; False if it may have something that no other node has.

        Raises the errors of `DAMAGED` for damage of another part, and OSError.
        """
        identity = load_identity(self._files, self._folder)
        if identity is None or identity.stage is not Stage.FORMED:
            return False
        keyring = keyring_of(
            Folder(self._files, self._folder, self._options.node_keys, self._options.open_store)
        )
        try:
            make = self._make_store if part == _STORE else self._make_log
            if not make(keyring, identity):
                return False
        finally:
            if keyring is not None:
                keyring.close()
        aside = swap(self._files, self._folder)
        _log.critical("part_set_aside", part=part, damaged_files=str(aside))
        return True

    def _make_store(self, keyring: Keyring | None, identity: NodeIdentity) -> bool:
        """Make a store that has nothing; the members of the groups are suspect by that."""
        own = self._logged_of_own(keyring)
        if identity.has_unreplicated or _has_data(own.entries):
            return False
        making = begin_making(self._files, self._folder)
        self._files.make_directory(making / CHECKPOINTS_NAME)
        below = self._options.open_store(making / STORE_NAME)
        try:
            below.begin_writing()
            store: Store = below if keyring is None else SealedStore(below, keyring)
            # Nothing is missing of the node's own group, because it has no shards.
            row = encode_applied(own.base_index, own.base_term, NO_CHAIN)
            store.write([("put", keys.shard_key(keys.APPLIED, self._own), row)])
            store.flush()
        finally:
            below.close()
        return True

    def _logged_of_own(self, keyring: Keyring | None) -> RecoveredGroup:
        """The log of the node's own group, as far as it can be read."""
        directory = self._folder / LOG_NAME
        segments = list_segments(self._files, directory)
        of_others = dict.fromkeys(self._replicated, _NO_ENTRY)
        found = replay(self._files, directory, segments, of_others, keyring).recovery
        return found.groups.get(self._own) or RecoveredGroup()

    def _make_log(self, keyring: Keyring | None, identity: NodeIdentity) -> bool:
        """Make a log that begins after what the store has.

        Its members have forgotten what they voted and acknowledged: they are restoring. A group
        without a row of what is applied has no state either, or only a part of one.
        """
        applied = self._applied(keyring)
        indexes = {number: index for number, (index, _) in applied.items()}
        found = salvage(self._files, self._folder / LOG_NAME, indexes, keyring)
        cut_damaged(found.values())
        own = found.pop(self._own, None) or SalvagedGroup(lost=True)
        if own.lost and (identity.has_unreplicated or _has_data(own.entries)):
            return False
        groups = {self._own: (*applied.pop(self._own, _NOWHERE), own)}
        for number in self._replicated | found.keys() | applied.keys():
            held = found.get(number) or SalvagedGroup()
            held.flags |= RESTORING if number in applied else RESTORING | SUSPECT
            held.entries.clear()
            groups[number] = (*applied.get(number, _NOWHERE), held)
        making = begin_making(self._files, self._folder)
        begin_again(self._files, making / LOG_NAME, keyring, groups)
        return True

    def _applied(self, keyring: Keyring | None) -> dict[int, tuple[int, int]]:
        """By group: index and term of the entry up to which the store has everything."""
        below = self._options.open_store(self._folder / STORE_NAME)
        try:
            store: Store = below if keyring is None else SealedStore(below, keyring)
            rows = store.scan(keys.APPLIED, keys.prefix_end(keys.APPLIED))
            return {keys.last_number(key, 4): entry_of(row) for key, row in rows}
        finally:
            below.close()


def _has_data(entries: Sequence[tuple[bytes, int, int]]) -> bool:
    """Whether an entry has a command; a new leader's first entry has none."""
    return any(data for data, _, _ in entries)


def _begin_anew(options: NodeOptions, files: Files, damage: Exception) -> None:
    """Replace all parts of the folder by empty ones. Raises as `accept_data_loss` does."""
    data_dir = options.data_dir
    keyring = keyring_of(Folder(files, data_dir, options.node_keys, options.open_store))
    encrypted = keyring is not None
    if keyring is not None:
        keyring.close()
    making = begin_making(files, data_dir)
    for name in (LOG_NAME, CHECKPOINTS_NAME):
        files.make_directory(making / name)
    # The store is made before the identity; see `open_node`.
    options.open_store(making / STORE_NAME).close()
    save_identity(files, making, NodeIdentity.of_empty(options.name, encrypted=encrypted))
    aside = swap(files, data_dir)
    _log.critical("folder_set_aside", damaged_files=str(aside), reason=str(damage))
