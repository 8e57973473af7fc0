"""Raft's messages as bytes: any message, and any bytes."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_replicator.messages import (
    Append,
    DigestAnswer,
    DigestQuestion,
    Distrust,
    Forgotten,
    Heartbeat,
    HeartbeatReply,
    Message,
    PreVote,
    PreVoteReply,
    Readmit,
    Reply,
    RequestVote,
    Resigned,
    Transfer,
    VoteReply,
)
from contrail_replicator.peers.codec import (
    APPEND,
    CONTROL_KINDS,
    ENTRIES_MAX,
    decode,
    decode_heartbeat_replies,
    decode_heartbeats,
    encode,
    encode_heartbeat_replies,
    encode_heartbeats,
    wall_ns_of,
)
from contrail_replicator.peers.frames import BODY_BYTES_MAX, Channel, FrameError

numbers = st.integers(0, 2**62 - 1)
flags = st.integers(0, 255)
entries = st.lists(st.tuples(numbers, st.binary(max_size=50)), max_size=5).map(tuple)
single_messages = st.one_of(
    st.builds(Append, numbers, numbers, numbers, numbers, numbers, entries),
    st.builds(Reply, numbers, numbers, st.booleans(), numbers, numbers, flags),
    st.builds(PreVote, numbers, numbers, numbers),
    st.builds(PreVoteReply, numbers, numbers, st.booleans()),
    st.builds(RequestVote, numbers, numbers, numbers, st.booleans()),
    st.builds(VoteReply, numbers, st.booleans()),
    st.builds(Transfer, numbers),
    st.builds(Resigned, numbers),
    st.builds(Readmit, numbers, numbers),
    st.builds(DigestQuestion, numbers, numbers),
    st.builds(DigestAnswer, numbers, numbers, st.binary(min_size=16, max_size=16)),
    st.builds(Distrust, numbers, numbers),
    st.builds(Forgotten, numbers, numbers),
)
groups = st.integers(0, 2**32 - 1)
beats = st.lists(st.tuples(groups, st.builds(Heartbeat, numbers, numbers, numbers)), max_size=5)
replies = st.lists(
    st.tuples(
        groups, st.builds(HeartbeatReply, numbers, numbers, numbers, numbers, numbers, flags)
    ),
    max_size=5,
)


@given(single_messages)
def test_any_message_is_read_as_it_was_written(message: Message) -> None:
    ((channel, kind, body),) = encode(message)
    assert channel is (Channel.APPEND if isinstance(message, Append) else Channel.CONTROL)
    assert decode(kind, memoryview(b"".join(body))) == message


@given(st.integers(0, 2**63 - 1), beats, replies)
def test_heartbeats_are_read_as_they_were_written(
    wall_ns: int, sent: list[tuple[int, Heartbeat]], answered: list[tuple[int, HeartbeatReply]]
) -> None:
    body = b"".join(encode_heartbeats(wall_ns, sent))
    assert (wall_ns_of(body), list(decode_heartbeats(body))) == (wall_ns, sent)
    body = b"".join(encode_heartbeat_replies(wall_ns, answered))
    assert (wall_ns_of(body), list(decode_heartbeat_replies(body))) == (wall_ns, answered)


@given(st.sampled_from([APPEND, *CONTROL_KINDS]), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_kind_of_error(kind: int, body: bytes) -> None:
    with suppress(FrameError):
        decode(kind, body)
    for decoder in (decode_heartbeats, decode_heartbeat_replies):
        with suppress(FrameError):
            list(decoder(body))  # type: ignore[operator]


def test_an_append_with_many_entries_is_sent_as_several() -> None:
    many = tuple((number, b"%d" % number) for number in range(1, 2 * ENTRIES_MAX + 2))
    parts: list[Any] = [
        decode(kind, b"".join(body)) for _, kind, body in encode(Append(9, 8, 0, 0, 7, many))
    ]
    assert [len(part.entries) for part in parts] == [ENTRIES_MAX, ENTRIES_MAX, 1]
    assert sum((part.entries for part in parts), ()) == many
    assert [part.previous_index for part in parts] == [0, ENTRIES_MAX, 2 * ENTRIES_MAX]
    # The term of the entry before each part is that of its own last entry.
    assert [part.previous_term for part in parts] == [0, ENTRIES_MAX, 2 * ENTRIES_MAX]


def test_more_entries_and_larger_numbers_than_a_member_can_have_are_refused() -> None:
    ((_, kind, body),) = encode(Append(1, 1, 1, 1, 1, tuple([(1, b"")] * ENTRIES_MAX)))
    data = bytearray(b"".join(body))
    data[40:44] = (ENTRIES_MAX + 1).to_bytes(4, "little")
    with pytest.raises(FrameError, match="4097 entries; at most 4096"):
        decode(kind, bytes(data))
    for message in (
        Transfer(2**62),
        Append(1, 2**62, 1, 1, 1, ()),
        Append(1, 1, 1, 1, 1, ((2**62, b""),)),
    ):
        ((_, kind, body),) = encode(message)
        with pytest.raises(FrameError, match="no member can have reached"):
            decode(kind, b"".join(body))


def test_the_largest_entries_and_heartbeats_fit_their_frames() -> None:
    ((_, _, body),) = encode(Append(1, 1, 1, 1, 1, ((1, bytes(8 << 20)),)))
    assert sum(map(len, body)) <= BODY_BYTES_MAX[Channel.APPEND]
    reply = HeartbeatReply(1, 1, 1, 1, 1)
    body = encode_heartbeat_replies(1, [(group, reply) for group in range(64)])
    assert sum(map(len, body)) <= BODY_BYTES_MAX[Channel.CONTROL] // 16
