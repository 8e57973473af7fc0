"""Paths: decoded once, matched by their segments."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.inputs.paths import canonical_path, percent_decode, split_path
from contrail_edge.routing import PathTable
from tests.support.each import each

SEGMENT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)


@given(st.lists(SEGMENT, min_size=1, max_size=5))
def test_segments_come_back_from_any_spelling(segments: list[str]) -> None:
    escaped = "/" + "/".join(quote(segment, safe="") for segment in segments)
    assert split_path(escaped.encode()) == ["", *segments]
    canonical = canonical_path(split_path(escaped.encode()))
    assert split_path(canonical.encode()) == ["", *segments]


def test_escape_is_decoded_once() -> None:
    assert split_path(b"/v1/a%2Fb/%2541") == ["", "v1", "a/b", "%41"]


@each("text", ["%", "%4", "%zz", "a%G1", "%FF", "%C3", "%ED%A0%80", "%00", "%0A"])
def test_broken_escape_is_400(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        percent_decode(text)
    assert refused.value.spec is errors.BAD_REQUEST


def test_table_finds_the_value_and_the_parameters() -> None:
    table: PathTable[str] = PathTable()
    table.add("/v1/streams", "all")
    table.add("/v1/streams/{stream}", "one")
    table.add("/v1/streams/{stream}/messages/{seq}", "message")
    table.add("/v1/streams/{stream}/replay/plan", "plan")
    assert table.match(["", "v1", "streams"]) == ("all", {})
    assert table.match(["", "v1", "streams", "S"]) == ("one", {"stream": "S"})
    assert table.match(["", "v1", "streams", "S", "replay", "plan"]) == ("plan", {"stream": "S"})
    found = table.match(["", "v1", "streams", "a/b", "messages", "7"])
    assert found == ("message", {"stream": "a/b", "seq": "7"})


@each("segments", [[], [""], ["", "v1"], ["", "v1", "streams", ""], ["", "v2", "streams", "S"]])
def test_table_finds_nothing_for_other_paths(segments: list[str]) -> None:
    table: PathTable[str] = PathTable()
    table.add("/v1/streams/{stream}", "one")
    assert table.match(segments) is None
