"""Figures as people read them."""

import pytest

from contrail_pipeline.summary import wording
from contrail_pipeline.summary.bins import DAY, HOUR, MINUTE, MS, S


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0 µs"),
        (999, "999 µs"),
        (1_234, "1.23 ms"),
        (12 * S + 345 * MS, "12.3 s"),
        (MINUTE, "1m"),
        (2 * DAY + 4 * HOUR, "2d 4h"),
    ],
)
def test_span(us: int, text: str) -> None:
    assert wording.span(us) == text


@pytest.mark.parametrize(
    ("messages", "us", "text"),
    [
        (336_776, 14_700_000, "22.9k/s"),
        (10, S, "10/s"),
        (10, MINUTE, "10/min"),
        (1, HOUR, "1/h"),
        (1, 4 * DAY, "0.25/day"),
        (5, 0, "-"),
    ],
)
def test_rate(messages: int, us: int, text: str) -> None:
    assert wording.rate(messages, us) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0, "0.0 %"), (1, "<0.1 %"), (100, "0.1 %"), (9_940, "9.9 %"), (10_400, "10 %"),
        (99_000, "99 %"), (99_800, "99.8 %"),
        (99_999, ">99.9 %"), (100_000, "100 %"),
    ],
)  # fmt: skip
def test_share(part: int, text: str) -> None:
    assert wording.share(part, 100_000) == text


def test_a_share_of_nothing_is_not_a_number() -> None:
    assert wording.share(0, 0) == "-"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (1_200, "1.2k"), (336_776, "337k"), (4.5e6, "4.5M")],
)
def test_short(number: float, text: str) -> None:
    assert wording.short(number) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [(MS, "millisecond"), (S, "second"), (30 * S, "30 seconds"), (DAY, "day"), (7 * DAY, "7 days")],
)
def test_width(us: int, text: str) -> None:
    assert wording.width(us) == text


def test_moment() -> None:
    at = 1_369_000_000 * S + 123_456
    assert wording.moment(at) == "19 May 2013, 21:46:40"
    assert wording.moment(at, MS) == "19 May 2013, 21:46:40.123"
    assert wording.moment(at, DAY) == "19 May 2013"


@pytest.mark.parametrize(
    ("step", "text"),
    [(MS, "40.123 s"), (S, "21:46:40"), (MINUTE, "21:46"), (DAY, "19 May"), (28 * DAY, "May 2013"),
     (365 * DAY, "2013")],
)  # fmt: skip
def test_tick(step: int, text: str) -> None:
    assert wording.tick(1_369_000_000 * S + 123_456, step) == text


def test_a_tick_at_midnight_has_the_day() -> None:
    assert wording.tick(15 * DAY, HOUR) == "16 Jan"
