"""Whether the kernel says that the wall clock is kept right by a time service."""

import ctypes
from typing import Final

from contrail_common.timeunits import NS_PER_S

_TIME_ERROR: Final = 5
_APART_MAX_S: Final = 2


class _Timeval(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("micros", ctypes.c_long))


class _Timex(ctypes.Structure):
    """``struct timex`` of Linux up to its time; adjtimex(2)."""

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
    """True when a time service keeps the kernel's clock, and ``wall_ns`` is that clock.

    NTP daemons tell the kernel; a virtual machine whose host sets its clock has none that does.
    """
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):
        return False  # not Linux
    asked = _Timex()  # modes 0: read only
    if adjtimex(ctypes.byref(asked)) in (-1, _TIME_ERROR):
        return False
    seconds: int = asked.time.seconds
    return abs(seconds - wall_ns // NS_PER_S) <= _APART_MAX_S
