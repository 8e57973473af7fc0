"""The bounds and the counters of a log."""

from dataclasses import dataclass, field
from typing import Final

from contrail_common.timings import Timings

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Bounds of the log, in bytes and seconds.

    `queue_bytes` bounds the records that wait for the disk, `keep_bytes` the newest part that is
    always kept, `tail_bytes` the part that is kept for other members of a group, and `carry_bytes`
    the entries of quiet groups that are copied forward at once.
    After `idle_s` without work the log writes an empty batch: then damage to the last acknowledged
    batch is recognised as rot and not as a torn tail. `ahead_bytes` is the space that a segment
    file has written in advance, so that the sync of a small write is short.
    """

    segment_bytes: int = 64 * _MIB
    queue_bytes: int = 64 * _MIB
    keep_bytes: int = 128 * _MIB
    tail_bytes: int = 1024 * _MIB
    carry_bytes: int = 16 * _MIB
    ahead_bytes: int = 256 * 1024
    idle_s: float = 0.010


@dataclass(slots=True)
class LogStats:
    """Counters for metrics; the writer thread writes them, any thread may read them."""

    syncs: Timings = field(default_factory=Timings)
    batches_written: int = 0
    bytes_written: int = 0
    segments: int = 0
    size_bytes: int = 0
    left_bytes: int = 0
    """What was left when segments were last dropped."""
