"""Damages the files of a node that is not running: single bits, cut ends, missing files."""

import os
import random
from pathlib import Path

from contrail_storage.disk.files import Files
from contrail_storage.wal import codec
from contrail_storage.wal.log_state import list_segments


def some_file(data_dir: Path, pattern: str, chance: random.Random) -> Path:
    """Any file that matches."""
    return chance.choice(sorted(data_dir.glob(pattern)))


def newest_file(data_dir: Path, pattern: str) -> Path:
    """The last file by name that matches."""
    return sorted(data_dir.glob(pattern))[-1]


def written_end(segment: Path) -> int:
    """The end of the last batch in a segment of the log; preallocated space follows it."""
    found = list_segments(Files(), segment.parent)
    (salt,) = (one.salt for one in found if one.name == segment.name)
    content, end = memoryview(segment.read_bytes()), 0
    while (batch := codec.read_batch(content, end, salt)) is not None:
        end = batch.end
    return end


def flip_bit(path: Path, chance: random.Random, start: int = 0, stop: int | None = None) -> str:
    """Flip one bit of the bytes from `start` to `stop`; returns which one."""
    content = bytearray(path.read_bytes())
    offset, bit = chance.randrange(start, stop or len(content)), chance.randrange(8)
    content[offset] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {offset} of {path.name}"


def cut_end(
    path: Path, chance: random.Random, at_most: int | None = None, size: int | None = None
) -> str:
    """Cut at least one byte from the end, which is at `size`; returns how many."""
    size = path.stat().st_size if size is None else size
    taken = chance.randint(1, min(at_most or size, size))
    os.truncate(path, size - taken)
    return f"the last {taken} of {size} bytes of {path.name}"


def remove(path: Path) -> str:
    """Remove the file."""
    path.unlink()
    return f"all of {path.name}"
