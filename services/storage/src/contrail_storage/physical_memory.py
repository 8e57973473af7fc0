"""The memory of this process, and the part of it that streams in memory may take."""

import os
from pathlib import Path
from typing import Final

_GROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def quarter_of_memory(group_limit: Path = _GROUP_LIMIT) -> int:
    """A quarter of the machine's memory in bytes, or of its container's if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = group_limit.read_text(encoding="ascii").strip()
    except OSError:
        text = ""
    if text.isdigit():  # "max" stands for no limit
        total = min(total, int(text))
    return total // 4
