"""Log time, which never goes backwards and does not follow steps of the wall clock.

Log time follows the boot-time clock. While the wall clock is ahead, log time gains at most one
millisecond a second. While the wall clock is behind, log time runs at half speed: the wall clock
catches up, and every deadline still passes.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from contrail_common.timeunits import NS_PER_S, format_time

SLEW_DIVISOR: Final = 1_000
SLOWED_DIVISOR: Final = 2
_AGREE_NS: Final = 10 * NS_PER_S
_DAY_S: Final = 86_400


class LogClock:
    """Stamps log time from readings of the wall clock and of the boot-time clock (ns)."""

    def __init__(self, time_ns: int, boot_ns: int) -> None:
        self._time_ns = time_ns
        self._steady_ns = time_ns
        """Log time as it would be without slow phases. It returns there if the wall clock does."""
        self._boot_ns = boot_ns

    def read(self, wall_ns: int, boot_ns: int) -> int:
        """Return the log time (ns). The arguments are the readings of this moment."""
        # The boot-time clock never steps. It also counts while the machine is suspended.
        elapsed = max(boot_ns - self._boot_ns, 0)
        self._boot_ns = max(boot_ns, self._boot_ns)
        self._steady_ns += elapsed
        # Never backwards here: a wall clock that is behind slows `_time_ns`, not this.
        self._steady_ns += max(min(wall_ns - self._steady_ns, elapsed // SLEW_DIVISOR), 0)
        # At least half speed. Log time that stood still would keep all TTLs and redeliveries
        # waiting until the wall clock has caught up.
        slowed_ns = self._time_ns + elapsed // SLOWED_DIVISOR
        self._time_ns = max(slowed_ns, min(self._steady_ns, wall_ns))
        if slowed_ns <= wall_ns < self._steady_ns:
            self._steady_ns = self._time_ns  # the wall clock stayed behind, so it is trusted
        return self._time_ns


class ClockRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reading: log time was ``log_ns`` when the machine had been up for ``boot_ns``.

    ``boot_id`` identifies the start of the machine; empty where the system has none.
    """

    boot_id: str
    boot_ns: int
    log_ns: int

    def known_ns(self, boot_id: str, boot_ns: int) -> int:
        """The latest time (ns) that has certainly passed."""
        # Only since the same start of the machine: another start begins to count at 0.
        same = bool(boot_id) and boot_id == self.boot_id and boot_ns >= self.boot_ns
        return self.log_ns + (boot_ns - self.boot_ns if same else 0)


def doubt(known_ns: int, wall_ns: int, jump_max_ns: int) -> str:
    """Why a node that starts must not use the wall clock, as a sentence; empty if it may."""
    ahead_ns = wall_ns - known_ns
    # A clock that is years ahead would expire every message with an age, and log time never goes
    # back. One that is behind does no harm.
    if ahead_ns <= jump_max_ns:
        return ""
    ahead_s = ahead_ns // NS_PER_S
    return (
        f"the system clock ({_to_second(wall_ns)}) is {_roughly(ahead_s)} ahead of the last "
        f"recorded time ({_to_second(known_ns)}): writes wait until the clock is corrected "
        "or the system reports it as synchronized. If the server was off for that long, "
        f"start it once with --max-clock-jump {ahead_s // _DAY_S + 1}d"
    )


def lower_median(walls_ns: Sequence[int]) -> int:
    """The wall clock that counts among several: half of them, or one less, are earlier.

    So one clock that is ahead never counts, and one that is behind only among two.
    """
    return sorted(walls_ns)[(len(walls_ns) - 1) // 2]


def agree(walls_ns: Sequence[int], count: int) -> bool:
    """Whether ``count`` of the wall clocks are within ten seconds."""
    ordered = sorted(walls_ns)
    pairs = zip(ordered, ordered[count - 1 :], strict=False)
    return any(last - first <= _AGREE_NS for first, last in pairs)


def disagreement(known_ns: int, walls_ns: Sequence[int], majority: int, jump_max_ns: int) -> str:
    """Why a new leader must not use the wall clocks, as a sentence; empty if it may.

    The sentence says what ends it: clocks that agree, or an operator.
    """
    ahead_ns = lower_median(walls_ns) - known_ns
    if ahead_ns <= jump_max_ns or agree(walls_ns, majority):
        return ""
    shown = ", ".join(_to_second(one) for one in sorted(walls_ns))
    ahead_s = ahead_ns // NS_PER_S
    return (
        f"the clocks of the nodes disagree ({shown}), and the last known time is "
        f"{_to_second(known_ns)}: times continue from there until most of the clocks agree. If "
        f"the nodes were off for that long, start them once with --max-clock-jump "
        f"{ahead_s // _DAY_S + 1}d"
    )


def _to_second(time_ns: int) -> str:
    return format_time(time_ns)[:19] + "Z"


def _roughly(seconds: int) -> str:
    for unit, size in (("days", _DAY_S), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} seconds"
