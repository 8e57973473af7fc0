"""Replay plans and the queries made from them."""

import pytest

from contrail_spark.errors import ProtocolError
from contrail_spark.options import parse_options
from contrail_spark.plan import (
    ReplayPlan,
    Split,
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
PLAN = ReplayPlan("FLIGHTS", "f3a", (Split(0, 1, 50, 48, 9_600),))


def test_a_plan_document_becomes_a_plan() -> None:
    assert parse_plan(DOCUMENT) == PLAN


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


def test_times_and_subject_are_sent_with_the_plan() -> None:
    options = parse_options(
        {"stream": "S", "startingTimestamp": "0", "endingTimestamp": "1", "subject": "a.>"}
    )
    assert plan_query(options) == [
        ("splits", "8"),
        ("start_time", "1970-01-01T00:00:00.000000000Z"),
        ("end_time", "1970-01-01T00:00:00.001000000Z"),
        ("subject", "a.>"),
    ]


def test_a_stream_name_is_escaped_in_paths() -> None:
    options = parse_options({"stream": "50%é"})
    assert plan_path(options) == "/v1/streams/50%25%C3%A9/replay/plan"
    assert replay_path(ReplayPlan("50%é", "1", ())) == "/v1/streams/50%25%C3%A9/replay"


def test_a_split_is_asked_for_with_its_incarnation_and_columns() -> None:
    query = replay_query(
        parse_options({"stream": "FLIGHTS"}), PLAN, PLAN.splits[0], 11, ("subject", "seq")
    )
    assert query == [
        ("shard", "0"),
        ("from_seq", "11"),
        ("to_seq", "50"),
        ("incarnation", "f3a"),
        ("columns", "subject,seq"),
        ("schema", "spark"),
    ]


def test_subject_and_clamping_are_sent_with_a_split_when_asked_for() -> None:
    options = parse_options({"stream": "S", "subject": "a.*", "failOnDataLoss": "false"})
    query = replay_query(options, PLAN, PLAN.splits[0], 1, ("seq",))
    assert query[-2:] == [("subject", "a.*"), ("clamp", "true")]


def test_the_sequence_is_always_among_the_columns_asked_for() -> None:
    assert wire_columns(("subject",)) == ("subject", "seq")
    assert wire_columns(("seq", "data")) == ("seq", "data")
