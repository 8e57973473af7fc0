"""The identity of a node and the keys of its data: read from the folder, or made in a new one."""

import secrets
from pathlib import Path

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import NodeIdentity, load_identity, save_identity
from contrail_storage.seal.keyring import Keyring, find_keyring
from contrail_storage.store.rocks_store import StoreCorruptError


def identify(
    files: Files, directory: Path, node_keys: tuple[bytes, ...]
) -> tuple[NodeIdentity, Keyring | None]:
    """Return the folder's identity and its keyring (None: not encrypted).

    Both are made in a new folder. Needs the lock of the node's data. Raises as `find_keyring` does.
    """
    keyring = find_keyring(files, directory, node_keys)
    identity = load_identity(files, directory)
    if identity is None:
        if keyring is None and node_keys:
            # Before the identity, which records for good whether the folder is encrypted.
            keyring = Keyring.create(files, directory, node_keys[0])
        identity = NodeIdentity(f"n{secrets.token_hex(4)}", 1, encrypted=keyring is not None)
        save_identity(files, directory, identity)
    return identity, keyring


def check_store_is_there(files: Files, directory: Path) -> None:
    """Raise StoreCorruptError when a folder has an identity and no store.

    The store is made before the identity. Without this check, a lost store would be replaced by
    an empty one.
    """
    current = directory / "store" / "CURRENT"
    if not current.exists() and load_identity(files, directory) is not None:
        raise StoreCorruptError("the store, or its file CURRENT, is missing")
