"""Credit, settling, order and reconnecting of the live client: the pure parts."""

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.calls import Retries
from contrail_client.errors import (
    ApiProblem,
    Denied,
    SocketRefused,
    UnexpectedAnswer,
    Unreachable,
)
from contrail_client.live import frames
from contrail_client.live.credit import CreditWindow
from contrail_client.live.frames import CreditGiven, Sub, decode, encode, may_return
from contrail_client.live.ordered import Begin, Course, begin_at
from contrail_client.live.settling import SETTLED_MAX, Kind, Option, Settlement, Settling
from contrail_client.models import Delivered, Gap
from contrail_client.reconnecting import Reconnecting
from tests.support.each import each

# Credit ------------------------------------------------------------------------------------------


@given(
    msgs=st.integers(1, 20),
    size=st.integers(1, 500),
    sizes=st.lists(st.integers(0, 400), max_size=100),
)
def test_credit_never_runs_dry_and_never_exceeds_the_window(
    msgs: int, size: int, sizes: list[int]
) -> None:
    window = CreditWindow(msgs, size)
    left_msgs, left_bytes = msgs, size
    unread: list[int] = []
    waiting = list(sizes)
    while waiting or unread:
        while waiting and left_msgs > 0 and left_bytes > 0:  # as the server sends
            unread.append(waiting.pop(0))
            left_msgs -= 1
            left_bytes -= unread[-1]
        assert unread, "the server waits for credit and the client for messages"
        assert len(unread) + max(left_msgs, 0) <= msgs
        assert sum(unread[:-1]) <= size
        if window.consumed(unread.pop(0)):
            more_msgs, more_bytes = window.give_back()
            left_msgs += more_msgs
            left_bytes += more_bytes
    assert left_msgs <= msgs
    assert left_bytes <= size


def test_credit_is_given_back_in_parts() -> None:
    window = CreditWindow(10, 1 << 20)
    due = [window.consumed(1) for _ in range(5)]
    assert due == [False, False, False, False, True]
    assert window.give_back() == (5, 5)
    assert window.consumed(1) is False
    window.restart()
    assert window.give_back() == (0, 0)


@each(("msgs", "size"), [(0, 1), (1, 0), (-1, 5)])
def test_window_without_credit_is_refused(msgs: int, size: int) -> None:
    with pytest.raises(ValueError, match="credit"):
        CreditWindow(msgs, size)


def test_size_counts_subject_headers_and_payload_in_bytes() -> None:
    message = Delivered(
        stream="S", seq=1, subject="ü", time="", data=b"12345", headers={"AB": ["é", "x"]}
    )
    assert message.size == 2 + 5 + (2 + 2 + 4) + (2 + 1 + 4)


# Settling ----------------------------------------------------------------------------------------


def settled(held: Sequence[int], *given_: tuple[Kind, Option, int, str | None]) -> list[bytes]:
    """The frames of acknowledgements, as JSON, when the socket holds ``held``."""
    settling: Settling[str] = Settling("s1")
    for seq in held:
        settling.delivered(seq)
    for kind, option, seq, about in given_:
        settling.add(Settlement(kind, option, seq, f"t{seq}", about))
    ids = itertools.count(1)
    return [msgspec.json.encode(frame) for frame in settling.take(lambda _: next(ids))]


def test_acknowledgements_of_a_kind_share_a_frame() -> None:
    assert settled([1, 2, 9], ("ack", None, 9, None), ("ack", None, 1, None)) == [
        b'{"op":"ack","sid":"s1","seqs":[1,9]}'
    ]


def test_neighbours_become_ranges_that_span_no_gap() -> None:
    held = [1, 2, 3, 5, 6, 8, 9, 10, 11]
    assert settled(held, *(("ack", None, seq, None) for seq in held)) == [
        b'{"op":"ack","sid":"s1","seqs":[5,6],"ranges":[[1,3],[8,11]]}'
    ]


