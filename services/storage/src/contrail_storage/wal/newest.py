"""Which segment of the log is the newest: its name, in a small file beside the segments.

The segments follow each other, so that one that vanishes between others is missed, and so is one
whose entries the store needs. But where the newest vanishes as a whole, what is left is a sound log
that ends earlier. The file is written when a segment's name and first batch are durable, before any
entry is: so it never names one that a power cut may take back.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import read_node_file, write_node_file
from contrail_storage.wal.segments import Segment

NEWEST_NAME: Final = "newest"


def note_newest(files: Files, directory: Path, segment: Segment) -> None:
    """Record durably that `segment` is there with its first batch. Raises OSError."""
    write_node_file(files, directory / NEWEST_NAME, segment.name.encode())


def missing_newest(files: Files, directory: Path, segments: Sequence[Segment]) -> str:
    """Name of the newest segment recorded if it is not among `segments`, empty if it is.

    A later one than the recorded may be there: a crash came before it was. Empty also for a log of
    before there was such a file. Raises NodeFileDamagedError or OSError.
    """
    try:
        name = read_node_file(files, directory / NEWEST_NAME).decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "" if any(segment.name == name for segment in segments) else name
