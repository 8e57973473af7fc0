"""The memory of this process, and how much of it its parts may take unless they are told."""

import os
from pathlib import Path
from typing import Final

_GROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


CACHE_MIN: Final = 16 << 20
"""Small blocks are merged only while all of them are in the cache."""
_CACHE_MAX: Final = 512 << 20


def quarter_of_memory(group_limit: Path = _GROUP_LIMIT) -> int:
    """A quarter of the memory in bytes: for streams in memory."""
    return _memory(group_limit) // 4


def eighth_of_memory(group_limit: Path = _GROUP_LIMIT) -> int:
    """An eighth of the memory in bytes, from 16 to 512 MiB: for the cache of blocks."""
    return max(CACHE_MIN, min(_memory(group_limit) // 8, _CACHE_MAX))


def _memory(group_limit: Path) -> int:
    """The machine's memory in bytes, or that of its container if it has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = group_limit.read_text(encoding="ascii").strip()
    except OSError:
        text = ""
    if text.isdigit():  # "max" stands for no limit
        total = min(total, int(text))
    return total
