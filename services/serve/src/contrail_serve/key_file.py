"""The file with the node's encryption keys, read again on SIGHUP."""

import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from contrail_serve.settings import SettingsError, read_encryption_keys
from contrail_storage.node import StorageNode

_log: Final = structlog.get_logger("contrail.serve")


def warn_if_open(path: Path) -> None:
    """Log a warning if every user of the machine can read the keys."""
    with suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            _log.warning("encryption_key_file_open_to_all", path=str(path))


def read_keys_again(node: StorageNode, path: Path) -> None:
    """Switch to the first key of the file. One that cannot be used is logged and changes nothing.

    Not for the event loop: it writes and syncs a file.
    """
    try:
        changed = node.rotate_keys(read_encryption_keys(path))
    except (SettingsError, OSError) as error:
        _log.error("encryption_key_refused", reason=str(error))
        return
    _log.info("encryption_key_changed" if changed else "encryption_key_unchanged")
    warn_if_open(path)
