"""Opening a node's folder: lock it, read all of it, and only then change it.

If opening fails, the folder is unchanged and unlocked.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from contrail_storage.core.entry_codec import EntryVersionError
from contrail_storage.disk.files import Files
from contrail_storage.disk.folder_lock import FolderLock
from contrail_storage.disk.node_file import (
    NodeFileDamagedError,
    NodeIdentity,
    Stage,
    load_identity,
    save_identity,
)
from contrail_storage.options import NodeOptions
from contrail_storage.repair.among_others import open_among_others
from contrail_storage.repair.open_damaged import open_damaged
from contrail_storage.repair.swap import STORE_NAME, finish_swap
from contrail_storage.seal.keyring import Keyring, KeysRefusedError, find_keyring
from contrail_storage.store.sealed_store import SealedStore, Store
from contrail_storage.store.store_errors import StoreCorruptError, StoreError, StoreMissingError
from contrail_storage.upkeep.checkpointer import DataLostError
from contrail_storage.wal.codec import UnsupportedVersionError

if TYPE_CHECKING:
    from contrail_storage.node import StorageNode

Make = Callable[[NodeIdentity, Store, Keyring | None], "StorageNode"]
"""Makes a node from its identity and an open store; the keyring is None if not encrypted."""


def open_node(options: NodeOptions, make: Make) -> "StorageNode":
    """Return a node with everything in its folder. Blocks; raises DataLostError or OSError."""
    try:
        return _open(options, make)
    except (NodeFileDamagedError, StoreCorruptError, StoreMissingError) as error:
        raise DataLostError(f"stored data is damaged: {error}") from error
    except (StoreError, UnsupportedVersionError, EntryVersionError, KeysRefusedError) as error:
        raise OSError(str(error)) from error


def _open(options: NodeOptions, make: Make) -> "StorageNode":
    files = options.files or Files()
    files.make_directory(options.data_dir)
    # Before anything is read: another process could change it meanwhile.
    lock = FolderLock(options.data_dir)
    node: StorageNode | None = None
    try:
        # A repair that a crash interrupted: until it is finished, the parts of the folder do not
        # match.
        finish_swap(files, options.data_dir)

        def read() -> "StorageNode":
            return _read(options, make, files)

        if options.cluster is not None:
            opened, mended = open_among_others(options, files, options.cluster, read)
            opened.catching_up.mended = mended
            node = opened
        else:
            node = open_damaged(
                options, files, read, lambda one: one.parts, lambda one: one.close()
            )
        node.healing.try_to_write()
    except BaseException:
        if node is not None:
            node.close()
        lock.release()
        raise
    node.lock = lock
    return node


def _read(options: NodeOptions, make: Make, files: Files) -> "StorageNode":
    """Return a node with everything stored; raises an error if a part of it is damaged."""
    # Before the store is opened: opening changes files, and wrong keys must change nothing.
    find_keyring(files, options.data_dir, options.node_keys)
    _check_store_is_there(files, options.data_dir)
    store = options.open_store(options.data_dir / STORE_NAME)
    node: StorageNode | None = None
    try:
        identity, keyring = _identify(files, options)
        node = make(identity, store if keyring is None else SealedStore(store, keyring), keyring)
        node.recover(files)
    except BaseException:
        if node is not None:
            node.subject_keys.close()
            node.key_sharing.keys.close()
        store.close()
        raise
    return node


def _check_store_is_there(files: Files, directory: Path) -> None:
    """Raise StoreCorruptError when a folder has an identity and no store.

    The store is made before the identity. Without this check, a lost store would be replaced by
    an empty one.
    """
    current = directory / "store" / "CURRENT"
    if not current.exists() and load_identity(files, directory) is not None:
        raise StoreCorruptError("the store, or its file CURRENT, is missing")


def _identify(files: Files, options: NodeOptions) -> tuple[NodeIdentity, Keyring | None]:
    """Return the folder's identity and its keyring (None: not encrypted).

    Both are made in a new folder. Needs the lock of the node's data. Raises as `find_keyring` does,
    and OSError for the folder of another node.
    """
    directory, node_keys = options.data_dir, options.node_keys
    keyring = find_keyring(files, directory, node_keys)
    identity = load_identity(files, directory)
    if identity is None:
        if keyring is None and node_keys:
            # Before the identity, which records for good whether the folder is encrypted.
            keyring = Keyring.create(files, directory, node_keys[0])
        encrypted = keyring is not None
        if options.cluster is None:
            identity = NodeIdentity(f"n{secrets.token_hex(4)}", 1, encrypted)
        else:
            identity = NodeIdentity.of_empty(options.name, encrypted=encrypted)
        save_identity(files, directory, identity)
    problem = _misplaced(identity, options)
    if problem:
        raise OSError(problem)
    return identity, keyring


def _misplaced(identity: NodeIdentity, options: NodeOptions) -> str:
    """Why a folder is not that of the node to start, in a sentence; empty if it is."""
    if options.cluster is None:
        return "" if identity.alone else f"it is that of node {identity.node_id} of a cluster"
    if identity.alone:
        return "it is that of a node without a cluster, which cannot join one"
    if identity.node_id != options.name:
        return f"it is that of node {identity.node_id}, not of {options.name}"
    if identity.stage is Stage.FORMED and identity.nodes not in ((), options.cluster.nodes):
        formed, given = ", ".join(identity.nodes), ", ".join(options.cluster.nodes)
        return f"its cluster was formed with the nodes {formed}, not with {given}"
    return ""
