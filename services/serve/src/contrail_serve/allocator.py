"""What a server process asks of the C library's allocator.

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
"""Free memory at the end of a heap that is not given back."""
MAPPED_FROM_BYTES: Final = 8 << 20
"""What is larger, tables of many subjects for one, is given back as soon as it is free."""

_OWN_WORDS: Final = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have freed memory kept for what comes next; False where that was not done.

    An operator's own settings stand, and other C libraries have no such parameters.
    """
    if any(name in environment for name in _OWN_WORDS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Setting one ends the adapting of both.
    return all(
        mallopt(parameter, value)
        for parameter, value in (
            (_TRIM_THRESHOLD, KEPT_BYTES),
            (_MMAP_THRESHOLD, MAPPED_FROM_BYTES),
        )
    )
