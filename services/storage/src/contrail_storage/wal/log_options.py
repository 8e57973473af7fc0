"""What bounds a log, and what it counts."""

from dataclasses import dataclass, field
from typing import Final

from contrail_common.timings import Timings

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Bounds of the log, in bytes and seconds.

    `queue_bytes` bounds what waits for the disk, `keep_bytes` the tail kept for followers,
    `carry_bytes` what is copied forward for quiet groups at once. After `idle_s` without work an
    empty batch is written, so that rot in the last acknowledged batch is told from a torn tail.
    `ahead_bytes` is the room that small writes find made.
    """

    segment_bytes: int = 64 * _MIB
    queue_bytes: int = 64 * _MIB
    keep_bytes: int = 128 * _MIB
    carry_bytes: int = 16 * _MIB
    ahead_bytes: int = 256 * 1024
    idle_s: float = 0.010


@dataclass(slots=True)
class LogStats:
    """Counters for metrics; written by the writer thread, read anywhere."""

    syncs: Timings = field(default_factory=Timings)
    batches_written: int = 0
    bytes_written: int = 0
    segments: int = 0
    size_bytes: int = 0
