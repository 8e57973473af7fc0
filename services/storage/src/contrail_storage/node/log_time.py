"""The node's log time: the clock of the logs it leads, read from the system's clocks."""

import time

from contrail_storage.node.log_clock import LogClock


class LogTime:
    """Reads log time; it never runs backwards."""

    def __init__(self, last_entry_ns: int) -> None:
        self._clock = LogClock(last_entry_ns, time.time_ns(), _boot_ns())

    def begin_term(self, last_entry_ns: int) -> None:
        """A term begins behind an entry of that time, which the wall clock may stand before."""
        last_ns = max(self.now(), last_entry_ns)
        self._clock = LogClock(last_ns, time.time_ns(), _boot_ns())

    def now(self) -> int:
        """Log time now, in nanoseconds."""
        return self._clock.read(time.time_ns(), _boot_ns())


def _boot_ns() -> int:
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
