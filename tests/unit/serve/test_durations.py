"""Settings that are durations: their bounds, and a sentence for each mistake."""

import pytest

from contrail_serve.settings import EdgeProcessSettings, ServeSettings, SettingsError
from tests.support.each import each


@each(("value", "seconds"), [(None, 30.0), ("100ms", 0.1), ("1h", 3_600.0), ("1m30s", 90.0)])
def test_publish_timeout_is_a_duration(value: str | None, seconds: float) -> None:
    assert ServeSettings.of({"publish_timeout": value}).publish_timeout_s == seconds
    edge = {"publish_timeout": value, "cluster_secret": "s" * 16}
    assert EdgeProcessSettings.of_api(edge).publish_timeout_s == seconds


@each(
    ("value", "problem"),
    [
        ("99ms", "must be between 100ms and 1h"),
        ("61m", "must be between 100ms and 1h"),
        ("-1s", "must be between"),
        ("soon", "must be a duration such as 30s"),
        (30, "must be a duration such as 30s"),
        ("", "must be a duration such as 30s"),
    ],
)
def test_publish_timeout_that_is_none_is_refused(value: object, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"publish_timeout {problem}"):
        ServeSettings.of({"publish_timeout": value})


@each(("value", "seconds"), [(None, 600.0), ("1s", 1.0), ("36500d", 3_153_600_000.0)])
def test_jump_of_the_clock_is_a_duration(value: str | None, seconds: float) -> None:
    assert ServeSettings.of({"max_clock_jump": value}).max_clock_jump_s == seconds


@each("value", ["999ms", "36501d", "-1d", "ever"])
def test_jump_of_the_clock_out_of_bounds_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="max_clock_jump must"):
        ServeSettings.of({"max_clock_jump": value})
