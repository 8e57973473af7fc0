"""Raft's messages as frames. Numbers are little-endian; terms, indexes and rounds are u64.

========= ============== ===================================================================
Kind      Message        Body
========= ============== ===================================================================
1         heartbeats     i64 wall clock in ns, then for each group: u32 group, term, round, commit
2         answers to 1   i64 wall clock in ns, then for each group: u32 group, u8 flags, 3 zeros,
                         term, round, matched, durable, applied
3         Append         term, round, previous index, previous term, commit, u32 count, then for
                         each entry: term, u32 bytes, the bytes
4 to 11,  the others     their fields in order; u8 for flags and for true or false
15 to 18
========= ============== ===================================================================

The frame of kinds 1 and 2 has group 0: they speak for all groups that two nodes share.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import astuple

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
from contrail_replicator.peers.frames import Bytes, Channel, FrameError

HEARTBEATS: Final = 1
HEARTBEAT_REPLIES: Final = 2
APPEND: Final = 3
ENTRIES_MAX: Final = 4096
"""Entries in one append; a message with more is sent as several."""

# Larger numbers cannot come from a member, and would leave no room for later ones.
_NUMBER_MAX: Final = (1 << 62) - 1
_TOO_LARGE: Final = "a term, index or round that no member can have reached"
_WALL: Final = struct.Struct("<q")
_APPEND: Final = struct.Struct("<QQQQQI")
_ENTRY: Final = struct.Struct("<QI")
_HEARTBEAT: Final = struct.Struct("<IQQQ")
_HEARTBEAT_REPLY: Final = struct.Struct("<IB3xQQQQQ")


class _Form(NamedTuple):
    """How a message of fixed size is written: its fields in order, the `numbers` first."""

    kind: int
    message: type[Message]
    layout: struct.Struct
    numbers: int


def _form(kind: int, message: type[Message], layout: str) -> _Form:
    return _Form(kind, message, struct.Struct("<" + layout), len(layout.partition("16s")[0]))


_FORMS: Final = (
    _form(4, Reply, "QQ?QQB"),
    _form(5, PreVote, "QQQ"),
    _form(6, PreVoteReply, "QQ?"),
    _form(7, RequestVote, "QQQ?"),
    _form(8, VoteReply, "Q?"),
    _form(9, Transfer, "Q"),
    _form(10, Resigned, "Q"),
    _form(11, Readmit, "QQ"),
    _form(15, DigestQuestion, "QQ"),
    _form(16, DigestAnswer, "QQ16s"),
    _form(17, Distrust, "QQ"),
    _form(18, Forgotten, "QQ"),
)
_BY_TYPE: Final = {one.message: one for one in _FORMS}
_BY_KIND: Final = {one.kind: one for one in _FORMS}

CONTROL_KINDS: Final = tuple(_BY_KIND)
"""Kinds of messages of one group on the control channel."""


Encoded = tuple[Channel, int, list[Bytes]]
"""A message as kind and body of a frame."""


def encode(message: Message) -> list[Encoded]:
    """Return the frames of a message that speaks for one group.

    Raises TypeError for heartbeats and their answers, which travel together.
    """
    if isinstance(message, Append):
        if len(message.entries) <= ENTRIES_MAX:
            return [(Channel.APPEND, APPEND, _append(message))]
        return [(Channel.APPEND, APPEND, _append(one)) for one in _parts(message)]
    form = _BY_TYPE.get(type(message))
    if form is None:
        raise TypeError(f"{type(message).__name__} has no frame of its own")
    return [(Channel.CONTROL, form.kind, [form.layout.pack(*astuple(message))])]


def decode(kind: int, body: Bytes) -> Message:
    """Return the message of a frame. Raises FrameError."""
    if kind == APPEND:
        return _decode_append(body)
    form = _BY_KIND[kind]
    if len(body) != form.layout.size:
        raise FrameError(f"a frame of kind {kind} with {len(body)} bytes")
    values = form.layout.unpack(body)
    if max(values[: form.numbers]) > _NUMBER_MAX:
        raise FrameError(_TOO_LARGE)
    return form.message(*values)


def _parts(message: Append) -> Iterator[Append]:
    """Several messages that say the same with fewer entries each."""
    entries = message.entries
    for at in range(0, len(entries), ENTRIES_MAX):
        yield Append(
            message.term,
            message.round,
            message.previous_index + at,
            entries[at - 1][0] if at else message.previous_term,
            message.commit,
            entries[at : at + ENTRIES_MAX],
        )


def _append(message: Append) -> list[Bytes]:
    body: list[Bytes] = [
        _APPEND.pack(
            message.term,
            message.round,
            message.previous_index,
            message.previous_term,
            message.commit,
            len(message.entries),
        )
    ]
    for term, data in message.entries:
        body += (_ENTRY.pack(term, len(data)), data)
    return body


def _decode_append(body: Bytes) -> Append:
    try:
        term, number, previous, previous_term, commit, count = _APPEND.unpack_from(body)
        if count > ENTRIES_MAX:
            raise FrameError(f"an append with {count} entries; at most {ENTRIES_MAX} are allowed")
        at, entries, last_term = _APPEND.size, [], 0
        for _ in range(count):
            entry_term, size = _ENTRY.unpack_from(body, at)
            last_term = max(last_term, entry_term)
            start = at + _ENTRY.size
            at = start + size
            entries.append((entry_term, bytes(body[start:at])))
    except struct.error as error:
        raise FrameError("an append that is cut short") from error
    if at != len(body):
        raise FrameError("an append whose entries do not fill it")
    if max(term, number, previous, previous_term, commit, last_term) > _NUMBER_MAX:
        raise FrameError(_TOO_LARGE)
    return Append(term, number, previous, previous_term, commit, tuple(entries))


def encode_heartbeats(wall_ns: int, beats: Iterable[tuple[int, Heartbeat]]) -> list[Bytes]:
    """Return the body for heartbeats by group."""
    pack = _HEARTBEAT.pack
    records = [pack(group, one.term, one.round, one.commit) for group, one in beats]
    return [_WALL.pack(wall_ns), b"".join(records)]


def decode_heartbeats(body: Bytes) -> Iterator[tuple[int, Heartbeat]]:
    """Yield heartbeats by group. Raises FrameError before the first."""
    for group, *values in _records(_HEARTBEAT, body):
        if max(values) > _NUMBER_MAX:
            raise FrameError(_TOO_LARGE)
        yield group, Heartbeat(*values)


def encode_heartbeat_replies(
    wall_ns: int, replies: Iterable[tuple[int, HeartbeatReply]]
) -> list[Bytes]:
    """Return the body for answers to heartbeats by group."""
    pack = _HEARTBEAT_REPLY.pack
    records = [
        pack(group, one.flags, one.term, one.round, one.matched, one.durable, one.applied)
        for group, one in replies
    ]
    return [_WALL.pack(wall_ns), b"".join(records)]


def decode_heartbeat_replies(body: Bytes) -> Iterator[tuple[int, HeartbeatReply]]:
    """Yield answers to heartbeats by group. Raises FrameError."""
    for group, flags, *values in _records(_HEARTBEAT_REPLY, body):
        if max(values) > _NUMBER_MAX:
            raise FrameError(_TOO_LARGE)
        term, number, matched, durable, applied = values
        yield group, HeartbeatReply(term, number, matched, durable, applied, flags)


def wall_ns_of(body: Bytes) -> int:
    """Return the sender's wall clock in a body of heartbeats or answers. Raises FrameError."""
    if len(body) < _WALL.size:
        raise FrameError("heartbeats without a time")
    return int(_WALL.unpack_from(body)[0])


def _records(layout: struct.Struct, body: Bytes) -> Iterator[tuple[Any, ...]]:
    records = memoryview(body)[_WALL.size :]
    if len(body) < _WALL.size or len(records) % layout.size:
        raise FrameError("heartbeats that are cut short")
    return layout.iter_unpack(records)
