"""PySyncObj's Raft core (elections, next and match index, commit rule) without the rest of it.

This module replaces the library's journal, transport, poller, apply loop and pickled commands. The
library finds its private methods by their mangled names, so a subclass can override them. The set
of overridden methods and the audit of their behaviour are only valid for one version.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final
from zlib import crc32

import pysyncobj.journal
import pysyncobj.pickle
import pysyncobj.syncobj
from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.syncobj import _RAFT_STATE, SyncObj
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from contrail_replicator import guard
from contrail_replicator.guard import DurabilityBarrier
from contrail_replicator.journal import GroupJournal
from contrail_replicator.ports import LogEntry, Message, Timings

AUDITED_VERSION: Final = "0.3.17"
MESSAGE_BYTES: Final = 8 << 20
"""Entries per append message; every entry is smaller, so the core never splits one."""

if VERSION != AUDITED_VERSION:
    raise ImportError(f"pysyncobj {VERSION} is installed, but only {AUDITED_VERSION} is audited")


class _NoPoller:
    def poll(self, _timeout: float) -> None:
        """Do nothing: the event loop drives the group."""


def _refuse_pickle(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("Raft commands and messages are never pickled")


_LEADER: Final = _RAFT_STATE.LEADER


def _replace_library_parts() -> None:
    core = pysyncobj.syncobj
    core.createJournal = lambda journal: journal
    core.createPoller = lambda _kind: _NoPoller()
    # The library calls this only for the command type of a leader's first entry. Ours has no data.
    core._bchr = lambda _command_type: b""
    for module in (pysyncobj.pickle, pysyncobj.journal):
        for name in ("load", "loads", "dump", "dumps"):
            setattr(module, name, _refuse_pickle)


_replace_library_parts()


class _CoreJournal:
    """A group's journal with the methods that the core calls."""

    def __init__(self, journal: GroupJournal, applied_index: int) -> None:
        self._journal = journal
        self._applied_index = applied_index

    def __len__(self) -> int:
        return len(self._journal)

    def __getitem__(self, position: int) -> LogEntry:
        return self._journal[position]

    def add(self, data: bytes, index: int, term: int) -> None:
        self._journal.append(data, index, term)

    def getCurrentTerm(self) -> int:  # noqa: N802
        return self._journal.term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802
        return self._journal.voted_for

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802
        self._journal.save_hard_state(term, voted_for)

    def getRaftCommitIndex(self) -> int:  # noqa: N802
        return self._applied_index

    def setRaftCommitIndex(self, _index: int) -> None:  # noqa: N802
        """Do nothing: the store keeps the applied index."""

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Do nothing: no write depends on a timer."""


class _CoreTransport(Transport):  # type: ignore[misc]
    """Takes the messages that the core sends. `RaftCore.receive` gives it received ones."""

    def __init__(self, send: Callable[[Any, Message], None]) -> None:
        super().__init__(None, None, [])
        self.send = send

    ready = True
    """The core asks before each tick. Links to peers come and go without it."""


class _Member(Node):  # type: ignore[misc]
    """A node with a stable hash, so that the core's sets have the same order in every run."""

    def __hash__(self) -> int:
        return crc32(self.id.encode())


class _NoSnapshots:
    def cancelTransmisstion(self, _node: Node) -> None:  # noqa: N802
        """Do nothing: the core never sends a snapshot."""


