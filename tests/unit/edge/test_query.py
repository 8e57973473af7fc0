"""Query parameters."""

from typing import Annotated

import msgspec
import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.inputs.query import (
    duration_parameter,
    filter_parameter,
    parse_query,
    time_parameter,
)
from tests.support.each import each


class Query(msgspec.Struct):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 256
    verbose: bool = False
    clamp: Annotated[bool, msgspec.Meta(description="Described.")] = False
    subject: str = ""


@each(
    ("text", "parsed"),
    [
        (b"", Query()),
        (b"limit=5&subject=a.%2A", Query(limit=5, subject="a.*")),
        (b"subject=a+b", Query(subject="a b")),
        (b"verbose", Query(verbose=True)),
        (b"verbose=false", Query()),
        (b"clamp&subject=a", Query(clamp=True, subject="a")),
        (b"other=1&&", Query()),
        (b"subject=", Query()),
    ],
)
def test_parameters_are_parsed(text: bytes, parsed: Query) -> None:
    assert parse_query(text, Query) == parsed


@each(
    ("text", "pointer"),
    [
        (b"limit=0", "limit"),
        (b"limit=1001", "limit"),
        (b"limit=x", "limit"),
        (b"limit=", "limit"),
        (b"limit=1&limit=2", "limit"),
        (b"verbose=maybe", "verbose"),
    ],
)
def test_bad_parameter_is_422_by_its_name(text: bytes, pointer: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_query(text, Query)
    assert refused.value.spec is errors.INVALID_FIELD
    assert [field.pointer for field in refused.value.fields] == [pointer]


@each("text", [b"subject=%zz", b"subject=%FF", b"\xff=1", b"a=1&" * 65])
def test_broken_query_is_400(text: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_query(text, Query)
    assert refused.value.spec is errors.BAD_REQUEST


def test_durations_times_and_filters() -> None:
    assert duration_parameter("wait", "") == 0
    assert duration_parameter("wait", "1m") == 60_000_000_000
    assert duration_parameter("wait", "1000") == 1000
    assert time_parameter("start_time", "1970-01-01T00:00:01Z") == 1_000_000_000
    assert time_parameter("start_time", "") == 0
    assert time_parameter("start_time", "1970-01-01T00:00:00Z") == 1
    assert filter_parameter("subject", "a.>") == "a.>"


@each("text", ["61s", "-1s", "soon"])
def test_duration_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="wait"):
        duration_parameter("wait", text)


def test_bad_time_and_filter_are_refused() -> None:
    with pytest.raises(ApiError, match="start_time"):
        time_parameter("start_time", "yesterday")
    with pytest.raises(ApiError, match="subject"):
        filter_parameter("subject", "a..b")
