"""The checks of an audit, on batches: order, gaps, times, checksums, and the server's counts."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from contrail_client.models import StreamState
from contrail_pipeline.audit.checks import RangeCheck, RangeReport
from contrail_pipeline.audit.digest import CHUNK, ChunkDigest, digests, sizes
from contrail_pipeline.audit.findings import Finding, Findings, common, without
from contrail_pipeline.audit.verdict import ServerView, ShardResult, judge
from tests.pipeline.audit_rig import SCHEMA, Rows
from tests.spark.replay_server import row


def batch(rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def right(seqs: Iterable[int]) -> Rows:
    return [row(0, seq) for seq in seqs]


def report(*batches: Rows, first: int = 1, last: int = 20) -> RangeReport:
    check = RangeCheck(0, first, last)
    for rows in batches:
        check.add(batch(rows))
    return check.finish()


def told(report: RangeReport) -> list[tuple[str, str]]:
    return [(one.kind, one.message) for one in report.findings]


def digest(rows: Rows, *cuts: int) -> list[ChunkDigest]:
    bounds = [0, *cuts, len(rows)]
    parts = [rows[low:high] for low, high in pairwise(bounds)]
    return list(digests(batch(part) for part in parts if part))


# Checksums ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("cuts", [(), (1,), (10,), (7, 8, 19)])
def test_checksum_does_not_depend_on_batches(cuts: tuple[int, ...]) -> None:
    rows = right(range(1, 21))
    assert digest(rows, *cuts) == digest(rows)
    table = pa.Table.from_pylist(right(range(25)), SCHEMA).to_batches()[0]
    assert list(digests(iter([table.slice(1, 20)]))) == digest(rows)  # with offsets in Arrow


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("seq", 18),
        ("time", 5),
        ("subject", "flights.X"),
        ("data", b"other"),
        ("headers", [("Leg", ["16", "y"])]),
        ("headers", [("Leg", ["16x"])]),
        ("headers", [("Leg1", ["6", "x"])]),
        ("headers", [("Leg", ["16"]), ("Leg", ["x"])]),
    ],
)
def test_checksum_covers_each_column(column: str, value: Any) -> None:
    rows = right(range(1, 17))
    changed = [*rows[:-1], {**rows[-1], column: value}]
    assert digest(changed)[0].sha256 != digest(rows)[0].sha256


def test_checksum_tells_apart_where_texts_end_and_their_order() -> None:
    rows = right([1, 2])
    moved = [{**rows[0], "data": b"0:12"}, {**rows[1], "data": b":2"}]
    one, two = ({**rows[0], "data": b"a"}, {**rows[1], "data": b"b"})
    swapped = [{**one, "data": b"b"}, {**two, "data": b"a"}]
    found = [digest(each)[0].sha256 for each in (rows, moved, [one, two], swapped)]
    assert len(set(found)) == len(found)


def test_checksums_of_chunks_do_not_depend_on_where_a_read_begins() -> None:
    whole = digest(right(range(CHUNK - 3, 2 * CHUNK + 3)))
    assert [(one.chunk, one.from_seq, one.to_seq) for one in whole] == [
        (0, CHUNK - 3, CHUNK - 1), (1, CHUNK, 2 * CHUNK - 1), (2, 2 * CHUNK, 2 * CHUNK + 2)
    ]  # fmt: skip
    assert digest(right(range(CHUNK, 2 * CHUNK + 3))) == whole[1:]


def test_null_headers_and_payloads_are_empty_ones() -> None:
    rows = right([1, 5])
    nulls = [{**rows[0], "headers": None}, {**rows[1], "data": None}]
    assert digest(nulls) == digest(rows)
    mixed = batch([{**one, "headers": one["headers"] or None} for one in right(range(9))])
    assert list(digests(iter([mixed.slice(1, 3), mixed.slice(4)]))) == digest(right(range(1, 9)))
    assert sizes(batch(nulls)) == sizes(batch(rows)) == len("0:1")
    assert sizes(batch(right([4]))) == len("0:4") + 2 * (len("Leg") + 4) + len("4x")


# Order, gaps, times ------------------------------------------------------------------------------
def test_a_right_range_has_no_findings() -> None:
    found = report(right(range(1, 8)), right(range(8, 21)))
    assert (told(found), found.gaps, found.messages) == ([], [], 20)


@pytest.mark.parametrize(
    ("seqs", "expected"),
    [
        ([1, 2, 2, 3], [("doubled", "shard 0 sequence 2 comes twice")]),
        ([1, 3, 2, 4], [("order", "shard 0 sequence 2 comes after sequence 3")]),
        ([19, 20, 21],
         [("outside", "shard 0 sequence 21 is not in the range 1..20 that was asked for")]),
    ],
)  # fmt: skip
def test_sequences_out_of_order_are_named(seqs: list[int], expected: object) -> None:
    rows = [{**row(0, seq), "time": 0} for seq in seqs]
    assert told(report(rows)) == expected
    assert told(report(*([one] for one in rows))) == expected  # over the border of batches


def test_gaps_are_runs_of_sequences_that_did_not_come() -> None:
    found = report(right([3, 4, 7]), right([9, 12]))
    assert found.gaps == [(1, 2), (5, 6), (8, 8), (10, 11), (13, 20)]
    assert report(last=5).gaps == [(1, 5)]


def test_times_that_descend_are_named() -> None:
    rows = right(range(1, 21))
    rows[9]["time"] = rows[8]["time"] - 5
    expected = ("time", "shard 0 sequence 10 has a time 5 µs before that of the message before it")
    assert told(report(rows)) == [expected]
    assert told(report(rows[:9], rows[9:])) == [expected]


def test_many_findings_of_a_kind_are_counted() -> None:
    findings = Findings("stream", 3)
    for seq in range(12):
        findings.add("time", "is wrong", seq)
    assert len(findings.all()) == 11
    assert findings.all()[-1].message == "shard 3: 2 more like this"


@pytest.mark.parametrize(
    ("runs", "known", "left"),
    [
        ([(1, 9)], [], [(1, 9)]),
        ([(1, 9)], [(1, 9)], []),
        ([(1, 9)], [(0, 2), (4, 4), (8, 12)], [(3, 3), (5, 7)]),
        ([(1, 2), (5, 6)], [(2, 5)], [(1, 1), (6, 6)]),
        ([(1, 1), (3, 3)], [(0, 9)], []),
    ],
)
def test_runs_without_others(runs: Any, known: Any, left: Any) -> None:
    assert list(without(runs, known)) == left
    both = list(common(runs, known))
    assert list(without(runs, both)) == left


# The counts of the server ------------------------------------------------------------------------
def state(messages: int, first: int, last: int, *, size: int = 0) -> StreamState:
    deleted = last - first + 1 - messages
    return StreamState(
        messages=messages, bytes=size, first_seq=first, last_seq=last, num_deleted=deleted
    )


def view(one: StreamState, *deleted: tuple[int, int]) -> ServerView:
    return ServerView({0: one}, {0: list(deleted)})


def judged(found: RangeReport, before: ServerView, after: ServerView | None = None) -> ShardResult:
    return judge(0, [found], before, after or before)


def messages(findings: list[Finding]) -> list[str]:
    return [one.message for one in findings]


def test_a_gap_that_the_server_deleted_is_right() -> None:
    found = report(right([1, 2, 5]), last=5)
    result = judged(found, view(state(3, 1, 5, size=found.bytes), (3, 4)))
    assert (result.findings, result.deleted, result.compared) == ([], 2, True)


def test_a_message_that_the_server_counts_must_be_there() -> None:
    found = report(right([1, 2, 5]), last=5)
    result = judged(found, view(state(4, 1, 5, size=found.bytes), (4, 4)))
    assert messages(result.findings) == [
        "shard 0 sequence 3 is missing: the server has it in its count of messages",
        "shard 0: 3 messages were read, but the server counts 4",
    ]


def test_a_deleted_message_must_not_be_there() -> None:
    found = report(right([1, 2, 3]), last=3)
    result = judged(found, view(state(2, 1, 3, size=found.bytes), (2, 2)))
    assert messages(result.findings)[0] == "shard 0 sequence 2 had been deleted, and is there again"


def test_what_is_removed_meanwhile_is_no_finding() -> None:
    found = report(right([6, 8]), first=1, last=9)
    before = view(state(9, 1, 9))
    after = view(state(2, 6, 9), (7, 7), (9, 9))
    result = judged(found, before, after)
    assert (result.findings, result.removed, result.compared) == ([], 7, False)


def test_bytes_are_compared_with_those_of_the_server() -> None:
    found = report(right([1, 2]), last=2)
    result = judged(found, view(state(2, 1, 2, size=found.bytes + 1)))
    expected = (
        f"shard 0: {found.bytes:,} bytes were read, but the server counts {found.bytes + 1:,}"
    )
    assert messages(result.findings) == [expected]


def test_the_counts_of_the_server_fit_each_other() -> None:
    found = report(right([1, 2]), last=2)
    wrong = StreamState(messages=2, bytes=found.bytes, first_seq=1, last_seq=2, num_deleted=1)
    [text] = messages(judged(found, view(wrong)).findings)
    assert text.endswith("with 1 deleted ones have room for 1")


def test_times_are_compared_over_the_borders_of_ranges() -> None:
    rows = right(range(1, 5))
    rows[2]["time"] = rows[3]["time"] = 0
    parts = [report(rows[:2], last=2), report(rows[2:], first=3, last=4)]
    total = sum(one.bytes for one in parts)
    result = judge(0, parts, view(state(4, 1, 4, size=total)), view(state(4, 1, 4, size=total)))
    assert [(one.kind, one.from_seq) for one in result.findings] == [("time", 3)]
