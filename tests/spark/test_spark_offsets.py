"""Offsets of streaming queries: how far a batch reads, and into which partitions it is cut."""

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from contrail_spark.errors import CheckpointError, OptionError, ProtocolError
from contrail_spark.offsets import (
    PARTITION_SEQUENCES_MAX,
    PARTITION_SEQUENCES_MIN,
    Heads,
    Offset,
    advance,
    check_shards,
    heads_of,
    initial,
    loss,
    parse_offset,
    ranges,
    shares,
)
from contrail_spark.options import DEFAULT_SPLITS, SEQ_MAX, SPLITS_MAX, parse_options
from contrail_spark.plan import ReplayPlan, ShardBounds, Split
from tests.support.each import each

COUNTS = st.dictionaries(st.integers(0, 40), st.integers(0, 1 << 40), min_size=1, max_size=9)
LIMITS = st.integers(1, 1 << 41)
SHARDS = st.dictionaries(
    st.integers(0, 40),
    st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 22)),
    min_size=1,
    max_size=9,
)


def heads(**shards: tuple[int, int]) -> Heads:
    """Heads of incarnation "a"; ``s0=(1, 9)`` are the bounds of shard 0."""
    return Heads("a", {int(n[1:]): ShardBounds(int(n[1:]), *pair) for n, pair in shards.items()})


# Limits ------------------------------------------------------------------------------------------


@given(COUNTS, LIMITS)
def test_a_limit_is_used_up_and_not_exceeded(backlogs: dict[int, int], limit: int) -> None:
    granted = shares(backlogs, limit)
    assert granted.keys() == backlogs.keys()
    least = sum(backlog > 0 for backlog in backlogs.values())
    assert sum(granted.values()) == min(max(limit, least), sum(backlogs.values()))
    assert all(0 <= granted[number] <= backlogs[number] for number in backlogs)


@given(COUNTS, LIMITS)
def test_no_shard_is_held_up_by_larger_ones(backlogs: dict[int, int], limit: int) -> None:
    behind = [number for number, backlog in backlogs.items() if backlog]
    assert all(shares(backlogs, limit)[number] for number in behind)


@given(COUNTS, st.integers(50, 1 << 41))
def test_shares_are_in_proportion_to_the_backlogs(backlogs: dict[int, int], limit: int) -> None:
    total = sum(backlogs.values())
    assume(total > limit)
    for number, share in shares(backlogs, limit).items():
        assert abs(share - limit * backlogs[number] / total) <= 2 + len(backlogs)


@given(SHARDS, st.one_of(st.none(), LIMITS))
def test_batches_reach_the_end_of_every_shard(
    shards: dict[int, tuple[int, int]], limit: int | None
) -> None:
    found = Heads("a", {n: ShardBounds(n, 1, low + count) for n, (low, count) in shards.items()})
    start = Offset("a", {number: low for number, (low, _) in shards.items()})
    end = advance(start, found, limit)
    assert end.document() == advance(start, found, limit).document()
    read = sum(end.shards[number] - start.shards[number] for number in shards)
    backlog = sum(count for _, count in shards.values())
    least = sum(count > 0 for _, count in shards.values())
    assert read == (backlog if limit is None else min(max(limit, least), backlog))
    if not backlog:
        assert end.document() == start.document()


def test_what_retention_removed_does_not_count_towards_the_limit() -> None:
    assert advance(Offset("a", {0: 10}), heads(s0=(1_001, 2_000)), 5).shards == {0: 1_005}
    assert advance(Offset("a", {0: 10}), heads(s0=(2_001, 2_000)), 5).shards == {0: 2_000}


def test_a_stream_that_was_re_created_is_read_from_its_oldest_message() -> None:
    end = advance(Offset("before", {0: 900, 1: 7}), heads(s0=(11, 50)), 5)
    assert end == Offset("a", {0: 15})
    assert ranges(Offset("before", {0: 900, 1: 7}), end) == [Split(0, 1, 15, 0, 0)]


def test_a_stream_that_became_shorter_is_read_from_its_end() -> None:
    end = advance(Offset("a", {0: 900}), heads(s0=(11, 50)), None)
    assert end == Offset("a", {0: 50})
    assert ranges(Offset("a", {0: 900}), end) == []


# Partitions --------------------------------------------------------------------------------------


def between(shards: dict[int, tuple[int, int]]) -> tuple[Offset, Offset]:
    start = Offset("a", {number: low for number, (low, _) in shards.items()})
    return start, Offset("a", {number: low + count for number, (low, count) in shards.items()})


@given(SHARDS, st.one_of(st.none(), st.integers(1, SPLITS_MAX)))
def test_partitions_cover_the_range_without_overlap(
    shards: dict[int, tuple[int, int]], partitions: int | None
) -> None:
    start, end = between(shards)
    splits = ranges(start, end, partitions)
    reached = dict(start.shards)
    for split in splits:
        assert split.from_seq == reached[split.shard] + 1 <= split.to_seq
        reached[split.shard] = split.to_seq
    assert reached == end.shards
    assert [split.shard for split in splits] == sorted(split.shard for split in splits)


@given(SHARDS, st.one_of(st.none(), st.integers(1, SPLITS_MAX)))
def test_a_logged_range_has_the_same_partitions_again(
    shards: dict[int, tuple[int, int]], partitions: int | None
) -> None:
    start, end = between(shards)
    logged = [parse_offset(json.loads(json.dumps(one.document()))) for one in (start, end)]
    assert ranges(*logged, partitions) == ranges(start, end, partitions)


