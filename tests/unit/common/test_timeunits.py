"""Durations and times on the wire."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.timeunits import (
    INT64_MAX,
    format_duration,
    format_go_duration,
    format_time,
    parse_duration,
    parse_time,
)
from tests.support.each import each

UNITS_NS = {
    "d": 86_400_000_000_000,
    "h": 3_600_000_000_000,
    "m": 60_000_000_000,
    "s": 1_000_000_000,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}


@given(st.integers(-INT64_MAX, INT64_MAX))
def test_formatted_duration_is_read_back_exactly(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns
    assert parse_duration(duration_ns) == duration_ns


@given(st.integers(0, INT64_MAX))
def test_duration_as_go_has_it_is_read_back_exactly(duration_ns: int) -> None:
    assert parse_duration(format_go_duration(duration_ns)) == duration_ns


@each(
    ("duration_ns", "text"),
    [
        (0, "0s"),
        (4, "4ns"),
        (500_000_000, "500ms"),
        (1_000_000_000, "1s"),
        (1_500_000_000, "1.5s"),
        (60_000_000_000, "1m0s"),
        (5_400_000_000_000, "1h30m0s"),
        (172_800_000_000_001, "48h0m0.000000001s"),
    ],
)
def test_duration_is_written_as_go_writes_it(duration_ns: int, text: str) -> None:
    assert format_go_duration(duration_ns) == text


@given(st.integers(1, 10_000), st.sampled_from(list(UNITS_NS)))
def test_canonical_form_has_the_largest_unit_that_divides(count: int, unit: str) -> None:
    text = format_duration(count * UNITS_NS[unit])
    number = int(text.rstrip("dhmsnu"))
    used = text.removeprefix(str(number))
    larger = list(UNITS_NS)[: list(UNITS_NS).index(used)]
    assert all(count * UNITS_NS[unit] % UNITS_NS[each] for each in larger)


@each(
    ("text", "expected"),
    [
        ("0", 0),
        ("-0", 0),
        ("0s", 0),
        ("500ms", 500_000_000),
        ("1h30m", 5_400_000_000_000),
        ("7d", 604_800_000_000_000),
        ("1.5s", 1_500_000_000),
        ("0.000000001s", 1),
        ("-2m", -120_000_000_000),
        ("+3s", 3_000_000_000),
        ("1us", 1_000),
        ("1\u00b5s", 1_000),
        ("1\u03bcs", 1_000),
        ("1m1ms1ns", 60_001_000_001),
        (f"{INT64_MAX}ns", INT64_MAX),
        (f"-{INT64_MAX}ns", -INT64_MAX),
    ],
)
def test_duration_is_read_as_go_reads_it(text: str, expected: int) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(("text", "good"), [("1s" * 32, True), ("1s" * 32 + "s", False)])
def test_duration_has_at_most_64_characters(text: str, good: bool) -> None:
    if good:
        assert parse_duration(text) == 32_000_000_000
    else:
        with pytest.raises(ValueError, match="longer than 64 characters"):
            parse_duration(text)


@each(
    "value",
    [
        "", "-", "+", "s", "5", "1.s", ".5s", "1s ", " 1s", "1h 30m", "1x", "--1s", "+-1s", "1e3s",
        "\uff11s", "1s\n", "one", True, False, INT64_MAX + 1, -INT64_MAX - 1, f"{INT64_MAX + 1}ns",
        "99999999999999999999d",
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_a_sentence(value: str | int) -> None:
    with pytest.raises(ValueError, match="a duration"):
        parse_duration(value)


@given(st.text(max_size=12) | st.from_regex(r"[0-9.hmsund+-]{0,12}", fullmatch=True))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert -INT64_MAX <= parse_duration(text) <= INT64_MAX


@given(st.integers(0, INT64_MAX))
def test_formatted_time_is_read_back_exactly(time_ns: int) -> None:
    assert parse_time(format_time(time_ns)) == time_ns


@each(
    ("text", "expected"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01t00:00:00.000000001z", 1),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1969-12-31T23:00:00.5-01:00", 500_000_000),
        ("2024-02-29T12:00:00Z", 1_709_208_000_000_000_000),
        ("2262-04-11T23:47:16.854775807Z", INT64_MAX),
    ],
)
def test_time_is_read_with_its_offset(text: str, expected: int) -> None:
    assert parse_time(text) == expected


@each(
    "text",
    [
        "", "2024-01-01", "2024-01-01T00:00:00", "2024-01-01 00:00:00Z", "2024-01-01T00:00Z",
        "2024-01-01T00:00:00.Z", "2024-01-01T00:00:00.1234567890Z", "2023-02-29T00:00:00Z",
        "2024-13-01T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01T00:00:60Z",
        "2024-01-01T00:00:00+24:00", "2024-01-01T00:00:00+0100", "0000-01-01T00:00:00Z",
        "1969-12-31T23:59:59.999999999Z", "2262-04-11T23:47:16.854775808Z",
        "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59",
        "\uff12024-01-01T00:00:00Z", "2024-01-01T00:00:00Z\n",
    ],
)  # fmt: skip
def test_what_is_no_time_within_64_bits_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_time(text)


def test_format_has_nine_digits_and_ends_in_z() -> None:
    assert format_time(1_769_846_400_500_000_000) == "2026-01-31T08:00:00.500000000Z"
