"""Log time: never backwards, and not led astray by steps of the wall clock.

At the start of a term it is the later of the last entry's time and the wall clock. Within a term it
follows the boot-time clock and is slewed toward the wall clock by at most one millisecond a second.
"""

from typing import Final

SLEW_DIVISOR: Final = 1_000


class LogClock:
    """Stamps log time from readings of the wall clock and of the boot-time clock (ns)."""

    def __init__(self, last_entry_ns: int, wall_ns: int, boot_ns: int) -> None:
        self._time_ns = max(last_entry_ns, wall_ns)
        self._boot_ns = boot_ns

    def read(self, wall_ns: int, boot_ns: int) -> int:
        """The log time now."""
        elapsed = max(boot_ns - self._boot_ns, 0)
        self._boot_ns = max(boot_ns, self._boot_ns)
        slew_max = elapsed // SLEW_DIVISOR
        ahead = wall_ns - (self._time_ns + elapsed)
        # A slew is less than what has elapsed, so the sum can't run backwards.
        self._time_ns += elapsed + max(-slew_max, min(slew_max, ahead))
        return self._time_ns
