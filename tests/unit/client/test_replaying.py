"""Bulk replay: plans, and splits read to their end however the body is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.calls import Answer, Retries, conclude
from contrail_client.errors import (
    ApiProblem,
    ContrailError,
    ReplayCut,
    UnexpectedAnswer,
    Unreachable,
)
from contrail_client.models import ReplaySplit, StoredMessage
from contrail_client.operations import replaying
from contrail_client.operations.replaying import Bounds, MessageReader

SEQS = [3, 4, 7, 9]
SPLIT = ReplaySplit(shard=0, from_seq=3, to_seq=10, stream="S", incarnation="i1")
PLAN = b"""{"stream": "S", "incarnation": "i1", "splits": [
  {"shard": 0, "from_seq": 3, "to_seq": 6, "messages": 2, "bytes": 20},
  {"shard": 0, "from_seq": 7, "to_seq": 10, "messages": 2, "bytes": 20}]}"""


def body(seqs: list[int], *, announced: int | None = None, end: bool = True) -> bytes:
    lines = [
        b'{"stream":"S","shard":0,"seq":%d,"subject":"a","time":"2026-01-31T08:00:00.000000000Z",'
        b'"headers":{},"data":"m%d"}\n' % (seq, seq)
        for seq in seqs
    ]
    if end:
        count = len(seqs) if announced is None else announced
        lines.append(b'{"end":true,"messages":%d}\n' % count)
    return b"".join(lines)


def read(reader: MessageReader, *chunks: bytes) -> list[int]:
    reader.request()
    found: list[StoredMessage] = []
    for chunk in chunks:
        found += reader.feed(chunk)
    reader.finish()
    assert all(message.payload == b"m%d" % message.seq for message in found)
    return [message.seq for message in found]


def test_plan_is_asked_for_within_bounds() -> None:
    call = replaying.plan("S", Bounds(from_seq=3, subject="a.>"), splits=2)
    assert call.request.path == "/v1/streams/S/replay/plan"
    assert call.request.query == (("splits", "2"), ("from_seq", "3"), ("subject", "a.>"))


def test_splits_know_of_what_they_were_cut() -> None:
    call = replaying.plan("S", Bounds(subject="a.>"), splits=2)
    found = conclude(call, Answer(200, {}, PLAN))
    assert [(split.from_seq, split.to_seq) for split in found.splits] == [(3, 6), (7, 10)]
    assert {(s.stream, s.incarnation, s.subject) for s in found.splits} == {("S", "i1", "a.>")}


def test_split_is_asked_for_with_its_incarnation() -> None:
    request = MessageReader(SPLIT).request()
    assert request.path == "/v1/streams/S/replay"
    assert request.query == (
        ("shard", "0"),
        ("from_seq", "3"),
        ("to_seq", "10"),
        ("incarnation", "i1"),
    )
    assert request.headers == (("Accept", "application/x-ndjson"),)


def test_arrow_request_names_its_columns() -> None:
    request = replaying.arrow_request(SPLIT, ["seq", "data"])
    assert ("columns", "seq,data") in request.query
    assert request.headers == (("Accept", "application/vnd.apache.arrow.stream"),)


@given(cuts=st.lists(st.integers(0, len(body(SEQS))), max_size=8))
def test_messages_are_the_same_however_the_body_is_chunked(cuts: list[int]) -> None:
    whole = body(SEQS)
    edges = [0, *sorted(cuts), len(whole)]
    chunks = [whole[low:high] for low, high in pairwise(edges)]
    reader = MessageReader(SPLIT)
    assert read(reader, *chunks) == SEQS
    assert reader.done


@given(cut=st.integers(0, len(body(SEQS)) - 1))
def test_cut_body_is_continued_without_loss_or_repetition(cut: int) -> None:
    reader = MessageReader(SPLIT)
    reader.request()
    found = [message.seq for message in reader.feed(body(SEQS)[:cut])]
    with pytest.raises(ReplayCut):
        reader.finish()
    rest = dict(reader.request().query)["from_seq"]
    found += read(reader, body([seq for seq in SEQS if seq >= int(rest)]))
    assert found == SEQS
    assert reader.done


def test_split_cut_after_its_last_sequence_needs_nothing_more() -> None:
    reader = MessageReader(ReplaySplit(shard=0, from_seq=3, to_seq=9, stream="S"))
    assert read(reader, body(SEQS, end=False)) == SEQS
    assert reader.done


def test_empty_split_is_done_at_once() -> None:
    assert MessageReader(ReplaySplit(shard=0, from_seq=1, to_seq=0, stream="S")).done


def test_end_mark_with_another_count_is_unexpected() -> None:
    with pytest.raises(UnexpectedAnswer, match="announced 5 messages and sent 4"):
        read(MessageReader(SPLIT), body(SEQS, announced=5))


def test_bytes_after_the_end_mark_are_unexpected() -> None:
    with pytest.raises(UnexpectedAnswer, match="after its end mark"):
        read(MessageReader(SPLIT), body(SEQS), b"{}\n")


def test_line_that_is_no_message_is_unexpected() -> None:
    with pytest.raises(UnexpectedAnswer, match="cannot be read"):
        read(MessageReader(SPLIT), b"<html>\n")


def test_interruptions_without_progress_are_bounded() -> None:
    reader, retries = MessageReader(SPLIT), Retries(attempts=3)
    error = Unreachable("reset")
    assert reader.interrupted(error, retries, 0.0) < reader.interrupted(error, retries, 0.0)
    with pytest.raises(Unreachable):
        reader.interrupted(error, retries, 0.0)


def test_progress_between_interruptions_renews_the_attempts() -> None:
    reader, retries = MessageReader(SPLIT), Retries(attempts=2)
    for line in body(SEQS, end=False).splitlines(keepends=True):
        reader.request()
        reader.feed(line)
        reader.interrupted(ReplayCut("cut"), retries, 0.0)
    with pytest.raises(ReplayCut):
        reader.interrupted(ReplayCut("cut"), retries, 0.0)


@pytest.mark.parametrize(
    "error", [ApiProblem(409, name="incarnation_changed"), UnexpectedAnswer("html")]
)
def test_error_that_will_not_pass_ends_the_replay(error: ContrailError) -> None:
    with pytest.raises(type(error)):
        MessageReader(SPLIT).interrupted(error, Retries(), 0.0)


def test_replica_that_lags_is_asked_again() -> None:
    behind = ApiProblem(503, name="range_not_applied", retryable=True)
    assert MessageReader(SPLIT).interrupted(behind, Retries(), 0.0) > 0