def test_kinds_and_options_have_frames_of_their_own() -> None:
    frames_ = settled(
        [1, 2, 3, 4],
        ("nak", "5s", 1, None),
        ("nak", None, 2, None),
        ("term", "why", 3, None),
        ("in_progress", None, 4, None),
    )
    assert frames_ == [
        b'{"op":"nak","sid":"s1","seqs":[1],"delay":"5s"}',
        b'{"op":"nak","sid":"s1","seqs":[2]}',
        b'{"op":"term","sid":"s1","seqs":[3],"reason":"why"}',
        b'{"op":"in_progress","sid":"s1","seqs":[4]}',
    ]


def test_what_the_socket_does_not_hold_is_named_by_its_token() -> None:
    assert settled([2], ("ack", None, 1, None), ("ack", None, 2, None)) == [
        b'{"op":"ack","sid":"s1","seqs":[2],"tokens":["t1"]}'
    ]


def test_sequence_is_held_until_it_is_settled() -> None:
    settling: Settling[str] = Settling("s")
    settling.delivered(1)
    for kind in ("in_progress", "ack", "nak"):
        settling.add(Settlement(kind, None, 1, "t1"))  # type: ignore[arg-type]
    found = [(frame.seqs, frame.tokens) for frame in settling.take(lambda _: 1)]
    assert found == [([1], []), ([1], []), ([], ["t1"])]


def test_lost_socket_leaves_only_tokens() -> None:
    settling: Settling[str] = Settling("s")
    settling.delivered(1)
    settling.add(Settlement("ack", None, 1, "t1"))
    settling.lost()
    [frame] = settling.take(lambda _: 1)
    assert (frame.seqs, frame.tokens) == ([], ["t1"])


def test_who_waits_gets_an_id_shared_unless_it_asks_alone() -> None:
    settling: Settling[str] = Settling("s")
    asked: list[list[str | None]] = []

    def new_id(group: Sequence[Settlement[str]]) -> int:
        asked.append([each.about for each in group])
        return len(asked)

    for seq in (1, 2, 3, 4):
        settling.delivered(seq)
        settling.add(Settlement("ack", None, seq, "", f"w{seq}", alone=seq > 2))
    settling.delivered(5)
    settling.add(Settlement("ack", None, 5, ""))
    assert [frame.id for frame in settling.take(new_id)] == [1, 2, 3, None]
    assert asked == [["w1", "w2"], ["w3"], ["w4"]]
    settling.add(Settlement("ack", None, 6, "", "w6"))
    assert settling.clear() == ["w6"]
    assert not settling


@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)))
def test_frames_name_exactly_what_was_acknowledged(held: set[int], acked: set[int]) -> None:
    settling: Settling[str] = Settling("s")
    for seq in held:
        settling.delivered(seq)
    for seq in acked:
        settling.add(Settlement("ack", None, seq, f"t{seq}"))
    named: set[int] = set()
    for frame in settling.take(lambda _: 1):
        in_ranges = {seq for a, b in frame.ranges for seq in range(a, b + 1)}
        assert in_ranges <= held
        named |= {*frame.seqs, *in_ranges, *(int(token[1:]) for token in frame.tokens)}
    assert named == acked


def test_frames_are_cut_where_the_server_would_refuse_them() -> None:
    settling: Settling[str] = Settling("s")
    for seq in range(1, 2 * SETTLED_MAX + 2):
        settling.add(Settlement("ack", None, seq, "t"))
    assert [len(f.tokens) for f in settling.take(lambda _: 1)] == [SETTLED_MAX, SETTLED_MAX, 1]


# Order -------------------------------------------------------------------------------------------


