"""Who a node is and what opens its data: read from the folder, or made in a new one."""

import secrets
from pathlib import Path

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import NodeIdentity, load_identity, save_identity
from contrail_storage.seal.keyring import Keyring, find_keyring
from contrail_storage.store.rocks_store import StoreCorruptError


def identify(
    files: Files, directory: Path, node_keys: tuple[bytes, ...]
) -> tuple[NodeIdentity, Keyring | None]:
    """The folder's identity and keyring (None: it is plain).

    Both are made in a new folder. Needs the lock of the node's data. Raises as `find_keyring` does.
    """
    keyring = find_keyring(files, directory, node_keys)
    identity = load_identity(files, directory)
    if identity is None:
        if keyring is None and node_keys:
            # Before the identity: that is what says for good whether the folder is encrypted.
            keyring = Keyring.create(files, directory, node_keys[0])
        identity = NodeIdentity(f"n{secrets.token_hex(4)}", 1, encrypted=keyring is not None)
        save_identity(files, directory, identity)
    return identity, keyring


def check_store_is_there(files: Files, directory: Path) -> None:
    """Raise StoreCorruptError where the store of a folder with an identity is gone.

    The store is made before the identity, and one that is gone would be made anew, empty.
    """
    current = directory / "store" / "CURRENT"
    if not current.exists() and load_identity(files, directory) is not None:
        raise StoreCorruptError("the store, or its file CURRENT, is missing")
