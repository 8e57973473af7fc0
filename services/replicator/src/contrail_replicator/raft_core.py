"""PySyncObj's Raft core (elections, next and match index, commit rule) without the rest of it.

This module replaces the library's journal, transport, poller, apply loop and pickled commands. The
library finds its private methods by their mangled names, so a subclass can override them. The set
of overridden methods and the audit of their behaviour are only valid for one version.
"""

# One module: its methods take the place of the library's, and share their private state.

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import pysyncobj.syncobj
from pysyncobj.syncobj import SyncObj

from contrail_replicator import guard, library
from contrail_replicator.elections import Elections
from contrail_replicator.guard import DurabilityBarrier
from contrail_replicator.handover import Handover, Willingness
from contrail_replicator.journal import GroupJournal
from contrail_replicator.messages import (
    DECLINES,
    RESTORING,
    SUSPECT,
    Append,
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
    VoteReply,
)
from contrail_replicator.messages import Transfer as TransferRequest
from contrail_replicator.ports import LogEntry, Timings
from contrail_replicator.progress import State
from contrail_replicator.readmissions import Readmissions
from contrail_replicator.reads import ReadDone, Reads
from contrail_replicator.replication import Replication
from contrail_replicator.rounds import Rounds
from contrail_replicator.standing import Standing

NOW: Final = float("-inf")


