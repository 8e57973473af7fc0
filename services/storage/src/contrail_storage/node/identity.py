"""Who a node is and what opens its data: read from the folder, or made in a new one."""

import secrets
from pathlib import Path

from contrail_storage.seal.keyring import Keyring, find_keyring
from contrail_storage.wal.files import Files
from contrail_storage.wal.node_file import NodeIdentity, load_identity, save_identity


def identify(
    files: Files, directory: Path, node_keys: tuple[bytes, ...]
) -> tuple[NodeIdentity, Keyring | None]:
    """The folder's identity and keyring (None: it is plain), wrapped by the first of `node_keys`.

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
    if keyring is not None:
        keyring.rotate(node_keys[0])
    return identity, keyring
