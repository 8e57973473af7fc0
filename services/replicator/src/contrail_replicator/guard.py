"""Rules a Raft message must pass before the core sees it, and before it leaves.

The library's core has faults: it cuts a log that does not conflict, moves the commit index on a
snapshot message, and counts acknowledgements of an earlier leadership. So messages are compared
with the log here, and the core only gets what it handles correctly.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from contrail_replicator.journal import GroupJournal
from contrail_replicator.messages import Append, Message, Reply, RequestVote, VoteReply
from contrail_replicator.ports import LogEntry

_HELD_MAX: Final = 4096


class LogDivergedError(Exception):
    """A leader's log differs from this one below the commit index, so one of them is damaged."""


@dataclass(frozen=True, slots=True)
class Match:
    """The result of comparing an append message with this replica's log.

    With `entries` after the previous entry, this log agrees with the leader's up to `last_index`.
    `conflict` says that own entries must be replaced for that.
    """

    previous_index: int
    previous_term: int
    entries: list[LogEntry]
    conflict: bool

    @property
    def last_index(self) -> int:
        """The last index up to which the logs agree."""
        return self.entries[-1][1] if self.entries else self.previous_index


def match_entries(journal: GroupJournal, message: Append) -> Match | None:
    """Compare an append message with the own log; None when the previous entry is not there.

    Entries already held are dropped from the front, so that only a real conflict cuts the log.
    """
    previous_index, previous_term = message.previous_index, message.previous_term
    entries: list[LogEntry] = [
        (data, index, term)
        for index, (term, data) in enumerate(message.entries, previous_index + 1)
    ]
    anchor = journal.anchor_index
    if previous_index < anchor:
        # Everything up to the anchor is committed, so a leader cannot differ there.
        entries = entries[anchor - previous_index :]
        previous_index, previous_term = anchor, journal.anchor_term
    elif journal.term_at(previous_index) != previous_term:
        return None
    for position, (_, index, term) in enumerate(entries):
        own_term = journal.term_at(index)
        if own_term != term:
            return Match(previous_index, previous_term, entries[position:], own_term is not None)
        previous_index, previous_term = index, term
    return Match(previous_index, previous_term, [], conflict=False)


def check_no_committed_loss(match: Match, commit_index: int) -> None:
    """Raise LogDivergedError when a leader's entries would replace committed ones."""
    if match.conflict and match.previous_index < commit_index:
        raise LogDivergedError(
            f"committed entry {match.previous_index + 1} differs from the leader's"
        )


def conflict_of(journal: GroupJournal, message: Append) -> tuple[int, int]:
    """Term and first index of the entries that are in place of the leader's previous entry.

    If the log ends before it: 0, and the index after the last entry.
    """
    index = message.previous_index
    term = journal.term_at(index)
    if term is None:
        return 0, journal.last_index + 1
    # Entries up to the anchor are committed, so the leader has them.
    while index - 1 > journal.anchor_index and journal.term_at(index - 1) == term:
        index -= 1
    return term, index


def must_be_durable(message: Message) -> bool:
    """Whether a message makes a promise: a vote, a candidacy, or an acknowledgement."""
    return isinstance(message, RequestVote) or (
        message.granted
        if isinstance(message, VoteReply)
        else isinstance(message, Reply) and message.success
    )


class _Held(msgspec.Struct, eq=False):
    position: int
    term: int
    peer: str
    message: Message


class DurabilityBarrier:
    """Messages that wait until the log records they rely on are durable."""

    def __init__(self) -> None:
        self.held: deque[_Held] = deque()
        """Oldest first; at most `_HELD_MAX`."""

    def hold(self, position: int, term: int, peer: str, message: Message) -> None:
        """Keep a message. Beyond the bound it is dropped, which Raft treats like a lost message."""
        if len(self.held) < _HELD_MAX:
            self.held.append(_Held(position, term, peer, message))

    def release(self, durable_position: int, term: int) -> list[tuple[str, Message]]:
        """Return the messages that may leave now; those of an earlier term are dropped.

        An acknowledgement given in an earlier term may speak of entries cut since.
        """
        released = []
        while self.held and self.held[0].position <= durable_position:
            held = self.held.popleft()
            if held.term == term:
                released.append((held.peer, held.message))
        return released

    def clear(self) -> None:
        """Drop everything: the records that the messages rely on will never be durable."""
        self.held.clear()
