"""Large pages for the memory that the process has filled.

In a virtual machine, an access to a page of 4 KiB that the processor has not used lately walks two
page tables. Pages of 2 MiB make that rare. The kernel merges small pages into large ones when a
process asks for it (Linux 6.1), unless the machine has switched transparent huge pages off.

Only memory that is full is merged. If large pages are asked for in advance, all new memory comes in
them, and batches take more CPU.
"""

import asyncio
import contextlib
import ctypes
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = 2 << 20
PAUSE_S: Final = 15.0
"""Between two looks for memory that was filled meanwhile."""
STEP_S: Final = 0.02
"""CPU time that merging takes at once, about."""
AGAIN_S: Final = 1.0
"""The pause after that. So merging takes 2 % of a core."""
_COLLAPSE: Final = 25
"""MADV_COLLAPSE of madvise(2). It changes nothing that a program can see but speed."""
_FULL: Final = 15, 16
"""The part of a range that must be in use, since a large page takes up what is not. Ranges are full
or, as the stacks of threads, nearly empty."""
_MODES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RANGES: Final = Path("/proc/self/smaps")
_RANGE: Final = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\])?\n"
    rb"(?:\w+: .*\n)*?Rss: +(\d+) kB\n(?:\w+: .*\n)*?AnonHugePages: +(\d+) kB\n",
    re.MULTILINE,
)
"""A private anonymous range of proc(5) that can be written: its bounds, and what of it is used."""


async def use_large_pages() -> None:
    """Merge the pages of filled memory in threads, now and again, until cancelled."""
    merge = _merger()
    while merge is not None:
        starts = await asyncio.to_thread(_filled_now)
        while starts:
            await asyncio.to_thread(_merge_some, merge, starts)
            await asyncio.sleep(AGAIN_S)
        await asyncio.sleep(PAUSE_S)


def _filled_now() -> deque[int]:
    """What is :func:`filled`. It takes 15 ms for a GiB, so it is asked for rarely."""
    with contextlib.suppress(OSError):  # some containers hide the file
        return deque(filled(_RANGES.read_bytes()))
    return deque()


def _merge_some(merge: Callable[[int], object], starts: deque[int]) -> None:
    """Merge pages at the first addresses, at least one, and remove these."""
    until_s = time.thread_time() + STEP_S
    while starts:
        merge(starts.popleft())
        if time.thread_time() >= until_s:
            return


def filled(ranges: bytes) -> Iterator[int]:
    """Yield the addresses of large pages to be, in ranges that are full and have small pages.

    ``ranges`` is smaps of proc(5).
    """
    for found in _RANGE.finditer(ranges):
        start, stop = (int(bound, 16) for bound in found.group(1, 2))
        used, large = (int(kib) << 10 for kib in found.group(3, 4))
        first, last = -(-start // PAGE_BYTES), stop // PAGE_BYTES
        part, whole = _FULL
        if used * whole >= (stop - start) * part and large < (last - first) * PAGE_BYTES:
            yield from range(first * PAGE_BYTES, last * PAGE_BYTES, PAGE_BYTES)


def _merger() -> Callable[[int], object] | None:
    """Return the function that merges the pages at an address; None if it must not, or cannot."""
    with contextlib.suppress(OSError, AttributeError):
        if "[never]" not in _MODES.read_text(encoding="ascii"):
            madvise = ctypes.CDLL(None).madvise
            madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
            if madvise(0, 0, _COLLAPSE) == 0:  # the kernel knows this advice, see madvise(2)
                return lambda start: madvise(start, PAGE_BYTES, _COLLAPSE)
    return None
