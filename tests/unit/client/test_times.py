"""Times and durations: texts of the API, and those of Python."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.calls import query_items
from contrail_client.times import duration_text, time_text, to_datetime, to_timedelta, wire
from contrail_common.timeunits import format_duration, format_time, parse_duration, parse_time
from tests.support.each import each


@given(st.timedeltas(timedelta(0), timedelta(days=100_000)))
def test_durations_mean_the_same_to_the_server(value: timedelta) -> None:
    nanoseconds = value // timedelta(microseconds=1) * 1_000
    assert parse_duration(duration_text(value)) == nanoseconds
    assert to_timedelta(format_duration(nanoseconds)) == value


@given(st.integers(0, 7_000_000_000_000_000))
def test_times_mean_the_same_to_the_server(microseconds: int) -> None:
    value = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    assert parse_time(time_text(value)) == microseconds * 1_000
    assert to_datetime(format_time(microseconds * 1_000)) == value


@each(
    ("text", "seconds"),
    [("0s", 0), ("0", 0), ("1h30m", 5400), ("-5s", -5), ("1.5s", 1.5), (2_000_000_000, 2)],
)
def test_durations_are_read(text: str | int, seconds: float) -> None:
    assert to_timedelta(text) == timedelta(seconds=seconds)


@each("text", ["", "5", "5 s", "s", "1h 30m", "soon"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        to_timedelta(text)


def test_everything_in_a_body_becomes_text() -> None:
    east = timezone(timedelta(hours=2))
    body: Any = {"a": [timedelta(seconds=1), {"b": datetime(2026, 1, 31, 10, tzinfo=east)}], "c": 1}
    assert wire(body) == {"a": ["1s", {"b": "2026-01-31T08:00:00.000000Z"}], "c": 1}
    assert query_items({"wait": timedelta(milliseconds=1)}) == (("wait", "1000us"),)
    with pytest.raises(ValueError, match="no time zone"):
        wire(datetime(2026, 1, 31))  # noqa: DTZ001 - that is the point
