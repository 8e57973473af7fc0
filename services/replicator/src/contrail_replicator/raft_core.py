"""PySyncObj's Raft core (elections, next and match index, commit rule) without the rest of it.

The library's journal, transport, poller, apply loop and pickled commands are replaced. It looks
its private methods up by mangled name, so a subclass can override them; which ones, and that they
behave as audited, holds for one version only.
"""

import random
import time
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
APPLY_PASS_BYTES: Final = 8 << 20
"""What one tick hands out at most, so that a long replay leaves room for other work."""

if VERSION != AUDITED_VERSION:
    raise ImportError(f"pysyncobj {VERSION} is installed, but only {AUDITED_VERSION} is audited")


class _Clock:
    """The core reads one clock of its module; each group sets its own before it enters."""

    def __init__(self) -> None:
        self.read: Callable[[], float] = time.monotonic

    def __call__(self) -> float:
        return self.read()


class _NoPoller:
    def poll(self, _timeout: float) -> None:
        """Nothing to poll: the event loop drives the group."""


def _refuse_pickle(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("Raft commands and messages are never pickled")


_clock: Final = _Clock()


def _replace_library_parts() -> None:
    core = pysyncobj.syncobj
    core.createJournal = lambda journal: journal
    core.createPoller = lambda _kind: _NoPoller()
    core.monotonicTime = _clock
    # Called for the command type of a leader's first entry only: that entry carries no data.
    core._bchr = lambda _command_type: b""
    for module in (pysyncobj.pickle, pysyncobj.journal):
        for name in ("load", "loads", "dump", "dumps"):
            setattr(module, name, _refuse_pickle)


_replace_library_parts()


class _CoreJournal:
    """A group's journal under the names the core calls."""

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
        """The applied index in the store is what lasts."""

    def onOneSecondTimer(self) -> None:  # noqa: N802
        """Nothing is written by timer."""


class _CoreTransport(Transport):  # type: ignore[misc]
    """Takes what the core sends; received messages reach the core by `RaftCore.receive`."""

    def __init__(self, send: Callable[[Any, Message], None]) -> None:
        super().__init__(None, None, [])
        self.send = send

    @property
    def ready(self) -> bool:
        return True


class _Member(Node):  # type: ignore[misc]
    """A node whose hash, and with it the order of the core's sets, is the same in every run."""

    def __hash__(self) -> int:
        return crc32(self.id.encode())


class _NoSnapshots:
    def cancelTransmisstion(self, _node: Node) -> None:  # noqa: N802
        """No snapshot is ever under way inside the core."""


class RaftCore(SyncObj):  # type: ignore[misc]
    """One member of one group. `committed` fills with entries in order, each exactly once."""

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
        self.committed: list[LogEntry] = []
        self._journal = journal
        self._send_to_peer = send
        self._clock = clock
        self._random = random.Random(node_id)
        self._barrier = DurabilityBarrier()
        self._voters: set[str] = set()
        self._leader_commit = 0
        self._may_cut = False
        self._in_tick = False
        self._counting = False
        self._nodes = {peer: _Member(peer) for peer in peers if peer != node_id}
        self._enter()
        super().__init__(
            _Member(node_id),
            self._nodes.values(),
            _configuration(_CoreJournal(journal, applied_index), timings),
            nodeClass=_Member,
            transport=_CoreTransport(self._outgoing),
        )
        self._SyncObj__raftLastApplied = applied_index
        self._SyncObj__serializer = _NoSnapshots()

    def is_core_leader(self) -> bool:
        """Whether this member won the election of its term."""
        return bool(self._SyncObj__raftState == _RAFT_STATE.LEADER)

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

    def propose(self, data: bytes) -> int:
        """Append an entry as leader, send it on, and return its index."""
        self._enter()
        index = self._journal.last_index + 1
        self._journal.append(data, index, self.term())
        if self._nodes:
            self._SyncObj__sendAppendEntries()
        return index

    def tick(self) -> None:
        """Elect, count, commit and send what is due; fills `committed`."""
        self._enter()
        self._in_tick, self._counting = True, self.is_core_leader()
        self._onTick()
        self._in_tick = False

    def handle_durable(self) -> None:
        """Send what waited for the disk, and follow the leader's commit index up to it."""
        if not self.is_core_leader():
            reached = min(self._leader_commit, self._journal.durable_index)
            if reached > self.commit_index():
                self._SyncObj__raftCommitIndex = reached
        for peer, message in self._barrier.release(self._journal.durable_position, self.term()):
            self._send_to_peer(peer, message)

    def link_changed(self, peer: str, connected: bool) -> None:
        """Note that a peer can, or cannot, be sent to."""
        if connected:
            self._SyncObj__onNodeConnected(self._nodes[peer])
        else:
            self._SyncObj__onNodeDisconnected(self._nodes[peer])

    def receive(self, peer: str, message: Message) -> None:
        """Take a message of a peer. Raises LogDivergedError; anything unfit is dropped."""
        self._enter()
        kind, term = message["type"], message["term"]
        screened: Message | None = None
        if term < self.term():
            if kind == guard.APPEND:
                self._tell_term(peer)
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
        if not self._journal.has_room(sum(len(data) for data, _, _ in match.entries)):
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

    def _tell_term(self, peer: str) -> None:
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
        _clock.read = self._clock

    # What the core looks up under its own private names.

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        conf = self._SyncObj__conf
        return self._random.uniform(conf.raftMinTimeout, conf.raftMaxTimeout)

    def _SyncObj__setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802
        if term != self.term():
            self._voters.clear()
        super()._SyncObj__setCurrentTerm(term, voted_for)

    def _SyncObj__getCurrentLogIndex(self) -> int:  # noqa: N802
        # While the core counts what is committed it sees no further than the own disk: it takes
        # for granted that the leader holds every entry.
        journal = self._journal
        return (
            min(journal.last_index, journal.durable_index) if self._counting else journal.last_index
        )

    def _SyncObj__getEntries(  # noqa: N802
        self, from_index: int | None, count: int | None = None, max_bytes: int | None = None
    ) -> list[LogEntry]:
        if from_index is None:
            return []
        if count is None and max_bytes is None:
            # Asked for by a follower only, which cuts whatever it finds behind the first.
            count = 2 if self._may_cut else 1
        return self._journal.slice(from_index, count, max_bytes)

    def _SyncObj__deleteEntriesFrom(self, from_index: int) -> None:  # noqa: N802
        self._journal.truncate(from_index)

    def _SyncObj__onBecomeLeader(self) -> None:  # noqa: N802
        self._counting = False
        super()._SyncObj__onBecomeLeader()
        # An election won within a tick is followed by the counting of that tick.
        self._counting = self._in_tick

    def _SyncObj__sendAppendEntries(self) -> None:  # noqa: N802
        # For a peer that is behind everything held in memory the core would send without end.
        next_index, connected = self._SyncObj__raftNextIndex, self._SyncObj__connectedNodes
        behind = {node for node in connected if next_index[node] <= self._journal.anchor_index}
        connected -= behind
        super()._SyncObj__sendAppendEntries()
        connected |= behind
        for node in behind:
            self._send_to_peer(node.id, self._heartbeat_without_entries())

    def _SyncObj__applyLogEntries(self) -> bool:  # noqa: N802
        self._counting = False
        applied = self._SyncObj__raftLastApplied
        behind = self.commit_index() - applied
        if behind > 0:
            entries = self._journal.slice(applied + 1, behind, APPLY_PASS_BYTES)
            self.committed += entries
            self._SyncObj__raftLastApplied = entries[-1][1]
        return False

    def _checkCommandsToApply(self) -> None:  # noqa: N802
        """Proposals are appended at once; none wait in the core's queue."""

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        """The owner trims the log."""


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
