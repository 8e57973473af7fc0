"""Figures as people read them, and sentences about them. Pure."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from contrail_client.cli import units
from contrail_pipeline.summary.bins import DAY, HOUR, MINUTE, MS, YEAR, S
from contrail_pipeline.summary.figures import Content, Summary, Timeline

Label = Callable[[float], str]
"""Writes a figure with its unit."""

_LARGE: Final = (("M", 1_000_000), ("k", 1_000))
_HALF: Final = 0.5
_REPEATED: Final = 0.05
"""The least share of repeated payloads that is worth a sentence: the estimate is off by 2 %."""
_FEW: Final = 10
_ALL: Final = 100
_LEAST: Final = 0.1


def count(number: float) -> str:
    """A number with thousands separators."""
    return f"{number:,.0f}"


def short(number: float) -> str:
    """A number for axes: `950`, `1.2k`, `336k`, `4.5M`."""
    for unit, size in _LARGE:
        if number >= size:
            return f"{_three(number / size)}{unit}"
    return f"{number:g}" if number == int(number) else _three(number)


def size(number: float) -> str:
    """Bytes with their unit."""
    return str(units.size(round(number)))


def span(microseconds: float) -> str:
    """A length of time with its unit: `250 µs`, `3.2 ms`, `12.5 s`, `3m 20s`, `2d 4h`."""
    if microseconds < MS:
        return f"{microseconds:.0f} µs"
    if microseconds < S:
        return f"{_three(microseconds / MS)} ms"
    if microseconds < MINUTE:
        return f"{_three(microseconds / S)} s"
    return str(units.span(microseconds / S))


def rate(messages: float, span_us: int) -> str:
    """Messages a second, or in a longer time if they are few; `-` without a time."""
    if span_us <= 0:
        return "-"
    units_of_time = (("s", S), ("min", MINUTE), ("h", HOUR), ("day", DAY))
    unit, length = next(
        (each for each in units_of_time if messages * each[1] >= span_us), units_of_time[-1]
    )
    number = messages * length / span_us
    return f"{short(number) if number >= _LARGE[-1][1] else _three(number)}/{unit}"


def share(part: float, whole: float) -> str:
    """A share in percent: `<0.1 %` rather than 0, and `>99.9 %` rather than 100."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < _LEAST:
        return f"<{_LEAST} %"
    if _ALL - _LEAST < percent < _ALL:
        return f">{_ALL - _LEAST} %"
    # Without places, almost all would be 100 %.
    places = 0 if _FEW <= percent <= _ALL - 1 or percent == _ALL else 1
    return f"{percent:.{places}f} %"


def moment(us: int, precision_us: int = S) -> str:
    """A time in UTC, to the second or, for a precision below it, to the millisecond."""
    at = datetime.fromtimestamp(us // S, UTC)
    if precision_us >= DAY:
        return f"{at.day} {at:%b %Y}"
    fraction = f".{us % S // MS:03}" if precision_us < S else ""
    return f"{at.day} {at:%b %Y, %H:%M:%S}{fraction}"


def tick(us: int, step_us: int) -> str:
    """A time for an axis whose ticks are so far apart."""
    at = datetime.fromtimestamp(us // S, UTC)
    if step_us >= YEAR:
        return f"{at:%Y}"
    if step_us >= 28 * DAY:
        return f"{at:%b %Y}"
    if step_us >= DAY:
        return f"{at.day} {at:%b}"
    if step_us >= MINUTE:
        return f"{at:%H:%M}" if us % DAY else f"{at.day} {at:%b}"
    if step_us >= S:
        return f"{at:%H:%M:%S}"
    return f"{at:%S}.{us % S // MS:03} s"


def width(us: int) -> str:
    """The width of a slice, as in `messages per 5 s`: no number if it is 1."""
    for unit, length in (
        ("day", DAY),
        ("hour", HOUR),
        ("minute", MINUTE),
        ("second", S),
        ("millisecond", MS),
    ):
        if us >= length:
            number = us // length
            return unit if number == 1 else f"{number:,} {unit}s"
    return f"{us} microseconds"


def _three(number: float) -> str:
    """A number with about three digits."""
    places = 2 if number < _FEW else 1 if number < _FEW * _FEW else 0
    text = f"{number:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def readings(summary: Summary) -> list[str]:
    """The sentences that begin a report."""
    content = summary.content
    if not content.messages:
        return ["There are no messages in this range.", *_behind(summary)]
    return [
        _amount(content),
        *([_busiest(content, content.timeline)] if content.timeline else []),
        *_subjects(content),
        *_payloads(content),
        *_behind(summary),
    ]


def _amount(content: Content) -> str:
    first, last = content.first_us or 0, content.last_us or 0
    amount = f"{units.counted(content.messages, 'message')} with {size(content.bytes)} of payload"
    if first == last:
        return f"{amount}, stored at {moment(first)} UTC."
    return (
        f"{amount}, stored in {span(last - first)}: {rate(content.messages, last - first)} on "
        "average."
    )


def _busiest(content: Content, timeline: Timeline) -> str:
    busiest = timeline.busiest
    return (
        f"The busiest second began at {moment(busiest.start_us)} UTC and had "
        f"{units.counted(busiest.messages, 'message')} "
        f"({share(busiest.messages, content.messages)})."
    )


def _subjects(content: Content) -> list[str]:
    """How far the messages are concentrated on few subjects."""
    if content.subject_count == 1:
        return [f"All messages have one subject: {content.subjects[0].subject}."]
    so_far = 0
    for number, each in enumerate(content.subjects, 1):
        so_far += each.messages
        if so_far >= _HALF * content.messages:
            return [
                f"{units.counted(number, 'subject').capitalize()} of "
                f"{count(content.subject_count)} {'has' if number == 1 else 'have'} "
                f"{share(so_far, content.messages)} of the messages."
            ]
    return [
        f"The messages are spread over {count(content.subject_count)} subjects: the "
        f"{len(content.subjects)} with most of them have {share(so_far, content.messages)}."
    ]


def _payloads(content: Content) -> list[str]:
    repeated = content.messages - content.distinct_payloads
    if content.messages < _FEW or repeated < _REPEATED * content.messages:
        return []
    return [f"About {share(repeated, content.messages)} of the payloads repeat an earlier one."]


def _behind(summary: Summary) -> list[str]:
    behind = [each for each in summary.consumers if each.behind]
    if not summary.consumer_count:
        return ["The stream has no consumers."]
    if not behind:
        many = units.counted(summary.consumer_count, "consumer")
        return [
            "The only consumer has nothing left to do."
            if summary.consumer_count == 1
            else f"None of the {many} has anything left to do."
        ]
    worst = behind[0]
    oldest = worst.oldest_age_us
    age = "" if oldest is None else f"; the oldest of them is {span(oldest)} old"
    open_ = units.counted(worst.behind, "message")
    return [f"Consumer {worst.name} is most behind: {open_} to deliver or acknowledge{age}."]
