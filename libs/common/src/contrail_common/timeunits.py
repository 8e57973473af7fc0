"""Durations and times as texts: ``"90s"`` and RFC 3339. Inside, they are nanoseconds."""

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
INT64_MAX: Final = (1 << 63) - 1
DURATION_CHARS_MAX: Final = 64

_UNITS: Final = {
    "ns": 1,
    "us": NS_PER_US,
    "µs": NS_PER_US,
    "\u03bcs": NS_PER_US,  # mu, which looks like the micro sign
    "ms": NS_PER_MS,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "h": 3_600 * NS_PER_S,
    "d": 86_400 * NS_PER_S,
}
_CANONICAL: Final = ("d", "h", "m", "s", "ms", "us")
_PART: Final = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,9}))?(ns|us|µs|\u03bcs|ms|s|m|h|d)")
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)


def parse_duration(value: str | int) -> int:
    """Return the nanoseconds of a duration in Go's style (``"1h30m"``, ``"-5s"``, ``"0"``).

    An integer is taken as nanoseconds. Raises ValueError, with a message for the client, for any
    other value and beyond 64 bits.
    """
    # In Python, True is an integer.
    if isinstance(value, bool):
        raise ValueError('must be a duration string such as "30s", or integer nanoseconds')
    if isinstance(value, int):
        total = value
    elif len(value) > DURATION_CHARS_MAX:
        raise ValueError(f"a duration must not be longer than {DURATION_CHARS_MAX} characters")
    else:
        sign, text = (-1, value[1:]) if value[:1] == "-" else (1, value.removeprefix("+"))
        total = sign * (0 if text == "0" else _sum_parts(text))
    if not -INT64_MAX <= total <= INT64_MAX:
        raise ValueError("a duration must fit in 64 bits as nanoseconds")
    return total


@lru_cache(maxsize=256)  # clients send the same ones again and again
def _sum_parts(text: str) -> int:
    total, position = 0, 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            break
        whole, fraction, unit = part.groups()
        total += int(whole) * _UNITS[unit]
        if fraction:
            total += int(fraction) * _UNITS[unit] // 10 ** len(fraction)
        position = part.end()
    if not text or position != len(text):
        raise ValueError('must be a duration such as "500ms", "30s", "1h30m" or "7d"')
    return total


def format_duration(duration_ns: int) -> str:
    """Return the canonical form: an integer and the largest unit that divides it, ``"90s"``."""
    if duration_ns == 0:
        return "0s"
    # No fractions: they would have to be rounded, and the same duration could have two texts.
    for unit in _CANONICAL:
        if duration_ns % _UNITS[unit] == 0:
            return f"{duration_ns // _UNITS[unit]}{unit}"
    return f"{duration_ns}ns"


def format_go_duration(duration_ns: int) -> str:
    """Return a duration (0 or more) as Go prints it: ``"1h30m0s"``. Go's parser knows no days."""
    if duration_ns < NS_PER_S:
        return format_duration(duration_ns)
    minutes, rest_ns = divmod(duration_ns, 60 * NS_PER_S)
    hours, minutes = divmod(minutes, 60)
    seconds, part_ns = divmod(rest_ns, NS_PER_S)
    fraction = f".{part_ns:09d}".rstrip("0") if part_ns else ""
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{head}{seconds}{fraction}s"


def parse_time(text: str) -> int:
    """Return the nanoseconds since 1970 of an RFC 3339 time with an offset.

    Raises ValueError, with a message for the client, if it is not one or is outside 1970 to 2262.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(
            'must be an RFC 3339 time with an offset, such as "2026-01-31T08:00:00.5Z"'
        )
    date, clock, fraction, offset = match.groups()
    offset = "+00:00" if offset in "Zz" else offset
    # A datetime has only microseconds, so the fraction is added as an integer.
    delta = datetime.fromisoformat(f"{date}T{clock}{offset}") - datetime(1970, 1, 1, tzinfo=UTC)
    seconds = delta.days * 86_400 + delta.seconds
    total = seconds * NS_PER_S + int((fraction or "0").ljust(9, "0"))
    if not 0 <= total <= INT64_MAX:
        raise ValueError("a time must be between 1970 and 2262")
    return total


def format_time(time_ns: int) -> str:
    """Return RFC 3339 in UTC with nine fractional digits: ``"2026-01-31T08:00:00.500000000Z"``."""
    seconds, rest = divmod(time_ns, NS_PER_S)
    minute, second = divmod(seconds, 60)
    return f"{_format_minute(minute)}:{second:02d}.{rest:09d}Z"


@lru_cache(maxsize=4096)  # most times are recent, or close to each other
def _format_minute(minute: int) -> str:
    return datetime.fromtimestamp(60 * minute, UTC).strftime("%Y-%m-%dT%H:%M")