@given(SHARDS, st.integers(1, SPLITS_MAX))
def test_there_are_about_as_many_partitions_as_asked_for(
    shards: dict[int, tuple[int, int]], partitions: int
) -> None:
    splits = ranges(*between(shards), partitions)
    total = sum(count for _, count in shards.values())
    assert min(partitions, total) <= len(splits) < partitions + len(shards)
    sizes = [split.to_seq - split.from_seq + 1 for split in splits]
    assert all(size <= -(-total // partitions) for size in sizes)


@each(
    ("count", "partitions"),
    [
        (1, 1),
        (PARTITION_SEQUENCES_MIN, 1),
        (PARTITION_SEQUENCES_MIN + 1, 2),
        (PARTITION_SEQUENCES_MIN * 100, DEFAULT_SPLITS),
        (PARTITION_SEQUENCES_MAX * DEFAULT_SPLITS, DEFAULT_SPLITS),
        (PARTITION_SEQUENCES_MAX * DEFAULT_SPLITS + 1, DEFAULT_SPLITS + 1),
        (SEQ_MAX, SPLITS_MAX),
    ],
)
def test_a_batch_has_as_many_partitions_as_pay_off(count: int, partitions: int) -> None:
    assert len(ranges(Offset("a", {0: 0}), Offset("a", {0: count}))) == partitions


# Where a query starts ----------------------------------------------------------------------------

PLAN = ReplayPlan(
    "S",
    "a",
    (Split(0, 40, 45, 0, 0), Split(0, 30, 39, 0, 0)),
    (ShardBounds(0, 11, 50), ShardBounds(1, 21, 60)),
)
ONE_SHARD = ReplayPlan("S", "a", (), (ShardBounds(0, 11, 50),))


@each(
    ("options", "plan", "shards"),
    [
        ({}, PLAN, {0: 50, 1: 60}),
        ({"startingPosition": "Latest"}, PLAN, {0: 50, 1: 60}),
        ({"startingPosition": "earliest"}, PLAN, {0: 10, 1: 20}),
        ({"startingTimestamp": "0"}, PLAN, {0: 29, 1: 60}),
        ({"startingSequence": "1"}, ONE_SHARD, {0: 10}),
        ({"startingSequence": "12"}, ONE_SHARD, {0: 11}),
        ({"startingSequence": "51"}, ONE_SHARD, {0: 50}),
    ],
)
def test_a_query_starts_where_its_options_say(
    options: dict[str, str], plan: ReplayPlan, shards: dict[int, int]
) -> None:
    assert initial(parse_options({"stream": "S", **options}), plan) == Offset("a", shards)


@each(
    ("start", "plan", "sentence"),
    [
        ("52", ONE_SHARD, "startingSequence: 52 is above the next sequence of the stream, 51"),
        ("12", PLAN, "endingSequence: 2 shards of the stream are read, each with its own"),
    ],
)
def test_a_position_that_cannot_be_is_refused(start: str, plan: ReplayPlan, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        initial(parse_options({"stream": "S", "startingSequence": start}), plan)


def test_a_server_that_leaves_the_shards_out_cannot_be_followed() -> None:
    with pytest.raises(ProtocolError, match="plan has no shards; a newer server"):
        heads_of(ReplayPlan("S", "a", ()))


# Checkpoints -------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 1 << 20), st.integers(0, SEQ_MAX), max_size=9))
def test_an_offset_is_the_same_text_however_it_was_made(shards: dict[int, int]) -> None:
    text = json.dumps(Offset("a", shards).document())
    turned = dict(reversed(shards.items()))
    assert json.dumps(Offset("a", turned).document()) == text
    assert json.dumps(parse_offset(json.loads(text)).document()) == text


@each(
    "document",
    [
        None,
        {},
        [],
        {"incarnation": "a"},
        {"incarnation": 1, "shards": {}},
        {"incarnation": "a", "shards": [1]},
        {"incarnation": "a", "shards": {"x": 1}},
        {"incarnation": "a", "shards": {"0": "1"}},
        {"incarnation": "a", "shards": {"0": True}},
        {"incarnation": "a", "shards": {"0": -1}},
        {"incarnation": "a", "shards": {"0": SEQ_MAX + 1}},
    ],
)
def test_another_document_in_the_checkpoint_is_refused(document: Any) -> None:
    with pytest.raises(CheckpointError, match="not one of this data source"):
        parse_offset(document)


def test_what_the_stream_no_longer_has_is_named() -> None:
    assert loss(Offset("a", {0: 9, 1: 5}), heads(s0=(1, 9), s1=(7, 6))) is None
    assert "was re-created" in str(loss(Offset("b", {0: 9}), heads(s0=(1, 9))))
    lost = loss(Offset("a", {0: 10}), heads(s0=(1, 9)))
    assert lost == (
        "shard 0 ends at sequence 9, but this query has read up to 10: the server has lost messages"
    )


def test_other_shards_than_in_the_checkpoint_are_refused() -> None:
    check_shards(Offset("b", {7: 1}), heads(s0=(1, 9)))
    for shards in ({0: 1}, {0: 1, 1: 1, 2: 1}):
        with pytest.raises(CheckpointError, match="option subject was changed"):
            check_shards(Offset("a", shards), heads(s0=(1, 9), s1=(1, 9)))


def test_a_limit_below_the_number_of_shards_serves_each_of_them() -> None:
    assert shares({0: 5, 1: 9, 2: 0, 3: 7}, 2) == {0: 1, 1: 1, 2: 0, 3: 1}
    assert shares({0: 5, 1: 9, 2: 0, 3: 7}, 4) == {0: 1, 1: 2, 2: 0, 3: 1}
    assert shares(dict.fromkeys(range(8), 1), 3) == dict.fromkeys(range(8), 1)
