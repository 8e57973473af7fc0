"""Converts times and durations between texts of the API and Python types. Pure."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

Duration = str | int | timedelta
"""A duration: a text such as `"1h30m"`, integer nanoseconds, or a `timedelta`."""

Time = str | datetime
"""A time: an RFC 3339 text, or a `datetime` with a time zone."""

_NS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d)", re.ASCII)


def to_timedelta(value: Duration) -> timedelta:
    """Convert a duration of the API, to the microsecond; ValueError if it is not valid."""
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int):
        return timedelta(microseconds=value // 1_000)
    sign, text = (-1, value[1:]) if value[:1] == "-" else (1, value)
    parts = _PART.findall(text)
    if text != "0" and (not parts or "".join(map("".join, parts)) != text):
        raise ValueError(f"{value!r} is not a duration such as '500ms', '30s' or '1h30m'")
    nanoseconds = sum(int(Decimal(number) * _NS[unit]) for number, unit in parts)
    return sign * timedelta(microseconds=nanoseconds // 1_000)


def to_datetime(value: Time) -> datetime:
    """Convert a time of the API, to the microsecond and in UTC; ValueError if it is not valid."""
    if isinstance(value, datetime):
        return value
    second, _, fraction = value.removesuffix("Z").partition(".")
    found = datetime.fromisoformat(second + "+00:00")
    return found.replace(microsecond=int(fraction.ljust(6, "0")[:6] or 0))


def parse_time_ns(text: str) -> int:
    """Nanoseconds since the epoch of an RFC 3339 time in UTC; ValueError if it is not valid."""
    second, _, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(second + "+00:00").timestamp())
    return seconds * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or 0)


def duration_text(value: timedelta) -> str:
    """A `timedelta` as a text of the API."""
    microseconds = value // timedelta(microseconds=1)
    seconds, rest = divmod(microseconds, 1_000_000)
    return f"{microseconds}us" if rest else f"{seconds}s"


def time_text(value: datetime) -> str:
    """A `datetime` as a text of the API; ValueError if it has no time zone."""
    if value.tzinfo is None:
        raise ValueError(f"{value} has no time zone; use a value such as datetime.now(UTC)")
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def wire(value: Any) -> Any:
    """`value` with all times and durations in it, at any depth, as texts of the API."""
    match value:
        case timedelta():
            return duration_text(value)
        case datetime():
            return time_text(value)
        case Mapping():
            return {name: wire(each) for name, each in value.items()}
        case list() | tuple():
            return [wire(each) for each in value]
    return value
