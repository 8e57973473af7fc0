"""Replay plans and the queries made from them."""

import pytest

from contrail_spark.errors import ProtocolError
from contrail_spark.options import parse_options
from contrail_spark.plan import (
    ReplayPlan,
    ShardBounds,
    Split,
    kept_query,
    parse_plan,
    plan_path,
    plan_query,
    replay_path,
    replay_query,
    wire_columns,
)
from tests.support.each import each

SPLIT = {"shard": 0, "from_seq": 1, "to_seq": 50, "messages": 48, "bytes": 9_600}
DOCUMENT = {"stream": "FLIGHTS", "incarnation": "f3a", "splits": [SPLIT]}
BOUNDS = {"shard": 0, "first_seq": 1, "last_seq": 50}
PLAN = ReplayPlan("FLIGHTS", "f3a", (Split(0, 1, 50, 48, 9_600),))


def test_a_plan_document_becomes_a_plan() -> None:
    assert parse_plan(DOCUMENT) == PLAN


def test_a_plan_has_the_bounds_of_the_shards() -> None:
    found = parse_plan({**DOCUMENT, "shards": [BOUNDS]})
    assert found.shards == (ShardBounds(0, 1, 50),)


def test_a_plan_of_an_empty_range_has_no_splits() -> None:
    assert parse_plan({**DOCUMENT, "splits": []}).splits == ()


@each(
    "document",
    [
        None,
        [],
        {},
        {**DOCUMENT, "splits": None},
        {**DOCUMENT, "splits": [None]},
        {**DOCUMENT, "shards": None},
        {**DOCUMENT, "shards": [{**BOUNDS, "last_seq": "50"}]},
        {**DOCUMENT, "splits": [{**SPLIT, "to_seq": "50"}]},
        {**DOCUMENT, "splits": [{**SPLIT, "shard": True}]},
        {**DOCUMENT, "splits": [{**SPLIT, "to_seq": 0}]},
    ],
)
def test_a_document_that_is_no_plan_is_a_protocol_error(document: object) -> None:
    with pytest.raises(ProtocolError, match="replay plan cannot be read"):
        parse_plan(document)


def test_only_the_limits_given_are_sent_with_the_plan() -> None:
    options = parse_options({"stream": "FLIGHTS", "splits": "4", "startingSequence": "7"})
    assert plan_query(options) == [("splits", "4"), ("from_seq", "7")]
    options = parse_options({"stream": "S", "minPartitions": "4", "maxBytesPerPartition": "1k"})
    assert plan_query(options) == [("splits", "4"), ("split_bytes", "1024")]


def test_times_and_subject_are_sent_with_the_plan() -> None:
    options = parse_options(
        {"stream": "S", "startingTimestamp": "0", "endingTimestamp": "1", "subject": " a.>  b.* "}
    )
    assert plan_query(options) == [
        ("splits", "8"),
        ("split_bytes", "134217728"),
        ("start_time", "1970-01-01T00:00:00.000000000Z"),
        ("end_time", "1970-01-01T00:00:00.001000000Z"),
        ("subject", "a.> b.*"),
    ]


def test_a_stream_name_is_escaped_in_paths() -> None:
    options = parse_options({"stream": "50%é"})
    assert plan_path(options) == "/v1/streams/50%25%C3%A9/replay/plan"
    assert replay_path(ReplayPlan("50%é", "1", ())) == "/v1/streams/50%25%C3%A9/replay"


def test_a_split_is_asked_for_with_its_incarnation_and_columns() -> None:
    options = parse_options({"stream": "FLIGHTS"})
    query = replay_query(options, PLAN, Split(0, 11, 50, 0, 0), ("subject", "seq"), None)
    assert query == [
        ("shard", "0"),
        ("from_seq", "11"),
        ("to_seq", "50"),
        ("incarnation", "f3a"),
        ("columns", "subject,seq"),
        ("schema", "spark"),
    ]


def test_filters_and_consistency_are_sent_with_a_split_when_asked_for() -> None:
    options = parse_options({"stream": "S", "subject": "a.* b"})
    query = replay_query(options, PLAN, PLAN.splits[0], ("seq",), "any")
    assert query[-2:] == [("subject", "a.* b"), ("consistency", "any")]


def test_what_is_left_of_a_split_is_asked_of_the_leader_of_its_shard() -> None:
    query = kept_query(Split(3, 7, 50, 48, 9_600))
    assert dict(query) == {"shard": "3", "from_seq": "7", "to_seq": "50"}


def test_the_sequence_is_always_among_the_columns_asked_for() -> None:
    assert wire_columns(("subject",)) == ("subject", "seq")
    assert wire_columns(("seq", "data")) == ("seq", "data")