class RaftCore(SyncObj):  # type: ignore[misc]
    """One member of one group. All fields belong to the event loop."""

    is_complete: Callable[[], bool] = staticmethod(lambda: True)
    """Whether this member, restoring, has what it needs beside the log to vote again."""

    # The library's object for the leader; None while none is known.
    _SyncObj__raftLeader: Any

    def __init__(
        self,
        node_id: str,
        peers: Sequence[str],
        journal: GroupJournal,
        send: Callable[[str, Message], None],
        applied: Callable[[], int],
        clock: Callable[[], float],
        timings: Timings,
        on_needs_snapshot: Callable[[str], None],
    ) -> None:
        # The group's entries and hard state, shared with RaftGroup.
        self._journal = journal
        self._send_to_peer = send  # sends a message to a peer
        self._applied = applied  # returns the last index that was handed out
        # Seconds; never goes backwards, and continues while the machine sleeps.
        self._clock = clock
        self._timings = timings  # bounds of elections and leadership
        # Election timeouts. No two members of a group have the same, groups of a node are
        # independent, and a start after another election draws anew. A simulation repeats them.
        self._random = random.Random(f"{node_id} {journal.group} {journal.term}")
        # Messages that must not leave before the entries and votes they promise are durable.
        self._barrier = DurabilityBarrier()
        # Peers that voted for this node in the current term. The library counts votes, not voters,
        # so a repeated vote must not reach it.
        self._voters: set[str] = set()
        # When this candidate asked for votes last.
        self._requested_at = NOW
        # The leader's commit index as far as this log agrees with the leader's; never decreases.
        # The own commit index follows it up to the durable index.
        self._leader_commit = 0
        # Up to where this log agrees with that of the leader of this term.
        self._matched = 0
        # The round of the append message that is being handled.
        self._answered_round = 0
        # True while the core handles an append that conflicts with this log, which it then cuts.
        self._may_cut = False
        self.due = NOW
        """When `tick` and `tick_timers` have something to do; NOW: look whether they have."""
        # True inside `tick`; while the leader's core counts what is committed.
        self._in_tick = self._counting = False
        # By node id: the library's objects for the peers.
        self._nodes = {peer: library.Member(peer) for peer in peers if peer != node_id}
        # When this member may start an election, and support that of another.
        self._elections = Elections(self, tuple(self._nodes), clock, timings, send)
        # The rest belongs to a leader. The term in which it last led.
        self._last_led_term = 0
        self._rounds = Rounds(self._nodes, clock)  # its rounds, and the answers to them
        # How old this member's state is, and how far its peers are.
        self.standing = Standing(self, self._elections, self._rounds, clock, timings)
        self.reads = Reads()  # those that wait for rounds
        self._readmissions = Readmissions()  # members without a whole log
        self._peer_flags: dict[str, int] = {}  # as last heard in this term
        self.willingness = Willingness(journal, clock, timings.slow_disk_s)
        # The attempt to make another member the leader.
        self.handover: Handover | None = None
        # The entries that are sent to peers.
        self._replication = Replication(
            self._nodes, journal, send, self._heading, on_needs_snapshot
        )
        self._enter()
        super().__init__(
            library.Member(node_id),
            self._nodes.values(),
            library.configuration(library.CoreJournal(journal, applied()), timings),
            nodeClass=library.Member,
            transport=library.CoreTransport(self._outgoing),
        )
        # Nothing is applied here; the library only compares this index to warn of cuts below it.
        self._SyncObj__raftLastApplied = 0

    def led_term(self) -> int:
        """The current term if this member won its election, else 0."""
        return self._SyncObj__raftCurrentTerm if self._SyncObj__raftState == library.LEADER else 0

    def leader(self) -> str:
        """The leader of the current term; empty while none is known."""
        known = self._SyncObj__raftLeader
        return "" if known is None else str(known.id)

    def term(self) -> int:
        """The current term."""
        return int(self._SyncObj__raftCurrentTerm)

    def leads(self) -> bool:
        """Whether this member won the election of the current term."""
        return bool(self._SyncObj__raftState == library.LEADER)

    def may_vote(self) -> bool:
        """Whether this member's log is whole."""
        return not self._journal.flags & RESTORING

    def last_entry(self) -> tuple[int, int]:
        """(term, index) of the newest entry."""
        return self._SyncObj__getCurrentLogTerm(), self._journal.last_index

    def commit_index(self) -> int:
        """Highest index known to be committed; never above the own durable index."""
        return int(self._SyncObj__raftCommitIndex)

    def matched(self, peer: str) -> int:
        """Up to where a peer has acknowledged this leader's log."""
        return int(self._SyncObj__raftMatchIndex[self._nodes[peer]])

    def first_index_of_term(self) -> int:
        """Index of the entry this member added when it last became leader, 0 if never."""
        return self._SyncObj__noopIDx or 0

    def campaign(self) -> None:
        """Start an election with the next tick, whatever other members think of it."""
        self._elections.clear()
        self._SyncObj__raftElectionDeadline = NOW
        self.due = NOW

    def step_down(self) -> None:
        """Give up leadership or candidacy; a group of one then waits for `campaign`."""
        self._enter()
        self._SyncObj__setState(library.FOLLOWER)
        self._wait_for_leader()
        self._SyncObj__raftLeader = None
        self._barrier.clear()

    @property
    def is_damaged(self) -> bool:
        """Whether this leader has an entry that its followers refuse."""
        return self._replication.is_damaged

    def hand_over(self, target: str | None) -> bool:
        """Begin to make a member the leader, or the best one; False if none is fit for it."""
        if target is None or not self._is_fit(target):
            fit = [peer for peer in self._nodes if target is None and self._is_fit(peer)]
            if not fit:
                return False
            self._random.shuffle(fit)  # or one node would get all groups of another
            target = max(fit, key=self.matched)
        self.handover = Handover(target, self._clock() + self._timings.election_max_s)
        self.due = NOW
        self._ask_to_take_over()
        return True

    def has_fit_peer(self) -> bool:
        """Whether another member could lead instead of this leader."""
        return any(map(self._is_fit, self._nodes))

    def lagging(self) -> list[str]:
        """The peers of this leader that need a snapshot."""
        return self._replication.lagging()

    def lags_little(self, peer: str, most_bytes: int) -> bool:
        """Whether a peer that is fit to lead lacks less than that many bytes of entries."""
        journal, matched = self._journal, self.matched(peer)
        if not self._is_fit(peer) or matched < journal.anchor_index:
            return False
        lacking = journal.slice(matched + 1, max_bytes=most_bytes)
        return not lacking or lacking[-1][1] == journal.last_index

    def heard_majority_within(self, seconds: float) -> bool:
        """Whether a majority has answered a round that was sent within the last `seconds`."""
        return self.leads() and self._clock() - self._rounds.majority_heard_at() <= seconds

    def read_index(self, done: ReadDone) -> None:
        """Let a read wait for a round, which is sent at once or after the one on its way."""
        self.reads.add(done)
        self._send_round_for_reads()

    def propose(self, data: bytes, term: int) -> int | None:
        """Append an entry as the leader of `term`, send it to the peers, and return its index.

        None, and nothing is appended, if this member no longer leads that term.
        """
        # Two leaders of one term never exist, but a follower that appended an entry of its own in
        # the leader's term would have another entry at the same index and term.
        if self._SyncObj__raftState != library.LEADER or self._SyncObj__raftCurrentTerm != term:
            return None
        journal = self._journal
        index = journal.last_index + 1
        journal.append(data, index, term)
        if self._nodes:
            self._replication.send_new()
        return index

    def holds(self, index: int, term: int) -> bool:
        """Whether the log has a committed entry."""
        return index <= self.commit_index() or self._journal.term_at(index) == term

    def install(self, index: int, term: int) -> bool:
        """Replace the log by the base of a snapshot; False if the log has its entry already.

        A log that has the entry stays: what follows it may have been acknowledged.
        """
        held = self.holds(index, term)
        if not held and self.leads():
            return False
        self._leader_commit = max(self._leader_commit, index)
        if held:
            self._advance_follower()
            return False
        self._journal.reset(index, term)
        self._SyncObj__raftCommitIndex = index
        self._matched = max(self._matched, index)
        return True

    def forget_matched(self) -> None:
        """Note that entries were cut from memory, because the log has failed."""
        self._matched = min(self._matched, self._journal.last_index)

    def tick(self) -> None:
        """Do due commits and heartbeats, and a candidacy that is allowed."""
        self._enter()
        self._in_tick, self._counting = True, self.leads()
        if self._counting:
            # The library notes when answers arrive. What counts is when their rounds were sent.
            for peer, node in self._nodes.items():
                self._SyncObj__lastResponseTime[node] = self._rounds.heard_at(peer)
        self._onTick()
        self._in_tick = False

    def note_done(self, other_due: float | None) -> None:
        """Note that everything due is done, and what is due next: `other_due`, if not before."""
        if self._SyncObj__raftState == library.FOLLOWER:
            due = self._SyncObj__raftElectionDeadline
        elif self.leads() and self.handover is None:
            due = self._SyncObj__newAppendEntriesTime
        else:
            due = NOW
        self.due = due if other_due is None else min(due, other_due)

    def tick_timers(self) -> None:
        """Do what depends on time alone: due pre-votes, repeated requests, a handover."""
        now = self._clock()
        if self.leads():
            handover = self.handover
            if handover is not None and now > handover.deadline:
                self.handover = None
            self._ask_to_take_over()
        elif now > self._SyncObj__raftElectionDeadline and self.may_vote():
            self._elections.ask()
        else:
            self._elections.wait()
            if (
                self._SyncObj__raftState == library.CANDIDATE
                and now - self._requested_at >= self._timings.vote_repeat_s
            ):
                self._request_votes()

    def handle_durable(self) -> None:
        """Send the messages that waited for the disk, and advance a follower's commit index."""
        if self._SyncObj__raftState != library.LEADER:
            self._advance_follower()
        if self._barrier.held:
            for peer, message in self._barrier.release(self._journal.durable_position, self.term()):
                self._send_to_peer(peer, message)

    def commit(self) -> bool:
        """As the leader, commit what a majority holds durably and this member, too.

        Returns whether that is more than before.
        """
        durable, commit = self._journal.durable_index, self._SyncObj__raftCommitIndex
        if durable <= commit or self._SyncObj__raftState != library.LEADER:
            return False
        held = sorted([durable, *self._SyncObj__raftMatchIndex.values()])
        reached = min(durable, held[(len(held) - 1) // 2])
        # Entries of earlier terms are committed by the first one of this term, never before it.
        if not commit < reached >= self.first_index_of_term():
            return False
        self._SyncObj__raftCommitIndex = reached
        return True

    def link_changed(self, peer: str, connected: bool) -> None:
        """Note whether messages can be sent to a peer."""
        if connected:
            self._replication.restart(peer)

    # Messages ------------------------------------------------------------------------------------

    def take_usual(self, peer: str, message: Message) -> bool:
        """Take a message that changes no role: nearly all of them, without the library's detours.

        False, and nothing has changed, if it is for `receive`.
        """
        if isinstance(message, Append):  # first what comes for every publish
            return self._take_next(peer, message)
        if isinstance(message, Reply):
            return self._take_agreed(peer, message)
        return isinstance(message, (Heartbeat, HeartbeatReply)) and self._take_repeated(
            peer, message
        )

    def _take_repeated(self, peer: str, message: Heartbeat | HeartbeatReply) -> bool:
        """Take a heartbeat or an answer that tells nothing but that a peer is there.

        Nothing becomes due by it. A node with many groups gets hundreds of them a second.
        """
        if message.term != self.term():
            return False
        if isinstance(message, Heartbeat):
            if self.leader() != peer or message.commit > self.commit_index():
                return False
            self._put_off_election()
            self._answer_heartbeat(peer, message)
            return True
        if not self._is_repeated(peer, message):
            return False
        self.standing.note_answer(peer, message)
        self._rounds.note_answer(peer, message.round)
        return True

    def _is_repeated(self, peer: str, message: HeartbeatReply) -> bool:
        """Whether an answer says the same as the one before, of a peer that lacks nothing."""
        before = self.standing.answer_of(peer)
        return (
            before is not None
            and before.matched == message.matched == self._journal.last_index
            and before.durable == message.durable
            and before.applied == message.applied
            and before.flags == message.flags == 0
            and self.leads()
            and self.handover is None
            and self.reads.is_empty
            and self._replication.state(peer) is State.REPLICATE
        )

    def _take_next(self, peer: str, message: Append) -> bool:
        """Take the leader's entries that follow this log's last one."""
        journal, term = self._journal, message.term
        index = message.previous_index
        if (
            index != journal.last_index
            or message.previous_term != journal.last_term
            or not message.entries
            or term != self._SyncObj__raftCurrentTerm
            or self._SyncObj__raftLeader is not self._nodes[peer]
            or not journal.has_capacity(sum([len(data) for _, data in message.entries]))
        ):
            return False
        for entry_term, data in message.entries:
            index += 1
            journal.append(data, index, entry_term)
        self._matched = index
        # Counts as committed once the entries are durable, as the reply is sent then.
        self._leader_commit = max(self._leader_commit, min(message.commit, index))
        self._put_off_election()
        reply = Reply(term, message.round, True, index, 0, self._flags())
        self._barrier.hold(journal.position, term, peer, reply)
        return True

    def _take_agreed(self, peer: str, message: Reply) -> bool:
        """Take an acknowledgement of a whole member, which `commit` may then count."""
        if (
            not message.success
            or message.flags
            or message.term != self._SyncObj__raftCurrentTerm
            or self._SyncObj__raftState != library.LEADER
            or message.index > self._journal.last_index
            or self._peer_flags.get(peer) != 0
            or peer in self._rounds.unfit
            or self.handover is not None
            or not self.reads.is_empty
        ):
            return False
        node, matched = self._nodes[peer], self._SyncObj__raftMatchIndex
        matched[node] = max(matched[node], message.index)
        self._rounds.note_answer(peer, message.round)
        self._replication.note_agreed(peer, message.index)
        return True

    def _put_off_election(self) -> None:
        """Note that the leader was heard."""
        self._SyncObj__raftElectionDeadline = self._clock() + self._SyncObj__generateRaftTimeout()
        self._elections.note_leader()

    def receive(self, peer: str, message: Message) -> None:  # noqa: PLR0912 - one line a kind
        """Handle a message from a peer. Raises LogDivergedError."""
        self._enter()
        if isinstance(message, PreVote):
            self._send_to_peer(peer, self._elections.answer(message))
        elif isinstance(message, RequestVote):
            self._handle_request(peer, message)
        elif isinstance(message, PreVoteReply) and message.term <= self.term():
            if self._elections.note_answer(peer, message):
                self._SyncObj__raftElectionDeadline = NOW
        elif message.term < self.term():
            self._answer_stale(peer, message)
        elif isinstance(message, Append):
            self._handle_append(peer, message)
        elif isinstance(message, Heartbeat):
            self._handle_heartbeat(peer, message)
        elif message.term > self.term():
            self._adopt_term(message.term)
        elif isinstance(message, VoteReply):
            if message.granted and peer not in self._voters:
                self._voters.add(peer)
                self._give(peer, {"type": "response_vote", "term": message.term})
        elif isinstance(message, (Reply, HeartbeatReply)):
            if self.leads():
                self._handle_answer(peer, message)
        elif peer == self.leader():
            self._obey(message)

    def _answer_stale(self, peer: str, message: Message) -> None:
        """Tell a leader of an earlier term about this one."""
        if isinstance(message, Append):
            self._send_to_peer(peer, Reply(self.term(), message.round, False, 0))
        elif isinstance(message, Heartbeat):
            self._send_to_peer(peer, HeartbeatReply(self.term(), message.round, 0, 0, 0))

    def _handle_request(self, peer: str, message: RequestVote) -> None:
        if message.term >= self.term() and not self._elections.may_consider(message):
            return  # not even the term counts, or a member that hears nobody could end it
        if message.term > self.term() and not self.may_vote():
            self._adopt_term(message.term)
        if message.term == self.term() and self._SyncObj__votedForNodeId == peer:
            self._promise(peer, VoteReply(self.term(), True))  # the first answer was lost
            return
        if message.term >= self.term() and self.may_vote():
            message_ = {"last_log_index": message.last_index, "last_log_term": message.last_term}
            self._give(peer, {"type": "request_vote", "term": message.term, **message_})
            if self._SyncObj__votedForNodeId == peer:
                return
        self._send_to_peer(peer, VoteReply(self.term(), False))

    def _handle_append(self, peer: str, message: Append) -> None:
        own_commit = self.commit_index()
        match = guard.match_entries(self._journal, message)
        if match is None:
            self._follow(peer, message.term)
            conflict_term, index = guard.conflict_of(self._journal, message)
            flags = self._flags()
            reply = Reply(self.term(), message.round, False, index, conflict_term, flags)
            self._send_to_peer(peer, reply)
            return
        guard.check_no_committed_loss(match, own_commit)
        if not self._journal.has_capacity(sum(len(data) for data, _, _ in match.entries)):
            return
        agreed = min(message.commit, match.last_index)
        self._leader_commit = max(self._leader_commit, agreed)
        self._may_cut, self._answered_round = match.conflict, message.round
        safe = min(self._leader_commit, self._journal.durable_index, match.previous_index)
        message_ = {
            "prevLogIdx": match.previous_index,
            "prevLogTerm": match.previous_term,
            "entries": match.entries,
            "commit_index": max(own_commit, safe),
        }
        self._give(peer, {"type": "append_entries", "term": message.term, **message_})
        self._may_cut = False
        self._matched = max(self._matched, match.last_index)
        self._elections.note_leader()
        self._advance_follower()

    def _handle_heartbeat(self, peer: str, message: Heartbeat) -> None:
        self._follow(peer, message.term)
        agreed = min(message.commit, self._matched)
        self._leader_commit = max(self._leader_commit, agreed)
        self._advance_follower()
        self._answer_heartbeat(peer, message)

    def _answer_heartbeat(self, peer: str, message: Heartbeat) -> None:
        journal = self._journal
        proves = journal.term_at(message.commit) == message.term
        self.standing.note_beat(message.commit, self._applied(), proves=proves)
        reply = HeartbeatReply(
            self.term(),
            message.round,
            self._matched,
            journal.durable_index,
            0 if journal.flags & SUSPECT else self._applied(),
            self._flags(),
        )
        self._send_to_peer(peer, reply)

    def _flags(self) -> int:
        """What a leader is told of this member."""
        return self._journal.flags | (DECLINES if self.willingness.declines else 0)

    def _follow(self, peer: str, term: int) -> None:
        """Note the leader of a term, without comparing logs."""
        message_ = {"commit_index": self.commit_index(), "serialized": None}
        self._give(peer, {"type": "append_entries", "term": term, **message_})
        self._elections.note_leader()

    def _advance_follower(self) -> None:
        # A leader counts what is committed. A follower only knows the leader's commit index.
        if self._SyncObj__raftState != library.LEADER:
            reached = min(self._leader_commit, self._journal.durable_index)
            self._SyncObj__raftCommitIndex = max(self._SyncObj__raftCommitIndex, reached)

    def _obey(self, message: Message) -> None:
        """Do what the leader of this term asks for."""
        if isinstance(message, TransferRequest) and not self._journal.flags:
            self._elections.clear_for_transfer()
            self._SyncObj__raftElectionDeadline = NOW
        elif isinstance(message, Resigned):
            self._elections.note_resigned()
            self._SyncObj__raftLeader = None
            wait = self._random.uniform(0.0, self._timings.heartbeat_s)
            self._SyncObj__raftElectionDeadline = self._clock() + wait
        elif isinstance(message, Readmit):
            held = min(self._matched, self._journal.durable_index, self._applied())
            if held >= message.index and self.is_complete():
                self._journal.save_flags(self._journal.flags & ~RESTORING)
        elif isinstance(message, Forgotten) and self._journal.durable_index < message.index:
            # The disk has lost the end of the log, and perhaps a vote.
            self._journal.save_flags(self._journal.flags | RESTORING)

    def _adopt_term(self, term: int) -> None:
        self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(library.FOLLOWER)
        self._SyncObj__raftLeader = None

    def _give(self, peer: str, message: dict[str, Any]) -> None:
        self._SyncObj__onMessageReceived(self._nodes[peer], message)

    def _outgoing(self, node: Any, message: dict[str, Any]) -> None:
        """Send what the library wants to send, in our form."""
        kind = message["type"]
        if kind == "request_vote":
            self._requested_at = self._clock()
            self._promise(node.id, self._vote_request())
        elif kind == "response_vote":
            self._promise(node.id, VoteReply(self.term(), True))
        elif kind == "next_node_idx" and message["success"]:
            index, flags = message["next_node_idx"] - 1, self._flags()
            reply = Reply(self.term(), self._answered_round, True, index, 0, flags)
            self._promise(node.id, reply)

    def _promise(self, peer: str, message: Message) -> None:
        """Send a message once everything that it relies on is durable."""
        journal = self._journal
        if guard.must_be_durable(message) and journal.durable_position < journal.position:
            self._barrier.hold(journal.position, self.term(), peer, message)
        else:
            self._send_to_peer(peer, message)

    def _vote_request(self) -> RequestVote:
        last_term, last_index = self.last_entry()
        return RequestVote(self.term(), last_index, last_term, self._elections.is_transfer)

    def _request_votes(self) -> None:
        """Ask the peers again that have not voted for this candidate."""
        self._requested_at = self._clock()
        for peer in self._nodes:
            if peer not in self._voters:
                self._promise(peer, self._vote_request())

    # Leading -------------------------------------------------------------------------------------

    def _handle_answer(self, peer: str, message: Reply | HeartbeatReply) -> None:
        node = self._nodes[peer]
        self._peer_flags[peer] = message.flags
        if self._readmissions.note_flags(peer, message.flags):
            # Entries must not become committed by what this member held before.
            self._SyncObj__raftMatchIndex[node] = 0
            self._rounds.forget(peer)
        if not message.flags & RESTORING and peer in self._rounds.unfit:
            self._rounds.unfit.discard(peer)
            # What it has acknowledged did not count. Without new entries, nothing else would tell.
            self._replication.restart(peer)
        self._rounds.note_answer(peer, message.round)
        if isinstance(message, HeartbeatReply):
            self.standing.note_answer(peer, message)
            self._replication.note_heartbeat(peer, message)
            confirmed = self._rounds.confirmed()
            self.reads.note_confirmed(confirmed)
            index = self._readmissions.index_for(peer, message, confirmed)
            if index is not None:
                self._send_to_peer(peer, Readmit(self.term(), index))
        elif not message.success or message.index <= self._journal.last_index:
            if message.success and peer not in self._rounds.unfit:
                message_ = {"next_node_idx": message.index + 1, "success": True, "reset": False}
                self._give(peer, {"type": "next_node_idx", "term": message.term, **message_})
            self._remind(peer, message)
            self._replication.note_reply(peer, message)
        self._send_round_for_reads()
        self._ask_to_take_over()

    def _remind(self, peer: str, reply: Reply) -> None:
        """Tell a peer what it has acknowledged in this term, if its log ends before that.

        The answer may be older than the acknowledgement: the peer looks at its log.
        """
        acknowledged = self.matched(peer)
        if not (reply.success or reply.conflict_term) and reply.index <= acknowledged:
            self._send_to_peer(peer, Forgotten(self.term(), acknowledged))

    def _heading(self) -> tuple[int, int, int]:
        return self.term(), self._rounds.newest, self.commit_index()

    def _begin_round(self) -> None:
        number, term, commit = self._rounds.begin(), self.term(), self.commit_index()
        # Before that, the own commit index may be behind what an earlier leader has committed.
        proves = commit >= self.first_index_of_term()
        self.standing.note_beat(commit, self._applied(), proves=proves)
        if proves:
            self.reads.note_round(number, commit)
            self._readmissions.note_round(number, commit)
        beat = Heartbeat(term, number, commit)
        for peer in self._nodes:
            self._send_to_peer(peer, beat)

    def _send_round_for_reads(self) -> None:
        if self.reads.wants_round and self.commit_index() >= self.first_index_of_term():
            self._begin_round()

    def _is_fit(self, peer: str) -> bool:
        """Whether a peer is whole, and has answered lately."""
        heard_s = self._clock() - self._rounds.heard_at(peer)
        whole = self._peer_flags.get(peer) == 0
        return whole and heard_s <= self._timings.leader_fallback_s

    def _ask_to_take_over(self) -> None:
        handover = self.handover
        if handover is None:
            return
        now = self._clock()
        if handover.is_due(now, self.matched(handover.target), self._journal.last_index):
            handover.next_request = now + self._timings.heartbeat_s
            self._send_to_peer(handover.target, TransferRequest(self.term()))

    def _end_leadership(self) -> None:
        self._replication.stop()
        self.handover = None
        self._peer_flags.clear()
        self.standing.end_term()
        self._wait_for_leader()
        if self._last_led_term == self.term():
            self._elections.note_resigned()
            for peer in self._nodes:
                self._send_to_peer(peer, Resigned(self.term()))

    def _wait_for_leader(self) -> None:
        wait = self._SyncObj__generateRaftTimeout() if self._nodes else float("inf")
        self._SyncObj__raftElectionDeadline = self._clock() + wait

    def _enter(self) -> None:
        """Give the library this group's clock. All groups share its module, so each call does."""
        pysyncobj.syncobj.monotonicTime = self._clock

    # Overrides of private methods, which the core finds by their mangled names.

    def _SyncObj__connectedToAnyone(self) -> bool:  # noqa: N802
        """Whether a candidacy is allowed; the library asks when an election is due."""
        return self._elections.may_campaign()

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        timings = self._timings
        # Inside a tick, a candidacy begins: this is the time until it counts as failed.
        if self._in_tick:
            return self._random.uniform(timings.heartbeat_s, timings.election_min_s)
        wait = self._random.uniform(timings.election_min_s, timings.election_max_s)
        return 2 * wait if self._journal.flags & SUSPECT else wait

    def _SyncObj__setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802
        if term != self.term():
            self._voters.clear()
            # Every later leader has what is committed, even if it has no entry left to compare.
            self._matched = self._applied()
        super()._SyncObj__setCurrentTerm(term, voted_for)

    def _SyncObj__setState(self, state: int) -> None:  # noqa: N802
        led = self.leads()
        super()._SyncObj__setState(state)
        if led and state != library.LEADER:
            self._end_leadership()

    def _SyncObj__getCurrentLogIndex(self) -> int:  # noqa: N802
        # The core assumes that the leader itself holds every entry. While it counts what is
        # committed, it must only see the entries that are durable on this node.
        journal = self._journal
        if self._counting and journal.durable_index < journal.last_index:
            return journal.durable_index
        return journal.last_index

    def _SyncObj__getEntries(  # noqa: N802
        self, from_index: int | None, count: int | None = None, max_bytes: int | None = None
    ) -> list[LogEntry]:
        if from_index is None:
            return []
        if count is None and max_bytes is None:
            # Only a follower asks like this, and it cuts every entry it finds after the first.
            count = 2 if self._may_cut else 1
        return self._journal.slice(from_index, count, max_bytes)

    def _SyncObj__deleteEntriesFrom(self, from_index: int) -> None:  # noqa: N802
        self._journal.truncate(from_index)

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        self._counting = False
        self._last_led_term = self.term()
        self._rounds.start()
        self._readmissions.start()
        self._replication.start(self._journal.last_index + 1)
        super()._SyncObj__onBecomeLeader()
        # If a tick wins the election, the same tick counts afterwards.
        self._counting = self._in_tick

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        """Send the heartbeats that are due, and entries to the peers that lack some."""
        if not self._nodes:
            self._SyncObj__newAppendEntriesTime = float("inf")
            return
        # All groups of a node at one moment, so that their heartbeats share a frame.
        period = self._timings.heartbeat_s
        self._SyncObj__newAppendEntriesTime = (self._clock() // period + 1) * period
        self._begin_round()
        self._replication.beat()

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        """Do nothing but end the counting: the group takes committed entries from the journal."""
        self._counting = False
        return False

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        """Do nothing: `propose` appends at once, so the core's queue is always empty."""

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        """Do nothing: the owner trims the log."""
