"""The messages between the members of a group. The transport encodes them; nothing is a dict.

Every message has the `term` of its sender; a receiver with a later one answers with its own. A
*round* is a number that a leader raises with each heartbeat and that the answers repeat: it tells
the leader when the request that is answered was sent. Indexes and terms are unsigned 64-bit
integers.
"""

from typing import Final

import msgspec

RESTORING: Final = 1
"""Flag of a member whose log is not whole: it does not vote, and does not count."""
SUSPECT: Final = 2
"""Flag of a member whose log is whole and whose state is damaged: it leads only to hand on."""
DECLINES: Final = 128
"""Flag of a member that does not want to lead for now: it stops, or its disk is slow."""


class MessageRefusedError(Exception):
    """No member of the group can have sent this message; it has changed nothing."""


class _Message(msgspec.Struct, frozen=True, gc=False):
    term: int
    """The sender's current term."""


class Append(_Message, frozen=True):
    """Entries of a leader, none or more, to follow the entry at `previous_index`."""

    round: int
    """The newest round that the leader has begun."""
    previous_index: int
    previous_term: int
    commit: int
    """The leader's commit index."""
    entries: tuple[tuple[int, bytes], ...]
    """Terms and contents, from index `previous_index` + 1 on. A leader's first entry is empty."""


class Reply(_Message, frozen=True):
    """The answer to `Append`.

    `success`: the logs agree up to `index`, and so far the log is durable. Otherwise the entry
    before the sent ones is missing or differs: `index` is the first one of the term `conflict_term`
    that the follower has in its place, or, with `conflict_term` 0, the index after its last entry.
    """

    round: int
    success: bool
    index: int
    conflict_term: int = 0
    flags: int = 0


class Heartbeat(_Message, frozen=True):
    """A leader's sign of life, at least every 75 ms, which begins a round."""

    round: int
    commit: int


class HeartbeatReply(_Message, frozen=True):
    """The answer to `Heartbeat`, which does not wait for the disk."""

    round: int
    matched: int
    """Index up to which the logs agree, as far as the follower knows in this term."""
    durable: int
    """Index up to which the follower's log is durable."""
    applied: int
    """Index up to which the follower has handed out entries."""
    flags: int = 0


class PreVote(_Message, frozen=True):
    """Asks whether a candidacy in the term after `term` would be voted for. Changes nothing."""

    last_index: int
    last_term: int


class PreVoteReply(_Message, frozen=True):
    """The answer to `PreVote`."""

    asked: int
    """The term of the `PreVote`."""
    granted: bool


class RequestVote(_Message, frozen=True):
    """Asks for a vote in `term`."""

    last_index: int
    last_term: int
    transfer: bool
    """The leader of the term before has asked for this candidacy."""


class VoteReply(_Message, frozen=True):
    """The answer to `RequestVote`; a granted vote is durable."""

    granted: bool


class Transfer(_Message, frozen=True):
    """A leader asks the receiver to become the leader of the next term at once."""


class Resigned(_Message, frozen=True):
    """The leader of `term` has given up; its followers need not wait until they miss it."""


class Readmit(_Message, frozen=True):
    """A leader allows a restoring member to vote again."""

    index: int
    """The member must hold and have applied everything up to this index, durably."""


class Forgotten(_Message, frozen=True):
    """A leader reminds the receiver of what it has acknowledged in this term, and now lacks."""

    index: int
    """The receiver has acknowledged everything up to this index."""


class DigestQuestion(_Message, frozen=True):
    """A leader asks for the digest of what the receiver has applied up to `index`."""

    index: int


class DigestAnswer(_Message, frozen=True):
    """The answer to `DigestQuestion`, with 16 bytes."""

    index: int
    digest: bytes


class Distrust(_Message, frozen=True):
    """A leader tells the receiver that its state at `index` is not that of the majority."""

    index: int


Message = (
    Append
    | Reply
    | Heartbeat
    | HeartbeatReply
    | PreVote
    | PreVoteReply
    | RequestVote
    | VoteReply
    | Transfer
    | Resigned
    | Readmit
    | Forgotten
    | DigestQuestion
    | DigestAnswer
    | Distrust
)
