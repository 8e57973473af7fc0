"""One Raft group on one node: proposals in, committed entries out, in order and once each."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from contrail_replicator.journal import GroupJournal
from contrail_replicator.ports import JournalLog, Message, Timings, Transport
from contrail_replicator.raft_core import RaftCore

MAX_ENTRY_BYTES: Final = 4 << 20
MAX_OUTSTANDING_BYTES: Final = 8 << 20
_TAIL_BYTES: Final = 8 << 20
_PIECE: Final = 64
_DEFAULT_TIMINGS: Final = Timings()


class NotLeaderError(Exception):
    """This node is not the leader, so nothing was appended."""


class GroupBusyError(Exception):
    """Too many bytes are waiting to be committed, so nothing was appended."""


@dataclass(slots=True)
class CommittedEntry:
    """An entry to apply. `data` is empty for a leader's first entry of its term.

    `context` is the argument of `propose`. It is None on all nodes but the proposing one, and there
    too if the node has lost track of the proposal.
    """

    index: int
    term: int
    data: bytes
    context: object | None


@dataclass(slots=True)
class _Proposal:
    term: int
    size: int
    context: object


class RaftGroup:
    """A member of a group. Everything runs on the event loop thread; nothing here blocks.

    `applied_index` is the last index in the store. `on_commit` gets the entries after it, one by
    one, and must not raise. It returns whether it takes the next entry now; after False the group
    hands out nothing until `resume`. `on_role(True)` is called when this node leads and has handed
    out all entries of earlier terms, `on_role(False)` when it no longer leads. `on_lost` gets the
    contexts of proposals whose outcome this node will not learn: they may be committed or not.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        group_id: int,
        node_id: str,
        peers: Sequence[str],
        log: JournalLog,
        transport: Transport,
        applied_index: int,
        on_commit: Callable[[CommittedEntry], bool],
        on_role: Callable[[bool], None],
        on_lost: Callable[[list[object]], None],
        clock: Callable[[], float] = time.monotonic,
        timings: Timings = _DEFAULT_TIMINGS,
    ) -> None:
        """Read the group's log. `peers` are the other members' ids.

        Raises LogGapError if entries are missing between `applied_index` and the log.
        """
        # The group's number; all members use the same.
        self._group_id = group_id
        # The node's log, shared with its other groups.
        self._log = log
        # Sends to the peers, and calls `receive` and `link_changed`.
        self._transport = transport
        # Gets a committed entry, and returns whether it takes the next one now. Like the next two,
        # only `_settle` and its helpers call it, outside the core, because a callback may propose.
        self._on_commit = on_commit
        # Learns that this node leads, or no longer does.
        self._on_role = on_role
        # Gets the contexts of proposals with an unknown outcome.
        self._on_lost = on_lost
        # True in a group of one, which needs no elections.
        self._alone = not [peer for peer in peers if peer != node_id]
        # Applied entries that stay in memory for followers that lag a little.
        self._tail_bytes = 0 if self._alone else _TAIL_BYTES
        # False before `start`, after `stop`, and while the node's log fails.
        self._running = False
        # True after `stop`.
        self._stopped = False
        # True from an `on_commit` that returned False until `resume`.
        self._paused = False
        # True inside `_settle`: a callback that comes back here must not hand out the next entry
        # in the middle of the current one.
        self._settling = False
        # The term in which `on_role` reported that this node leads; 0 while it does not.
        self._led_term = 0
        # The last index handed to `on_commit`. Invariant: <= commit index <= durable index.
        self._applied_index = applied_index
        # This node's proposals without an outcome, by index. While it does not lead, they are
        # committed and wait to be handed out.
        self._proposals: dict[int, _Proposal] = {}
        # The total size of `_proposals`.
        self._outstanding_bytes = 0
        recovered = log.attach(group_id, self.handle_durable)
        # The group's part of the log, and the copies in memory that peers and `on_commit` read.
        self._journal = GroupJournal(group_id, log, recovered, applied_index)
        # Elections and commits.
        self._core = RaftCore(
            node_id, peers, self._journal, applied_index, self._send, clock, timings
        )
        self._journal.trim_to_size(applied_index, self._tail_bytes)
        transport.attach(group_id, self)

    @property
    def is_leader(self) -> bool:
        """True if this node leads and has handed out all entries of earlier terms."""
        return self._led_term > 0

    @property
    def is_alone(self) -> bool:
        """True in a group of one."""
        return self._alone

    @property
    def leader(self) -> str:
        """Id of the member that leads as far as this one knows; empty if it knows none."""
        return self._core.leader()

    @property
    def term(self) -> int:
        """The current term."""
        return self._core.term()

    @property
    def applied_index(self) -> int:
        """Index of the last entry handed to `on_commit`."""
        return self._applied_index

    @property
    def commit_index(self) -> int:
        """Highest index known to be committed."""
        return self._core.commit_index()

    @property
    def durable_index(self) -> int:
        """Highest index that is durable on this node."""
        return self._journal.durable_index

    @property
    def last_index(self) -> int:
        """Index of the newest entry, durable or not."""
        return self._journal.last_index

    @property
    def outstanding_bytes(self) -> int:
        """Bytes of this node's proposals that are not handed out yet."""
        return self._outstanding_bytes

    def start(self) -> None:
        """Start to take part in the group. A group of one elects itself at once."""
        self._running = True
        if self._alone:
            self._core.campaign()
        self.tick()

    def propose(self, data: bytes, context: object) -> int:
        """Append an entry of up to 4 MiB and return its index.

        Raises NotLeaderError or GroupBusyError, and has then appended nothing. Otherwise `context`
        is returned exactly once: with the committed entry, or by `on_lost`.
        """
        size = len(data)
        if not 0 < size <= MAX_ENTRY_BYTES:
            raise ValueError(f"an entry must have 1 to {MAX_ENTRY_BYTES} bytes, not {size}")
        term, outstanding = self._led_term, self._outstanding_bytes
        # One entry may always be open, however large it is.
        if outstanding and outstanding + size > MAX_OUTSTANDING_BYTES:
            raise GroupBusyError(f"group {self._group_id}")
        try:
            # A callback may propose while `_settle` has yet to report that leadership has ended:
            # `_led_term` is stale then, and the core refuses.
            index = self._core.propose(data, term) if term else None
        except BlockingIOError as error:
            raise GroupBusyError(f"group {self._group_id}: {error}") from error
        except OSError as error:
            raise NotLeaderError(f"group {self._group_id}: {error}") from error
        if index is None:
            raise NotLeaderError(f"group {self._group_id}")
        self._proposals[index] = _Proposal(term, size, context)
        self._outstanding_bytes = outstanding + size
        return index

    def handle_durable(self, position: int, index: int) -> None:
        """Note that the log's first `position` records of this group are durable, up to `index`."""
        if self._running:
            self._journal.handle_durable(position, index)
            self._core.handle_durable()
            self._core.tick()
            self._settle()

    def tick(self) -> None:
        """Do due elections, heartbeats and commits. Must be called at least every 50 ms."""
        if self._running:
            self._core.tick()
            self._settle()

    def receive(self, peer: str, message: Message) -> None:
        """Handle a message from a peer.

        Raises LogDivergedError if committed entries differ; this replica must then stop.
        """
        if self._running:
            self._core.receive(peer, message)
            self.tick()

    def resume(self) -> None:
        """Hand out entries again, after `on_commit` has returned False."""
        if not self._stopped:
            self._paused = False
            self._settle()

    def link_changed(self, peer: str, connected: bool) -> None:
        """Note whether messages can be sent to a peer."""
        self._core.link_changed(peer, connected)

    def trim(self, index: int) -> None:
        """Drop entries up to `index` (at most the applied index) from memory."""
        self._journal.trim(min(index, self._applied_index))

    def resign(self) -> None:
        """Give up leadership. A group of one leads again only after `start`."""
        self._core.step_down()
        self._settle()

    def handle_log_failure(self) -> None:
        """Resign and drop all entries that are not durable, because the node's log failed.

        The group takes part again after `handle_log_recovered`.
        """
        self._running = False
        self._core.step_down()
        self._journal.cut_to_durable()
        self._settle()

    def handle_log_recovered(self) -> None:
        """Start again, because the node's log accepts records again."""
        with suppress(OSError):  # the log has failed again, and will report it
            self._journal.restate_end()
            self.start()

    def stop(self) -> None:
        """Leave the group for good. Committed entries that wait for `resume` are not handed out."""
        self._running = False
        self._stopped = self._paused = True
        self._core.step_down()
        self._settle()
        self._transport.detach(self._group_id)
        self._log.detach(self._group_id)

    def _send(self, peer: str, message: Message) -> None:
        self._transport.send(self._group_id, peer, message)

    def _settle(self) -> None:
        """Report the commits and role changes that the last call into the core has caused.

        Callbacks run here, outside the core, so that they may propose.
        """
        if self._settling:
            return
        self._settling = True
        try:
            if self._applied_index < self._core.commit_index():
                self._hand_out()
            self._report_role()
        finally:
            self._settling = False

    def _hand_out(self) -> None:
        """Hand out committed entries, until the owner wants a pause."""
        core, journal = self._core, self._journal
        while not self._paused:
            # In pieces, because entries leave the memory after each.
            applied = self._applied_index
            piece = journal.slice(applied + 1, min(core.commit_index() - applied, _PIECE))
            for data, index, term in piece:
                self._applied_index = index
                context = self._take_context(index, term) if self._proposals else None
                more = self._on_commit(CommittedEntry(index, term, data, context))
                if self._stopped or not more:
                    self._paused = True
                    break
            journal.trim_to_size(self._applied_index, self._tail_bytes)
            if self._applied_index >= core.commit_index():
                return

    def _report_role(self) -> None:
        term = self._core.led_term()
        if self._led_term and term != self._led_term:
            self._led_term = 0
            self._on_role(False)
            self._lose_proposals()
        # The first entry of the term is committed after everything of earlier terms.
        if term and not self._led_term and self._applied_index >= self._core.first_index_of_term():
            self._led_term = term
            self._on_role(True)

    def _take_context(self, index: int, term: int) -> object | None:
        """Return the context of the proposal that became a committed entry."""
        proposal = self._proposals.pop(index, None)
        if proposal is None:
            return None
        self._outstanding_bytes -= proposal.size
        if proposal.term == term:
            return proposal.context
        # Another leader's entry took the place of the proposal.
        self._on_lost([proposal.context])
        return None

    def _lose_proposals(self) -> None:
        """Return the proposals whose outcome is unknown: those that are not known as committed."""
        known = 0 if self._stopped else self._core.commit_index()
        lost = [index for index in self._proposals if index > known]
        contexts = []
        for index in lost:
            proposal = self._proposals.pop(index)
            self._outstanding_bytes -= proposal.size
            contexts.append(proposal.context)
        if contexts:
            self._on_lost(contexts)
