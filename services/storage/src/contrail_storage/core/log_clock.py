"""Log time: it never goes backwards, and does not follow steps of the wall clock.

It follows the boot-time clock. If the wall clock is ahead, log time gains at most one millisecond a
second on it. If the wall clock is behind, log time runs at half speed, so that the wall clock
catches up and every deadline still passes.
"""

from typing import Final

import msgspec

from contrail_common.timeunits import NS_PER_S, format_time

SLEW_DIVISOR: Final = 1_000
SLOWED_DIVISOR: Final = 2
_DAY_S: Final = 86_400


class LogClock:
    """Stamps log time from readings of the wall clock and of the boot-time clock (ns)."""

    def __init__(self, time_ns: int, boot_ns: int) -> None:
        self._time_ns = time_ns
        self._steady_ns = time_ns
        """Log time without the slow phases: where it returns to if the wall clock does."""
        self._boot_ns = boot_ns

    def read(self, wall_ns: int, boot_ns: int) -> int:
        """The log time now."""
        elapsed = max(boot_ns - self._boot_ns, 0)
        self._boot_ns = max(boot_ns, self._boot_ns)
        self._steady_ns += elapsed
        self._steady_ns += max(min(wall_ns - self._steady_ns, elapsed // SLEW_DIVISOR), 0)
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
        """The latest time that is known to have passed."""
        same = bool(boot_id) and boot_id == self.boot_id and boot_ns >= self.boot_ns
        return self.log_ns + (boot_ns - self.boot_ns if same else 0)


def doubt(known_ns: int, wall_ns: int, jump_max_ns: int) -> str:
    """Why a starting node refuses the wall clock; empty if it accepts it."""
    ahead_ns = wall_ns - known_ns
    if ahead_ns <= jump_max_ns:
        return ""
    ahead_s = ahead_ns // NS_PER_S
    return (
        f"the system clock ({_to_second(wall_ns)}) is {_roughly(ahead_s)} ahead of the last "
        f"recorded time ({_to_second(known_ns)}): writes wait until the clock is corrected "
        "or the system reports it as synchronized. If the server was off for that long, "
        f"start it once with --max-clock-jump {ahead_s // _DAY_S + 1}d"
    )


def _to_second(time_ns: int) -> str:
    return format_time(time_ns)[:19] + "Z"


def _roughly(seconds: int) -> str:
    for unit, size in (("days", _DAY_S), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} seconds"
