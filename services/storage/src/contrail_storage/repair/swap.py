"""Replaces damaged parts of a folder (store, log, record) by new ones, and keeps the old parts.

The new parts are first completed in a folder of their own. Then a small file makes them valid.
Before that file exists, nothing has changed. Once it exists, every start finishes the swap.
"""

import shutil
from pathlib import Path
from typing import Final

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import (
    IDENTITY_NAME,
    LOG_NAME,
    copy_of,
    read_node_file,
    write_node_file,
)

STORE_NAME: Final = "store"
CHECKPOINTS_NAME: Final = "checkpoints"
_PARTS: Final = (
    STORE_NAME,
    LOG_NAME,
    CHECKPOINTS_NAME,
    IDENTITY_NAME,
    copy_of(Path(IDENTITY_NAME)).name,
)
_MAKING: Final = "accepting"
_MADE: Final = "accepted"
_ASIDE: Final = "damaged"
_KEPT: Final = 2
"""Damaged sets that are kept. While they exist, they share tables with the store."""


def begin_making(files: Files, data_dir: Path) -> Path:
    """Return an empty folder in which the new parts are made."""
    discard_unfinished(data_dir)
    files.make_directory(data_dir / _MAKING)
    return data_dir / _MAKING


def discard_unfinished(data_dir: Path) -> None:
    """Remove new parts that did not become valid."""
    if (data_dir / _MAKING).exists() and not (data_dir / _MADE).exists():
        shutil.rmtree(data_dir / _MAKING)


def swap(files: Files, data_dir: Path) -> Path:
    """Make the new parts valid; return the folder in which the damaged parts are kept."""
    files.sync_directory(data_dir / _MAKING)
    number = max((int(path.name) for path in _sets(data_dir)), default=0) + 1
    # The point of no return. The number in it is fixed, so a start that continues keeps the old
    # parts in the same place.
    write_node_file(files, data_dir / _MADE, str(number).encode())
    finish_swap(files, data_dir)
    return data_dir / _ASIDE / str(number)


def finish_swap(files: Files, data_dir: Path) -> None:
    """Finish a swap that a crash interrupted, if there is one."""
    try:
        aside = data_dir / _ASIDE / read_node_file(files, data_dir / _MADE).decode()
    except FileNotFoundError:
        return
    files.make_directory(aside)
    for name in _PARTS:
        made, current = data_dir / _MAKING / name, data_dir / name
        # Moved before a crash, or this part was not damaged.
        if not made.exists():
            continue
        if current.exists():
            files.rename(current, aside / name)
            files.sync_directory(aside)
        files.rename(made, current)
        files.sync_directory(data_dir)
    # Last: until all parts are in place and synced, a start must repeat the loop.
    files.unlink(data_dir / _MADE)
    files.sync_directory(data_dir)
    discard_unfinished(data_dir)
    for old in sorted(_sets(data_dir), key=lambda path: int(path.name))[:-_KEPT]:
        shutil.rmtree(old)


def drop_kept_aside(data_dir: Path) -> None:
    """Remove the damaged parts for good, for an erasure: they may have its bytes."""
    if (data_dir / _ASIDE).exists():
        shutil.rmtree(data_dir / _ASIDE)


def _sets(data_dir: Path) -> list[Path]:
    return [path for path in (data_dir / _ASIDE).glob("*") if path.name.isdigit()]
