"""The node's log time: the time stamped on entries, read from the system's clocks."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from contrail_common.timeunits import NS_PER_S
from contrail_storage.core.log_clock import ClockRecord, LogClock, doubt
from contrail_storage.disk.files import Files
from contrail_storage.disk.node_file import NodeFileDamagedError, read_node_file, write_node_file
from contrail_storage.disk.whole_steps import whole

CLOCK_NAME: Final = "clock"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_LOOK_S: Final = 1.0
_RECORD_LOOKS: Final = 300
_log: Final = structlog.get_logger("contrail.clock")


class Clocks:
    """Reads the clocks of this machine, in nanoseconds."""

    def wall_ns(self) -> int:
        """The time of day, which may step."""
        return time.time_ns()

    def boot_ns(self) -> int:
        """The time since the machine started; it goes on while the machine sleeps."""
        return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LogTime:
    """Reads the log time of a node's own groups, which never goes backwards.

    The file ``clock`` keeps the latest known time. A start uses it to tell a wall clock that is
    far ahead from a node that was off; see :meth:`begin_term`.
    """

    def __init__(
        self,
        last_entry_ns: int,
        files: Files,
        data_dir: Path,
        jump_max_ns: int,
        clocks: Clocks | None = None,
        is_vouched: Callable[[], bool] = lambda: False,
    ) -> None:
        """``jump_max_ns``: how far the wall clock may be ahead of the latest known time.

        ``is_vouched`` returns whether other nodes have the same wall clock.
        """
        self.doubt = ""
        """Why the wall clock is not used, and nothing is written; empty when it is used."""
        self._files = files
        self._path = data_dir / CLOCK_NAME
        self._jump_max_ns = jump_max_ns
        self._boot_id = _boot_id()
        self._record = self._read()
        self._writing = threading.Lock()
        self._clocks = clocks or Clocks()
        self._is_vouched = is_vouched
        self._clock = LogClock(last_entry_ns, self._clocks.boot_ns())

    def begin_term(self, last_entry_ns: int) -> None:
        """Begin a term after an entry of time ``last_entry_ns``; the wall clock may be earlier.

        If the wall clock is too far ahead of the latest known time, log time continues from the
        latest known time, and ``doubt`` says why.
        """
        self._begin(last_entry_ns)
        if self.doubt:
            _log.warning("clock_doubted", reason=self.doubt)

    def _begin(self, last_entry_ns: int) -> None:
        # Another leader's entries may be later than the clock of this node.
        last_ns = max(self.now(), last_entry_ns)
        wall_ns, boot_ns = self._clocks.wall_ns(), self._clocks.boot_ns()
        known_ns = last_ns
        if self._record is not None:
            known_ns = max(last_ns, self._record.known_ns(self._boot_id, boot_ns))
            self.doubt = doubt(known_ns, wall_ns, self._jump_max_ns)
        # The clock may be right and the node was off for long. A time service knows, or others.
        if self.doubt and (is_synchronized(wall_ns) or self._is_vouched()):
            self.doubt = ""
        # Only entries bind log time: a later known time may come from a clock that was ahead.
        self._clock = LogClock(known_ns if self.doubt else max(last_ns, wall_ns), boot_ns)

    def now(self) -> int:
        """Log time now, in nanoseconds."""
        return self._clock.read(self._clocks.wall_ns(), self._clocks.boot_ns())

    @property
    def distance_ns(self) -> int:
        """Nanoseconds by which log time is ahead of the wall clock; negative if it is behind."""
        return self.now() - self._clocks.wall_ns()

    async def follow(self) -> None:
        """Check a doubted wall clock again every second, and keep the record; until cancelled."""
        while True:
            for _ in range(_RECORD_LOOKS):
                await asyncio.sleep(_LOOK_S)
                if self.doubt:
                    self._begin(0)
                    if not self.doubt:
                        _log.info("clock_taken")
                        break
            await self.keep()

    async def keep(self) -> None:
        """Record the latest known time, unless the wall clock is doubted."""
        if not self.doubt:
            record = ClockRecord(self._boot_id, self._clocks.boot_ns(), self.now())
            await whole(lambda: self._write(record))

    def _write(self, record: ClockRecord) -> None:
        with self._writing:
            try:
                write_node_file(self._files, self._path, msgspec.msgpack.encode(record))
            except OSError as error:
                # The old record stays. A start may then doubt a correct clock, but it never trusts
                # a wrong one because of this.
                _log.warning("clock_not_recorded", error=str(error))

    def _read(self) -> ClockRecord | None:
        try:
            return msgspec.msgpack.decode(read_node_file(self._files, self._path), type=ClockRecord)
        except FileNotFoundError:
            return None
        except (NodeFileDamagedError, msgspec.MsgspecError) as error:
            _log.warning("clock_record_damaged", error=str(error))
            return None


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


_TIME_ERROR: Final = 5
_DIFFERENCE_MAX_S: Final = 2


class _Timeval(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("micros", ctypes.c_long))


class _Timex(ctypes.Structure):
    """``struct timex`` of Linux, up to the time; see adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("error_max", ctypes.c_long),
        ("error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", _Timeval),
        ("rest", ctypes.c_long * 32),
    )


def is_synchronized(wall_ns: int) -> bool:
    """Whether a time service keeps the kernel's clock, and ``wall_ns`` is of that clock.

    NTP daemons tell the kernel. In a virtual machine whose host sets the clock, nothing does.
    """
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):
        return False  # not Linux
    asked = _Timex()  # modes 0: read only
    if adjtimex(ctypes.byref(asked)) in (-1, _TIME_ERROR):
        return False
    seconds: int = asked.time.seconds
    return abs(seconds - wall_ns // NS_PER_S) <= _DIFFERENCE_MAX_S
