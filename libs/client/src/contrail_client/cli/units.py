"""How numbers, sizes, times and other values read for people. Pure."""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from contrail_client.times import parse_time_ns

_NS_PER_S: Final = 1_000_000_000
_KIB: Final = 1024
_SIZES: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS: Final = (("y", 31_536_000), ("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?Z")
_UNLIMITED: Final = -1


class Figure(str):
    """A number as text; tables align it to the right."""

    __slots__ = ()


def count(number: float) -> Figure:
    """A number with thousands separators and at most three decimal places."""
    if isinstance(number, int):
        return Figure(f"{number:,}")
    return Figure(f"{number:,.3f}".rstrip("0").rstrip("."))


def counted(number: int, noun: str) -> str:
    """A number of things: `1 message`, `1,234 messages`."""
    return f"{count(number)} {noun}" if number == 1 else f"{count(number)} {noun}s"


def size(number: int) -> Figure:
    """Bytes as `512 B`, `1.5 KiB`, `2 GiB`; -1 is `unlimited`, as in configurations."""
    if number == _UNLIMITED:
        return Figure("unlimited")
    if number < _KIB:
        return Figure(f"{number} B")
    power = min((number.bit_length() - 1) // 10, len(_SIZES))
    return Figure(f"{count(round(number / _KIB**power, 1))} {_SIZES[power - 1]}")


def span(seconds: float) -> Figure:
    """A length of time in its two largest units: `45s`, `3m 20s`, `2d 4h`."""
    rest = int(max(seconds, 0))
    parts: list[str] = []
    for unit, length in _SPANS:
        number, rest = divmod(rest, length)
        if number or parts:
            parts.append(f"{number}{unit}" if number else "")
        if len(parts) == 2:  # noqa: PLR2004 - two units say enough
            break
    return Figure(" ".join(filter(None, parts)) or "0s")


def since_s(time: str, now_ns: int) -> float:
    """Seconds since an RFC 3339 time; negative if it is in the future."""
    return (now_ns - parse_time_ns(time)) / _NS_PER_S


def age(time: str | None, now_ns: int) -> Figure:
    """How long ago an RFC 3339 time was; `-` for None."""
    if time is None:
        return Figure("-")
    return span(since_s(time, now_ns))


def moment(time: str, now_ns: int) -> str:
    """An RFC 3339 time to the second, with how long ago it was."""
    match = _TIME.fullmatch(time)
    if match is None:
        return time
    ago_s = since_s(time, now_ns)
    text = f"{span(ago_s)} ago" if ago_s >= 0 else f"in {span(-ago_s)}"
    return f"{match[1]} {match[2]} UTC ({text})"


def cell(value: object) -> str:
    """Any value as a person would write it, not as Python prints it, such as `None` or `True`."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case Enum():
            return cell(value.value)
        case str():
            return value
        case int() | float():
            return count(value)
        case Mapping():
            return ", ".join(f"{name}={cell(each)}" for name, each in value.items()) or "-"
        case list() | tuple() | set() | frozenset():
            return ", ".join(map(cell, value)) or "-"
    return str(value)


def field(name: str, value: Any, now_ns: int) -> str:
    """The value of a field of the API; the field's name decides its unit."""
    last = name.rpartition(".")[2]
    if isinstance(value, int) and not isinstance(value, bool):
        if value == _UNLIMITED and last.startswith("max_"):
            return "unlimited"
        if last in ("bytes", "max_bytes", "max_msg_size"):
            return size(value)
    if last == "max_age" and value == "0s":
        return "unlimited"
    if isinstance(value, str) and _TIME.fullmatch(value):
        return moment(value, now_ns)
    return cell(value)