@each(
    ("start", "expected"),
    [
        ("all", Begin("all")),
        ("last", Begin("last")),
        ("new", Begin("new")),
        (7, Begin("by_start_sequence", opt_start_seq=7)),
        (
            datetime(2026, 1, 2, 4, tzinfo=timezone(timedelta(hours=1))),
            Begin("by_start_time", opt_start_time="2026-01-02T03:00:00.000000Z"),
        ),
        (
            datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC),
            Begin("by_start_time", opt_start_time="2026-01-02T03:04:05.000678Z"),
        ),
    ],
)
def test_beginning_in_the_words_of_a_consumer(start: int | datetime | str, expected: Begin) -> None:
    assert begin_at(start) == expected  # type: ignore[arg-type]


def placed(course: Course) -> tuple[str | None, int | None, str | None]:
    sub = course.resume(Sub(id=1, sid="s", stream="S", credit=CreditGiven(msgs=1, bytes=1)))
    assert sub.ordered
    return sub.deliver_policy, sub.opt_start_seq, sub.opt_start_time


def test_reader_begins_at_its_given_start_until_it_has_a_message() -> None:
    course = Course(Begin("last"))
    assert placed(course) == ("last", None, None)
    assert course.take(5)
    assert placed(course) == ("by_start_sequence", 6, None)


def test_gap_covers_only_what_was_not_taken() -> None:
    course = Course(Begin("all"))
    course.take(5)
    assert course.skip(1, 5, "old") is None
    assert course.skip(3, 9, "gone") == Gap(6, 9, "gone")
    assert placed(course) == ("by_start_sequence", 10, None)
    assert not course.take(9)


@given(
    count=st.integers(1, 60),
    sockets=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 5))),
)
def test_any_number_of_lost_sockets_gives_every_message_once_and_in_order(
    count: int, sockets: list[tuple[int, int, int]]
) -> None:
    course = Course(Begin("all"))
    taken: list[int] = []
    missed: list[int] = []
    first_kept = 1
    for early, run, purged in [*sockets, (0, count, 0)]:
        first_kept = min(first_kept + purged, count)
        policy, begin, _ = placed(course)
        asked = begin if policy == "by_start_sequence" and begin is not None else 1
        gap = course.skip(asked, first_kept - 1, "gone")
        if gap is not None:
            missed += range(gap.first, gap.last + 1)
        at = max(asked - early, first_kept)  # a server may begin a little early
        taken += [seq for seq in range(at, min(at + run, count) + 1) if course.take(seq)]
    assert taken == sorted(set(taken))
    assert sorted(taken + missed) == list(range(1, count + 1))


# Reconnecting ------------------------------------------------------------------------------------

GONE = Unreachable("gone")
RETRIES = Retries(attempts=3, first_pause_s=1.0, longest_pause_s=4.0)


@each(
    ("code", "returns"),
    [
        (None, True),
        (1000, True),
        (1001, True),
        (1006, True),
        (1011, True),
        (1012, True),
        (4000, True),
        (4008, True),
        (4029, True),
        (4050, True),
        (4499, True),
        (4500, False),
        (4501, False),
        (4503, False),
        (4509, False),
        (4513, False),
        (4999, False),
        (1002, False),
        (1003, False),
        (1007, False),
        (1009, False),
    ],
)
def test_close_code_says_whether_to_come_back(code: int | None, returns: bool) -> None:
    assert may_return(code) == returns


def test_server_that_was_never_there_is_given_up_after_a_few_attempts() -> None:
    reconnecting = Reconnecting(RETRIES, 100.0)
    pauses = [reconnecting.lost(GONE, float(n), 0.0) for n in range(3)]
    assert pauses == [0.5, 1.0, None]


def test_server_that_refuses_for_the_moment_is_there() -> None:
    reconnecting = Reconnecting(RETRIES, 100.0)
    starting = ApiProblem(503, name="not_ready", retryable=True, retry_after_s=3.0)
    assert [reconnecting.lost(starting, float(n), 0.0) for n in range(5)] == [3.0] * 5
    assert reconnecting.lost(GONE, 99.0, 0.0) is not None
    assert reconnecting.lost(starting, 100.0, 0.0) is None


