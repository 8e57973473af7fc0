"""Files that appear under their names whole, at once, once, and durably."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def make_folders(path: Path) -> None:
    """Make a folder and its parents, so that they survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path, content: bytes, temporary: Path) -> None:
    """Create a file by way of a temporary one. Raises FileExistsError if it exists already."""
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def publish(written: Path, path: Path) -> None:
    """Give a file that is durable its final name; its old name remains.

    A link, because a rename would replace a file that another job has put there. Raises
    FileExistsError if there is one.
    """
    os.link(written, path)
    sync_folder(path.parent)


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
