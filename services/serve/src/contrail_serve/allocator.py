"""Settings of the C library's allocator for server processes.

A replay takes and frees some MiB of blocks a thousand times a second. By default glibc gives memory
at the end of its heap back as soon as 128 KiB are free there, and takes it again page by page, each
of them cleared by the kernel: that costs more than reading the blocks.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""

KEPT_BYTES: Final = 32 << 20
"""Free memory at the end of a heap that is not returned to the kernel."""
MAPPED_FROM_BYTES: Final = 8 << 20
"""Larger blocks, such as tables of many subjects, are returned as soon as they are free."""

_OWN_WORDS: Final = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Keep freed memory for later allocations; return False if that was not possible.

    An operator's own settings take precedence, and other C libraries lack these parameters.
    """
    if any(name in environment for name in _OWN_WORDS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # glibc adapts both parameters by itself until one of them is set, so set both.
    return all(
        mallopt(parameter, value)
        for parameter, value in (
            (_TRIM_THRESHOLD, KEPT_BYTES),
            (_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        )
    )