def test_server_that_was_there_is_awaited_for_the_time_given() -> None:
    reconnecting = Reconnecting(RETRIES, 100.0)
    reconnecting.opened(0.0)
    assert reconnecting.lost(GONE, 50.0, 0.0) == 0.5
    assert [reconnecting.lost(GONE, 51.0 + n, 0.0) for n in range(4)] == [1.0, 2.0, 2.0, 2.0]
    assert reconnecting.lost(GONE, 149.9, 0.0) == 2.0
    assert reconnecting.lost(GONE, 150.0, 0.0) is None


def test_socket_that_was_up_for_a_while_begins_a_new_outage() -> None:
    reconnecting = Reconnecting(RETRIES, 10.0)
    for n in range(20):
        reconnecting.opened(100.0 * n)
        assert reconnecting.lost(GONE, 100.0 * n + 4.0, 0.0) == 0.5


def test_socket_that_is_lost_at_once_each_time_is_part_of_one_outage() -> None:
    reconnecting = Reconnecting(RETRIES, 10.0)
    reconnecting.opened(0.0)
    pauses = []
    for n in range(12):
        pauses.append(reconnecting.lost(GONE, float(n), 0.0))
        reconnecting.opened(n + 0.5)
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[10] is None


@each("error", [Denied(401), SocketRefused(4500, "no"), UnexpectedAnswer("html"), ApiProblem(404)])
def test_refusal_that_will_not_pass_is_final(error: Exception) -> None:
    reconnecting = Reconnecting(RETRIES, 100.0)
    reconnecting.opened(0.0)
    assert reconnecting.lost(error, 1.0, 0.5) is None  # type: ignore[arg-type]


def test_server_may_ask_for_a_longer_pause() -> None:
    reconnecting = Reconnecting(RETRIES, 100.0)
    busy = ApiProblem(503, retryable=True, retry_after_s=7.0)
    assert reconnecting.lost(busy, 0.0, 0.0) == 7.0


@given(st.floats(0.0, 1.0, exclude_max=True), st.integers(1, 10_000))
def test_pauses_are_jittered_and_bounded(chance: float, attempts: int) -> None:
    reconnecting = Reconnecting(RETRIES, 1e9)
    reconnecting.opened(0.0)
    for _ in range(min(attempts, 50)):
        pause_s = reconnecting.lost(GONE, 1.0, chance)
        assert pause_s is not None
        assert 0.5 <= pause_s <= 4.0


# Frames ------------------------------------------------------------------------------------------


def test_one_frame_and_an_array_of_frames_are_read_alike() -> None:
    one = {"op": "ok", "id": 1}
    [found] = decode(msgspec.msgpack.encode(one))
    assert found == frames.Ok(id=1)
    for count in (0, 1, 15, 16, 70_000):
        assert decode(msgspec.msgpack.encode([one] * count)) == [frames.Ok(id=1)] * count


def test_unknown_fields_are_passed_over() -> None:
    assert decode(msgspec.msgpack.encode({"op": "pong", "new": [1]})) == [frames.Pong()]


@each(
    "message", [b"", b"\xc1", b"\x91", msgspec.msgpack.encode(1), msgspec.msgpack.encode({"a": 1})]
)
def test_what_is_no_frame_is_unexpected(message: bytes) -> None:
    with pytest.raises(UnexpectedAnswer, match="frame"):
        decode(message)


def test_refusal_in_a_frame_is_the_same_error_as_over_http() -> None:
    problem = {"status": 401, "code": 20039, "name": "unauthenticated", "detail": "no token"}
    [found] = decode(msgspec.msgpack.encode({"op": "error", "id": 3, "problem": problem}))
    assert isinstance(found, frames.Refused)
    assert isinstance(found.error, Denied)


def test_defaults_are_not_sent() -> None:
    [pub] = msgspec.msgpack.decode(encode([frames.Pub(id=1, subject="a", data=b"x")]))
    assert pub == {"op": "pub", "id": 1, "subject": "a", "data": b"x"}
