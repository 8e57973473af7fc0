"""When a member may start an election, and when it supports that of another.

The library's core votes, counts and becomes leader. It lacks what keeps a healthy leader in office:
a candidacy needs a majority that misses the leader too (pre-vote), and a member that hears a leader
takes no part in elections (stickiness).
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from contrail_replicator.messages import PreVote, PreVoteReply, RequestVote
from contrail_replicator.ports import Timings

_NEVER: Final = float("-inf")


class Voter(Protocol):
    """The member that takes part in elections, as far as they ask about it."""

    def term(self) -> int:
        """The current term."""

    def leads(self) -> bool:
        """Whether the member leads."""

    def may_vote(self) -> bool:
        """Whether the member's log is whole, so that its vote means something."""

    def last_entry(self) -> tuple[int, int]:
        """(term, index) of the newest entry."""


class Elections:
    """Pre-votes of one member, and how long ago it heard a leader."""

    def __init__(
        self,
        voter: Voter,
        peers: Sequence[str],
        clock: Callable[[], float],
        timings: Timings,
        send: Callable[[str, PreVote], None],
    ) -> None:
        self._voter = voter  # the member itself
        self.peers = tuple(peers)
        """The other members."""
        self._clock = clock  # seconds; never goes backwards
        self._timings = timings  # its bounds
        # Sends a question for pre-votes.
        self._send = send
        # When a leader was heard. A start counts: the leader may not have been heard yet.
        self._heard_at = clock()
        self._due = False  # whether a tick has found the election due
        self._asked_at = _NEVER  # when pre-votes were asked for last
        # The term for which pre-votes are collected, and the peers that gave theirs.
        self._asked_term = -1
        self._supporters: set[str] = set()  # in `_asked_term`
        # The term in which this member may become a candidate.
        self._cleared_term = -1
        self._transfer = False  # whether a leader asked for that candidacy

    @property
    def is_transfer(self) -> bool:
        """Whether the candidacy of this member was asked for by the leader."""
        return self._transfer and self._voter.term() == self._cleared_term + 1

    def may_campaign(self) -> bool:
        """Whether a majority, or the leader, wants this member to become a candidate."""
        return not self.peers or self._cleared_term == self._voter.term()

    def clear_for_transfer(self) -> None:
        """Allow a candidacy without pre-votes, because the leader asks for it."""
        self._cleared_term, self._transfer = self._voter.term(), True

    def clear(self) -> None:
        """Allow a candidacy without pre-votes."""
        self._cleared_term, self._transfer = self._voter.term(), False

    def note_leader(self) -> None:
        """Note a message of the current leader."""
        self._heard_at = self._clock()
        self._due = False
        self._asked_term = -1

    def note_resigned(self) -> None:
        """Note that the leader has given up, so that others may be supported at once."""
        self._heard_at = _NEVER

    def is_loyal(self) -> bool:
        """Whether a leader was heard lately, so that this member supports no other."""
        return self._voter.leads() or (
            self._clock() - self._heard_at < self._timings.election_min_s
        )

    def may_consider(self, request: RequestVote) -> bool:
        """Whether a request for a vote, and its term, count at all."""
        asked_for = request.transfer and request.term == self._voter.term() + 1
        return asked_for or not self.is_loyal()

    def wait(self) -> None:
        """Note that no election is due."""
        self._due = False

    def ask(self) -> None:
        """Ask for pre-votes, if this member has missed the leader for long enough.

        The first tick after that only takes note: messages of the leader may wait in the sockets of
        a process that was busy, and are read before the next tick.
        """
        if not self._due:
            self._due = True
            return
        now, term = self._clock(), self._voter.term()
        if self._asked_term != term:
            self._asked_term, self._asked_at = term, _NEVER
            self._supporters.clear()
        if now - self._asked_at < self._timings.heartbeat_s:
            return
        self._asked_at = now
        last_term, last_index = self._voter.last_entry()
        for peer in self.peers:
            self._send(peer, PreVote(term, last_index, last_term))

    def answer(self, question: PreVote) -> PreVoteReply:
        """Answer a question for a pre-vote, as a candidate too. Nothing changes here."""
        term = self._voter.term()
        granted = (
            question.term >= term
            and self._voter.may_vote()
            and not self.is_loyal()
            and (question.last_term, question.last_index) >= self._voter.last_entry()
        )
        return PreVoteReply(term, question.term, granted)

    def note_answer(self, peer: str, reply: PreVoteReply) -> bool:
        """Count a pre-vote; whether a majority has been reached.

        The peer may be in an earlier term: its answer counts all the same.
        """
        if not (reply.granted and reply.asked == self._asked_term == self._voter.term()):
            return False
        self._supporters.add(peer)
        if len(self._supporters) + 1 <= (len(self.peers) + 1) / 2:
            return False
        self.clear()
        return True
