"""The name of the newest segment of the log, in a small file next to the segments.

Segments are numbered, so a segment that is missing between others is noticed, and so is one whose
entries the store needs. Without the newest segment, however, the rest is a sound log that ends
earlier. The file is written after the segment's name and first batch are durable, and before any
entry is. So it never names a segment that a power failure may undo.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import read_node_file, write_node_file
from contrail_storage.wal.log_state import Segment

NEWEST_NAME: Final = "newest"


def note_newest(files: Files, directory: Path, segment: Segment) -> None:
    """Record durably that `segment` exists with its first batch. Raises OSError."""
    write_node_file(files, directory / NEWEST_NAME, segment.name.encode())


def missing_newest(files: Files, directory: Path, segments: Sequence[Segment]) -> str:
    """Return the recorded name of the newest segment if `segments` lacks it, else "".

    There may be a newer segment than the recorded one, after a crash before it was recorded. The
    log of an older release has no such file: the answer is "". Raises NodeFileDamagedError or
    OSError.
    """
    try:
        name = read_node_file(files, directory / NEWEST_NAME).decode(errors="replace")
    # Damaged is not the same as missing: a damaged file may name a segment that is missing too.
    except FileNotFoundError:
        return ""
    return "" if any(segment.name == name for segment in segments) else name
