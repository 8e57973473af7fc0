"""What a checkpoint was made with: a copy of the SQL and of the streams beside Spark's own files.

Spark compares nothing: with another query it would go on from the old position, and the results of
two queries would be mixed.
"""

import difflib
import errno
import os
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from contrail_client.cli.ending import Failed

FILE: Final = "contrail-transform.json"
ACCEPT: Final = "--accept-changes"
_FOR_GOOD: Final = {
    errno.EACCES, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM,
    errno.EROFS,
}  # fmt: skip
"""Why a folder cannot be written to, and would not be later. A full disk may get space again."""


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to; ``target`` is a stream, or a folder as ``parquet:PATH``."""

    sql: str
    source: str
    target: str


def check(folder: Path, made: Made, *, accept: bool) -> None:
    """Raise Failed if the checkpoint was made with something else, unless that is accepted."""
    try:
        before = msgspec.json.decode((folder / FILE).read_bytes(), type=Made)
    except FileNotFoundError:
        if (folder / "offsets").is_dir() and not accept:
            raise Failed(
                f"the checkpoint {folder} was not made by this job; use another one, or {ACCEPT}"
            ) from None
        return
    except NotADirectoryError:
        raise Failed(f"the checkpoint {folder} is no folder") from None
    except msgspec.MsgspecError as error:
        raise Failed(f"{folder / FILE} is damaged: {error}") from None
    if before.source != made.source or before.target != made.target:
        raise Failed(
            f"the checkpoint {folder} belongs to a transformation from {before.source} to "
            f"{before.target}; use another one"
        )
    if before.sql != made.sql and not accept:
        raise Failed(
            f"the SQL was changed since the checkpoint {folder} was made (first at line "
            f"{_first_difference(before.sql, made.sql)}). Use another checkpoint to begin again, "
            f"or {ACCEPT} to go on from the position of the old query"
        )


def check_rows(folder: Path, rows: Path) -> None:
    """Raise Failed if a new checkpoint is to write to the folder of another one.

    Spark knows a batch there by its number alone, and would skip those that it finds.
    """
    if _has_batches(rows / "_spark_metadata") and not _has_batches(folder / "offsets"):
        raise Failed(
            f"the folder {rows} has the rows of another checkpoint, and Spark would take those of "
            f"the new checkpoint {folder} for written already; use another folder"
        )


def _has_batches(log: Path) -> bool:
    """True if a log of Spark has a batch: a file that is named by its number."""
    return log.is_dir() and any(each.name[:1].isdigit() for each in log.iterdir())


def note(folder: Path, made: Made) -> None:
    """Write down what the checkpoint is made with, before Spark writes to it.

    Raises Failed if that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{FILE}.{os.getpid()}"
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(made))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / FILE)
    except OSError as error:
        raise Failed(f"cannot write to the checkpoint {folder}: {error.strerror}") from error


def check_writable(folder: Path, what: str) -> None:
    """Make a folder, and raise Failed if nobody can write to it until somebody does something.

    Spark says of such a folder only that it has failed, as it says of a disk that is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in _FOR_GOOD:
            raise Failed(f"cannot write to the {what} {folder}: {error.strerror}") from error


def _first_difference(before: str, after: str) -> int:
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    changed = [low for tag, _, _, low, _ in matcher.get_opcodes() if tag != "equal"]
    return changed[0] + 1 if changed else 1
