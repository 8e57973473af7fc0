"""The file with the node's encryption keys, read again on SIGHUP."""

import asyncio
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


async def follow_key_file(node: StorageNode, path: Path | None, hung_up: asyncio.Event) -> None:
    """Switch to the first key of the file whenever ``hung_up`` is set, until cancelled.

    A file that cannot be used is logged and changes nothing. Returns at once if there is no file.
    """
    while path is not None:
        await hung_up.wait()
        hung_up.clear()
        # In a thread, because rewrapping the keys writes and syncs a file.
        await asyncio.to_thread(_go_over, node, path)


def _go_over(node: StorageNode, path: Path) -> None:
    try:
        changed = node.rotate_keys(read_encryption_keys(path))
    except (SettingsError, OSError) as error:
        _log.error("encryption_key_refused", reason=str(error))
        return
    _log.info("encryption_key_changed" if changed else "encryption_key_unchanged")
    warn_if_open(path)