class RaftCore(SyncObj):  # type: ignore[misc]
    """One member of one group. All fields belong to the event loop."""

    def __init__(
        self,
        node_id: str,
        peers: Sequence[str],
        journal: GroupJournal,
        applied_index: int,
        send: Callable[[str, Message], None],
        clock: Callable[[], float],
        timings: Timings,
    ) -> None:
        # The group's entries and hard state, shared with RaftGroup.
        self._journal = journal
        # Sends a message to a peer.
        self._send_to_peer = send
        # Seconds; never goes backwards.
        self._clock = clock
        # Election timeouts. The seed is the node id, so a simulation gives the same run again.
        self._random = random.Random(node_id)
        # Messages that must not leave before the entries and votes they promise are durable.
        self._barrier = DurabilityBarrier()
        # Peers that voted for this node in the current term. The library counts votes, not voters,
        # so a repeated vote must not reach it.
        self._voters: set[str] = set()
        # The leader's commit index as far as this log agrees with the leader's; never decreases.
        # The own commit index follows it up to the durable index.
        self._leader_commit = 0
        # True while the core handles an append that conflicts with this log, which it then cuts.
        self._may_cut = False
        # True inside `tick`.
        self._in_tick = False
        # True while the leader's core counts what is committed; see `__getCurrentLogIndex`.
        self._counting = False
        # The library's objects for the peers, by node id.
        self._nodes = {peer: _Member(peer) for peer in peers if peer != node_id}
        self._enter()
        super().__init__(
            _Member(node_id),
            self._nodes.values(),
            _configuration(_CoreJournal(journal, applied_index), timings),
            nodeClass=_Member,
            transport=_CoreTransport(self._outgoing),
        )
        # Set by the base class to the part that would write and send snapshots.
        self._SyncObj__serializer = _NoSnapshots()

    def led_term(self) -> int:
        """The current term if this member won its election, else 0."""
        return self._SyncObj__raftCurrentTerm if self._SyncObj__raftState == _LEADER else 0

    def leader(self) -> str:
        """The leader of the current term; empty while none is known."""
        known = self._SyncObj__raftLeader
        return "" if known is None else str(known.id)

    def term(self) -> int:
        """The current term."""
        return int(self._SyncObj__raftCurrentTerm)

    def commit_index(self) -> int:
        """Highest index known to be committed; never above the own durable index."""
        return int(self._SyncObj__raftCommitIndex)

    def first_index_of_term(self) -> int:
        """Index of the entry this member added when it last became leader, 0 if never."""
        return self._SyncObj__noopIDx or 0

    def campaign(self) -> None:
        """Start an election with the next tick."""
        self._SyncObj__raftElectionDeadline = float("-inf")

    def step_down(self) -> None:
        """Give up leadership or candidacy; a group of one then waits for `campaign`."""
        self._enter()
        wait = self._SyncObj__generateRaftTimeout() if self._nodes else float("inf")
        self._SyncObj__raftElectionDeadline = self._clock() + wait
        self._SyncObj__setState(_RAFT_STATE.FOLLOWER)
        self._SyncObj__raftLeader = None
        self._barrier.clear()

    def propose(self, data: bytes, term: int) -> int | None:
        """Append an entry as the leader of `term`, send it to the peers, and return its index.

        None, and nothing is appended, if this member no longer leads that term.
        """
        # Two leaders of one term never exist, but a follower that appended an entry of its own in
        # the leader's term would have another entry at the same index and term.
        if self._SyncObj__raftState != _LEADER or self._SyncObj__raftCurrentTerm != term:
            return None
        journal = self._journal
        index = journal.last_index + 1
        journal.append(data, index, term)
        if self._nodes:
            self._enter()
            self._SyncObj__sendAppendEntries()
        return index

    def tick(self) -> None:
        """Do due elections, commits and heartbeats."""
        pysyncobj.syncobj.monotonicTime = self._clock  # as `_enter`: this runs for every publish
        self._in_tick, self._counting = True, self._SyncObj__raftState == _LEADER
        self._onTick()
        self._in_tick = False

    def handle_durable(self) -> None:
        """Send the messages that waited for the disk, and advance a follower's commit index."""
        if self._SyncObj__raftState != _LEADER:
            # A leader's commit index is counted by `tick`. A follower only knows the leader's.
            reached = min(self._leader_commit, self._journal.durable_index)
            self._SyncObj__raftCommitIndex = max(self.commit_index(), reached)
        if self._barrier.held:
            for peer, message in self._barrier.release(self._journal.durable_position, self.term()):
                self._send_to_peer(peer, message)

    def link_changed(self, peer: str, connected: bool) -> None:
        """Note whether messages can be sent to a peer."""
        if connected:
            self._SyncObj__onNodeConnected(self._nodes[peer])
        else:
            self._SyncObj__onNodeDisconnected(self._nodes[peer])

    def receive(self, peer: str, message: Message) -> None:
        """Handle a message from a peer; drop it if it is invalid. Raises LogDivergedError."""
        self._enter()
        kind, term = message["type"], message["term"]
        screened: Message | None = None
        if term < self.term():
            if kind == guard.APPEND:
                self._send_term(peer)
        elif kind == guard.APPEND:
            screened = self._screen_append(message)
        elif kind == guard.REQUEST_VOTE:
            screened = message
        elif term > self.term():
            self._adopt_term(term)
        elif kind == guard.VOTE and peer not in self._voters:
            self._voters.add(peer)
            screened = message
        elif kind == guard.REPLY:
            screened = self._screen_reply(message)
        if screened is not None:
            self._SyncObj__onMessageReceived(self._nodes[peer], screened)
            self._may_cut = False

    def _screen_append(self, message: Message) -> Message | None:
        if "transmission" in message:
            return None
        own_commit = self.commit_index()
        if "prevLogIdx" not in message:
            return {**message, "commit_index": own_commit, "serialized": None}
        try:
            match = guard.match_entries(self._journal, message)
        except ValueError:
            return None
        if match is None:
            return {**message, "commit_index": own_commit}
        guard.check_no_committed_loss(match, own_commit)
        if not self._journal.has_capacity(sum(len(data) for data, _, _ in match.entries)):
            return None
        agreed = min(message["commit_index"], match.last_index)
        self._leader_commit = max(self._leader_commit, agreed)
        self._may_cut = match.conflict
        safe = min(self._leader_commit, self._journal.durable_index, match.previous_index)
        return {
            **message,
            "prevLogIdx": match.previous_index,
            "prevLogTerm": match.previous_term,
            "entries": match.entries,
            "commit_index": max(own_commit, safe),
        }

    def _screen_reply(self, message: Message) -> Message | None:
        end = self._journal.last_index + 1
        if message["next_node_idx"] <= end:
            return message
        return None if message["success"] else {**message, "next_node_idx": end}

    def _adopt_term(self, term: int) -> None:
        self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(_RAFT_STATE.FOLLOWER)
        self._SyncObj__raftLeader = None

    def _send_term(self, peer: str) -> None:
        self._SyncObj__sendNextNodeIdx(self._nodes[peer])

    def _heartbeat_without_entries(self) -> Message:
        return {
            "type": guard.APPEND,
            "term": self.term(),
            "commit_index": self.commit_index(),
            "entries": [],
        }

    def _outgoing(self, node: Any, message: Message) -> None:
        if message["type"] == guard.REPLY:
            message["term"] = self.term()
        journal = self._journal
        if guard.must_be_durable(message) and journal.durable_position < journal.position:
            self._barrier.hold(journal.position, self.term(), node.id, message)
        else:
            self._send_to_peer(node.id, message)

    def _enter(self) -> None:
        """Give the library this group's clock. All groups share its module, so each call does."""
        pysyncobj.syncobj.monotonicTime = self._clock

    # Overrides of private methods, which the core finds by their mangled names.

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        conf = self._SyncObj__conf
        return self._random.uniform(conf.raftMinTimeout, conf.raftMaxTimeout)

    def _SyncObj__setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802
        if term != self.term():
            self._voters.clear()
        super()._SyncObj__setCurrentTerm(term, voted_for)

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
        super()._SyncObj__onBecomeLeader()
        # If a tick wins the election, the same tick counts afterwards.
        self._counting = self._in_tick

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        # If a peer needs entries that are no longer in memory, the core would never stop sending.
        # Such a peer gets heartbeats only.
        next_index, connected = self._SyncObj__raftNextIndex, self._SyncObj__connectedNodes
        cut_off = {node for node in connected if next_index[node] <= self._journal.anchor_index}
        connected -= cut_off
        super()._SyncObj__sendAppendEntries()
        connected |= cut_off
        for node in cut_off:
            self._send_to_peer(node.id, self._heartbeat_without_entries())

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        """Do nothing but end the counting: the group takes committed entries from the journal."""
        self._counting = False
        return False

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        """Do nothing: `propose` appends at once, so the core's queue is always empty."""

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        """Do nothing: the owner trims the log."""


def _configuration(journal: _CoreJournal, timings: Timings) -> Any:
    return SyncObjConf(
        autoTick=False,
        journalFile=journal,
        appendEntriesUseBatch=True,
        appendEntriesBatchSizeBytes=MESSAGE_BYTES,
        appendEntriesPeriod=timings.heartbeat_s,
        raftMinTimeout=timings.election_min_s,
        raftMaxTimeout=timings.election_max_s,
        leaderFallbackTimeout=timings.leader_fallback_s,
        connectionTimeout=2 * timings.election_max_s,
        commandsWaitLeader=False,
        dynamicMembershipChange=False,
    )
